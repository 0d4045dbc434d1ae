"""What the inner loops read: packed words, activations, scale and min.

Rows are 64-bit pointers, one for each row of a tile; what moves from step to step is a 32-bit column.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def plane_length(num_bits):
    """Columns in one plane of a block, and words in a block."""
    return 8 * num_bits


@triton.jit
def load_words(word_rows, block, offset, NUM_BITS: tl.constexpr, SPAN: tl.constexpr):
    """Packed words ``[BLOCK_N, SPAN]`` of a block, from word `offset` on."""
    columns = block * plane_length(NUM_BITS) + offset + tl.arange(0, SPAN)
    return tl.load(word_rows[:, None] + columns[None, :])


@triton.jit
def load_x(x_rows, k, K, EVEN_K: tl.constexpr):
    """Activations ``[BLOCK_M, columns]`` of columns k; 0 past the end."""
    ptrs = x_rows[:, None] + k[None, :]
    if EVEN_K:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=k[None, :] < K, other=0.0)


@triton.jit
def load_row(row, k, K, EVEN_K: tl.constexpr):
    """Metadata ``[1, columns]`` of columns k in fp32; 0 past the end."""
    if EVEN_K:
        return tl.load(row + k)[None, :]
    else:
        return tl.load(row + k, mask=k < K, other=0.0)[None, :]


@triton.jit
def load_units(
    rows,
    step,
    unit: tl.constexpr,
    last_group,
    FACTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """FACTOR * scale or min of units `unit` and `unit` + 1 of a step, fp32 ``[BLOCK_N, 2]``.

    ``[BLOCK_N]`` where a step has one unit; 0 where it has fewer units, or rows is None.
    """
    if rows is None or unit >= UNITS:
        return 0.0
    else:
        index = step * UNITS + unit
        if UNITS > 1:
            index = index + tl.arange(0, 2)
        if GROUP_SIZE == 0:
            group = index * 0
        elif GROUP_SIZE == GRAIN:
            group = index
        else:
            group = index * GRAIN // GROUP_SIZE
        if not EVEN_K:
            group = tl.minimum(group, last_group)
        if UNITS > 1:
            return tl.load(rows[:, None] + group[None, :]).to(tl.float32) * FACTOR
        else:
            return tl.load(rows + group).to(tl.float32) * FACTOR


@triton.jit
def load_metadata(
    scale_rows,
    min_rows,
    step,
    last_group,
    MIN_FACTOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Scale of units 0 and 1, of units 2 and 3 of a step, and MIN_FACTOR * min of both, by `load_units`."""
    scale_0 = load_units(scale_rows, step, 0, last_group, 1.0, GROUP_SIZE, GRAIN, UNITS, EVEN_K)
    scale_2 = load_units(scale_rows, step, 2, last_group, 1.0, GROUP_SIZE, GRAIN, UNITS, EVEN_K)
    min_0 = load_units(min_rows, step, 0, last_group, MIN_FACTOR, GROUP_SIZE, GRAIN, UNITS, EVEN_K)
    min_2 = load_units(min_rows, step, 2, last_group, MIN_FACTOR, GROUP_SIZE, GRAIN, UNITS, EVEN_K)
    return scale_0, scale_2, min_0, min_2
