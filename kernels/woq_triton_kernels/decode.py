"""Small M: the kernel that is bound by reading the weights.

One tile of ``out^T [BLOCK_N, BLOCK_M]`` covers all of M; its K range is split among `splits` programs,
so that few output features still fill the chip (`split` brings their shares together).

    program = tile_n * splits + split
"""

import triton
import triton.language as tl
from torch import Tensor

from woq_triton_kernels.launch import Launch
from woq_triton_kernels.mainloop import accumulate_tile
from woq_triton_kernels.split import check_scratch, finish_tile
from woq_triton_kernels.tiles import TileConfig


@triton.jit(do_not_specialize=["M", "splits"])
def _decode_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    min_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    splits,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    SCALE_ON: tl.constexpr,
    GRAIN: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    program = tl.program_id(0)
    tile_n = program // splits
    split = program % splits
    acc = accumulate_tile(
        x_ptr, packed_ptr, scale_ptr, min_ptr, 0, tile_n, split, splits, M, N, K, stride_xm,
        NUM_BITS, GROUP_SIZE, GROUP_DIM, SCALE_ON, GRAIN, ROW_GROUP, SUBNORMAL, UNPACK,
        BLOCK_M, BLOCK_N, STEP, SUM_ROWS, EVEN_K,
    )  # fmt: skip
    finish_tile(
        acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tile_n, 0, tile_n, split, splits, M, N,
        BLOCK_M, BLOCK_N, SPLIT_K, UNPACK,
    )  # fmt: skip


def decode_launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    partials: Tensor | None,
    counters: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    config: TileConfig,
) -> Launch:
    """The launch of ``out = x @ weight.T + bias`` for at most ``config.block_m`` rows of x.

    Args:
        x: ``[M, in_features]`` bf16, fp16 or fp32, ``stride(1) == 1``, M from 1 to ``config.block_m``.
        packed: int16 ``[out_features, packed_width]``, contiguous.
        scale: Float ``[out_features, groups]`` (group_dim 1) or ``[groups, in_features]``, contiguous.
        min: As scale, or None when symmetric.
        bias: Float ``[out_features]``, contiguous, or None.
        out: Float ``[M, out_features]``, contiguous; written.
        partials: fp32 scratch of at least ``tiles * split_k * block_n * block_m`` elements, with the tiles
            of out_features, or None when ``config.split_k`` is 1.
        counters: int32 zeros, at least one a tile of out_features, or None likewise; zeros again
            afterwards. Launches that may overlap must not share scratch or counters.
        num_bits: 4 or 8.
        group_size: Weights in a group.
        group_dim: Dimension that groups run along.
        config: From `pick_tile`.
    """
    (M, K), N = x.shape, packed.shape[0]
    tiles = triton.cdiv(N, config.block_n)
    check_scratch(tiles, config, partials, counters)
    return Launch(
        _decode_kernel,
        tiles * config.split_k,
        (x, packed, scale, min, bias, out, partials, counters),
        M,
        (N, K, K if M == 1 else x.stride(0), config.split_k),
        config.constants(num_bits, group_size, group_dim, N, K),
    )
