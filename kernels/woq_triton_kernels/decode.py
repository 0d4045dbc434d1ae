"""Small M: the kernel that is bound by reading the weights.

One tile of ``out^T [BLOCK_N, BLOCK_M]`` covers all of M; its K range is split among `splits` programs,
so that few output features still fill the chip. Each program stores its fp32 partial tile, then takes
a ticket. The one that draws the last ticket sums the partials in the order of their K ranges, adds
the bias and stores the result: the same bits whatever the order of arrival, nothing zero-filled, no
atomic on values. It also sets the counter back to 0 for the next launch.

    program = tile_n * splits + split         partials [tiles_n, splits, BLOCK_N, BLOCK_M]
                                              counters [tiles_n], 0 between launches
"""

import triton
import triton.language as tl
from torch import Tensor

from woq_triton_kernels.launch import Launch
from woq_triton_kernels.mainloop import accumulate_tile
from woq_triton_kernels.tiles import TileConfig
from woq_triton_kernels.unpack import INTERPRET, round_to


@triton.jit
def store_tile(acc, bias_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add the bias to ``out^T`` and store it as ``out [M, N]``."""
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    tl.store(ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_stores():
    """Wait until this wave's stores have reached the cache.

    A barrier on CDNA does not: the fence of the wave that draws the ticket waits for its own stores only.
    """
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


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
    tile_n = program // splits if SPLIT_K else program
    split = program % splits if SPLIT_K else 0
    acc = accumulate_tile(
        x_ptr, packed_ptr, scale_ptr, min_ptr, 0, tile_n, split, splits, M, N, K, stride_xm,
        NUM_BITS, GROUP_SIZE, GROUP_DIM, SCALE_ON, GRAIN, ROW_GROUP, SUBNORMAL, UNPACK,
        BLOCK_M, BLOCK_N, STEP, SPLIT_K, SUM_ROWS, EVEN_K,
    )  # fmt: skip
    if not SPLIT_K:
        store_tile(acc, bias_ptr, out_ptr, 0, tile_n, M, N, BLOCK_M, BLOCK_N)
    else:
        tile: tl.constexpr = BLOCK_N * BLOCK_M
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partials = partial_ptr + tile_n * (splits * tile) + offsets
        tl.store(partials + split * tile, acc)
        # The barrier orders every thread's stores before the ticket, whose release fence then makes
        # them visible to the whole device; its acquire orders the loads of others' partials after it.
        if UNPACK == "gcn":
            finish_stores()
        tl.debug_barrier()
        ticket = tl.atomic_add(counter_ptr + tile_n, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for index in range(splits):
                # Past the first-level cache, which other programs' stores do not reach.
                total += tl.load(partials + index * tile, cache_modifier=".cg")
            store_tile(total, bias_ptr, out_ptr, 0, tile_n, M, N, BLOCK_M, BLOCK_N)
            tl.store(counter_ptr + tile_n, 0)


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
    return Launch(
        _decode_kernel,
        triton.cdiv(N, config.block_n) * config.split_k,
        (x, packed, scale, min, bias, out, partials, counters),
        M,
        (N, K, K if M == 1 else x.stride(0), config.split_k),
        config.constants(num_bits, group_size, group_dim, N, K),
    )
