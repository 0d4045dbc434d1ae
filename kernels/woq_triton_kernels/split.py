"""The end of a tile: add the bias and store, after adding up what the programs that share its K range made.

Each program stores its fp32 partial tile, then takes a ticket. The one that draws the last ticket sums the
partials in the order of their K ranges, adds the bias and stores the result: the same bits whatever the order
of arrival, nothing zero-filled, no atomic on values. It also sets the counter back to 0 for the next launch.

    partials [tiles, splits, BLOCK_N, BLOCK_M]          counters [tiles], 0 between launches
"""

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def finish_tile(
    acc,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    tile,
    tile_m,
    tile_n,
    split,
    splits,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """Bring one program's share ``out^T [BLOCK_N, BLOCK_M]`` of a tile to the output."""
    if not SPLIT_K:
        store_tile(acc, bias_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    else:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partials = partial_ptr + tile * (splits * size) + offsets
        tl.store(partials + split * size, acc)
        # The barrier orders every thread's stores before the ticket, whose release fence then makes
        # them visible to the whole device; its acquire orders the loads of others' partials after it.
        if UNPACK == "gcn":
            finish_stores()
        tl.debug_barrier()
        ticket = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for index in range(splits):
                # Past the first-level cache, which other programs' stores do not reach.
                total += tl.load(partials + index * size, cache_modifier=".cg")
            store_tile(total, bias_ptr, out_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
            tl.store(counter_ptr + tile, 0)


def check_scratch(tiles: int, config: TileConfig, partials: Tensor | None, counters: Tensor | None) -> None:
    """Raise if a launch would write past its scratch.

    Args:
        tiles: Tiles of the output.
        config: From `pick_tile`, a table or a sweep.
        partials: fp32 scratch, needed if ``config.split_k > 1``.
        counters: int32 scratch, likewise.

    Raises:
        ValueError: The scratch is missing or too small.
    """
    if config.split_k == 1:
        return
    elements = tiles * config.split_k * config.block_n * config.block_m
    if partials is None or counters is None or partials.numel() < elements or counters.numel() < tiles:
        raise ValueError(
            f"{config.split_k} splits of {tiles} tiles {config.block_n}x{config.block_m} need {elements} "
            f"fp32 partials and {tiles} int32 counters; choose a smaller split_k"
        )
