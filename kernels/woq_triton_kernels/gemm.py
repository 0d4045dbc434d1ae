"""Larger M: the fused matrix multiplication.

One program makes one tile of ``out^T [BLOCK_N, BLOCK_M]`` over all of K, in the same inner loops as
`decode`. Programs walk a band of GROUP_N weight tiles down all of M before the next band, so that a
band's packed weights are read from memory once and come from the cache for the other rows of x.
"""

import triton
import triton.language as tl
from torch import Tensor

from woq_triton_kernels.decode import store_tile
from woq_triton_kernels.launch import Launch
from woq_triton_kernels.mainloop import accumulate_tile
from woq_triton_kernels.tiles import TileConfig

GROUP_N = tl.constexpr(8)


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    min_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
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
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_N * tiles_m)
    band_n = tl.minimum(tiles_n - band * GROUP_N, GROUP_N)
    index = program - band * (GROUP_N * tiles_m)
    tile_n = band * GROUP_N + index % band_n
    tile_m = index // band_n
    acc = accumulate_tile(
        x_ptr, packed_ptr, scale_ptr, min_ptr, tile_m, tile_n, 0, 1, M, N, K, stride_xm,
        NUM_BITS, GROUP_SIZE, GROUP_DIM, SCALE_ON, GRAIN, ROW_GROUP, SUBNORMAL, UNPACK,
        BLOCK_M, BLOCK_N, STEP, SPLIT_K, SUM_ROWS, EVEN_K,
    )  # fmt: skip
    store_tile(acc, bias_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)


def gemm_launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
    config: TileConfig,
) -> Launch:
    """``out = x @ weight.T + bias`` for any M; arguments as in `decode_launch`, without scratch."""
    (M, K), N = x.shape, packed.shape[0]
    return Launch(
        _gemm_kernel,
        triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),
        (x, packed, scale, min, bias, out),
        M,
        (N, K, K if M == 1 else x.stride(0)),
        config.constants(num_bits, group_size, group_dim, N, K),
    )
