"""Larger M: the fused matrix multiplication.

A tile of ``out^T [BLOCK_N, BLOCK_M]`` is made in the same inner loops as in `decode`, by `splits` programs
where there are too few tiles to fill the chip. Tiles follow each other along a band of GROUP_N weight tiles
down all of M before the next band, so that a band's packed weights are read from memory once and come from
the cache for the other rows of x.

    program = tile * splits + split
"""

import triton
import triton.language as tl
from torch import Tensor

from woq_triton_kernels.launch import Launch
from woq_triton_kernels.mainloop import accumulate_tile
from woq_triton_kernels.split import check_scratch, finish_tile
from woq_triton_kernels.tiles import TileConfig

GROUP_N = tl.constexpr(8)


@triton.jit(do_not_specialize=["M", "splits"])
def _gemm_kernel(
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
    tile = program // splits if SPLIT_K else program
    split = program % splits if SPLIT_K else 0
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tile // (GROUP_N * tiles_m)
    band_n = tl.minimum(tiles_n - band * GROUP_N, GROUP_N)
    index = tile - band * (GROUP_N * tiles_m)
    tile_n = band * GROUP_N + index % band_n
    tile_m = index // band_n
    acc = accumulate_tile(
        x_ptr, packed_ptr, scale_ptr, min_ptr, tile_m, tile_n, split, splits, M, N, K, stride_xm,
        NUM_BITS, GROUP_SIZE, GROUP_DIM, SCALE_ON, GRAIN, ROW_GROUP, SUBNORMAL, UNPACK,
        BLOCK_M, BLOCK_N, STEP, SUM_ROWS, EVEN_K,
    )  # fmt: skip
    finish_tile(
        acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tile, tile_m, tile_n, split, splits, M, N,
        BLOCK_M, BLOCK_N, SPLIT_K, UNPACK,
    )  # fmt: skip


def gemm_launch(
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
    """The launch of ``out = x @ weight.T + bias`` for any M; arguments as in `decode_launch`.

    Scratch and counters are by tiles of the output.
    """
    (M, K), N = x.shape, packed.shape[0]
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    check_scratch(tiles, config, partials, counters)
    return Launch(
        _gemm_kernel,
        tiles * config.split_k,
        (x, packed, scale, min, bias, out, partials, counters),
        M,
        (N, K, K if M == 1 else x.stride(0), config.split_k),
        config.constants(num_bits, group_size, group_dim, N, K),
    )
