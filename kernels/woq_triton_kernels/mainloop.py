"""The inner loops that `decode` and `gemm` share: one tile of ``out^T = W · x^T`` over a range of steps.

A step is STEP packed blocks of 128 columns. It reads their words for BLOCK_N weight rows, takes the
planes apart and multiplies each with its own run of activation columns. The weights are the left
operand, which may stay in registers. Three ways to bring in scale and min:

======================  ================================================================================
accumulate_groups       on the accumulator, once a group: ``acc += scale * (q · x) + min * sum(x)``.
                        Needs whole spans of columns in each group.
accumulate_scaled_x     group_dim 0 with one row group in the tile: on the activations, once a column.
accumulate_weights      on the weights, before the product. Serves every scheme.
======================  ================================================================================

A span is the run of columns that one product takes: a plane of a block, or half a plane of 8-bit codes
where groups are that short. Rows and columns past the end are clamped to the last one; what they compute
is never stored, except columns of a ragged last block, whose activations read as 0.
"""

# ruff: noqa: RUF005 - Triton knows no unpacking of tuples.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from woq_triton_kernels.loads import load_metadata, load_row, load_words, load_x, plane_length
from woq_triton_kernels.unpack import (
    INTERPRET,
    dot,
    magic,
    norm,
    operand,
    parts,
    round_to,
    split_parity,
)
from woq_triton_kernels.weights import half_norm, half_weights, load_at, metadata_offsets, scaled_weights


@triton.constexpr_function
def span_length(num_bits, grain, dtype):
    """Columns that `accumulate_groups` takes in one product."""
    if num_bits == 8 and grain == 128 and dtype != tl.float32:
        return 32
    return min(grain, plane_length(num_bits))


@triton.constexpr_function
def halves_first(turn, halves):
    """Index of the span (of half a plane) to take in a turn: all that one half of the words holds first."""
    return turn // 4 * 4 + turn % 2 * 2 + turn % 4 // 2 if halves == 2 else turn


@triton.constexpr_function
def unit_in(turn, spans, halves):
    """The unit that a turn takes."""
    return halves_first(turn * spans, halves) // spans


@triton.jit
def column_sums(xt, acc, FACTOR: tl.constexpr, ROWS: tl.constexpr):
    """``acc + FACTOR * sum over columns``, in every row of ``[ROWS, BLOCK_M]``: a product with a constant.

    The matrix unit does it in the accumulator's own layout, where a reduction would need shuffles
    and shared memory. fp32 has no such unit and sums to ``[1, BLOCK_M]``.
    """
    if xt.dtype == tl.float32:
        return acc + FACTOR * tl.sum(xt, axis=0)[None, :]
    else:
        constant = tl.full((ROWS, xt.shape[0]), FACTOR, tl.float32).to(xt.dtype)
        return dot(constant, xt, acc)


@triton.jit
def spread_rows(sums, BLOCK_N: tl.constexpr):
    """Equal rows ``[ROWS, BLOCK_M]`` repeated to ``[BLOCK_N, BLOCK_M]``."""
    ROWS: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    if ROWS == BLOCK_N:
        return sums
    elif ROWS == 1:
        return tl.broadcast_to(sums, (BLOCK_N, BLOCK_M))
    else:
        repeated = tl.broadcast_to(sums[None, :, :], (BLOCK_N // ROWS, ROWS, BLOCK_M))
        return tl.reshape(repeated, (BLOCK_N, BLOCK_M))


@triton.jit
def unit_of(first, second, unit: tl.constexpr, UNITS: tl.constexpr):
    """``[BLOCK_N]`` of one unit, from what `load_metadata` gave for units 0 and 1, 2 and 3."""
    if UNITS == 1:
        return first
    else:
        low, high = tl.split(first if unit < 2 else second)
        return low if unit % 2 == 0 else high


@triton.constexpr_function
def unit_at(index, plane, length, span, grain):
    """The unit that columns of a plane belong to, by the index of their words among a step's."""
    return (index // (length // span) * 128 + plane * length + index % (length // span) * span) // grain


@triton.jit
def unit_column(rows, first, second, unit: tl.constexpr, UNITS: tl.constexpr):
    """`unit_of` in the dtype of its pointers `rows`, as ``[BLOCK_N, 1]``; 0 if those are None."""
    if rows is None:
        return 0.0
    else:
        return unit_of(first, second, unit, UNITS).to(rows.dtype.element_ty)[:, None]


@triton.jit
def accumulate_groups(
    x_rows,
    word_rows,
    scale_rows,
    min_rows,
    first,
    last,
    steps,
    K,
    last_group,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Steps ``first..last`` of a tile with scale and min on the accumulator; fp32 ``[BLOCK_N, BLOCK_M]``.

    The unit of work is GRAIN columns, which surely share a group. Its product of operands with x starts
    not at 0 but at what makes the magic (and the zero code, if symmetric) vanish, a multiple of the sum of
    x, so that no large number is left to cancel later. Metadata is read one step ahead.
    """
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    SPAN: tl.constexpr = span_length(NUM_BITS, GRAIN, DTYPE)
    SPANS: tl.constexpr = GRAIN // SPAN
    UNITS: tl.constexpr = STEP * 128 // GRAIN
    HALVES: tl.constexpr = plane_length(NUM_BITS) // SPAN
    PARTS: tl.constexpr = parts(NUM_BITS, DTYPE)
    MAGIC: tl.constexpr = magic(NUM_BITS, DTYPE, SUBNORMAL)
    NORM: tl.constexpr = norm(NUM_BITS, DTYPE, SUBNORMAL)
    PARITY: tl.constexpr = split_parity(NUM_BITS, DTYPE, SUBNORMAL)
    ZERO: tl.constexpr = 2 ** (NUM_BITS - 1) if min_rows is None else 0
    CENTRED: tl.constexpr = MAGIC + ZERO > 0
    SUM_FACTOR: tl.constexpr = -NORM * (MAGIC + ZERO) if CENTRED else NORM
    MIN_FACTOR: tl.constexpr = -1.0 / MAGIC if MAGIC > 0 else 1.0
    ROWS: tl.constexpr = 1 if DTYPE == tl.float32 else SUM_ROWS
    # 8-bit codes in two parts leave no registers for metadata of the next step.
    AHEAD: tl.constexpr = 0 if PARTS == 2 and BLOCK_M > 8 else 1

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    totals = tl.zeros((ROWS, BLOCK_M), tl.float32)
    scale_0, scale_2, min_0, min_2 = load_metadata(
        scale_rows, min_rows, tl.minimum(first, steps - 1), last_group,
        MIN_FACTOR, GROUP_SIZE, GRAIN, UNITS, EVEN_K,
    )  # fmt: skip
    for step in range(first, last):
        next_scale_0, next_scale_2, next_min_0, next_min_2 = scale_0, scale_2, min_0, min_2
        if GROUP_SIZE > 0:
            next_scale_0, next_scale_2, next_min_0, next_min_2 = load_metadata(
                scale_rows, min_rows, tl.minimum(step + AHEAD, steps - 1), last_group,
                MIN_FACTOR, GROUP_SIZE, GRAIN, UNITS, EVEN_K,
            )  # fmt: skip
        if AHEAD == 0:
            scale_0, scale_2, min_0, min_2 = next_scale_0, next_scale_2, next_min_0, next_min_2
        words = ()
        for index in tl.static_range(STEP * HALVES):
            block = step * STEP + index // HALVES
            if not EVEN_K:
                block = tl.minimum(block, (K - 1) // 128)
            words = words + (load_words(word_rows, block, index % HALVES * SPAN, NUM_BITS, SPAN),)
        for turn in tl.static_range(UNITS):
            xts = ()
            sums = tl.zeros((ROWS, BLOCK_M), tl.float32)
            for turn_span in tl.static_range(turn * SPANS, (turn + 1) * SPANS):
                k = step * (STEP * 128) + halves_first(turn_span, HALVES) * SPAN + tl.arange(0, SPAN)
                xt = tl.trans(load_x(x_rows, k, K, EVEN_K))
                sums = column_sums(xt, sums, SUM_FACTOR, ROWS)
                xts = xts + (xt,)
            smaller = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            product = spread_rows(sums, BLOCK_N) if CENTRED else smaller
            for index in tl.static_range(SPANS * PARTS):
                product, smaller = multiply_span(
                    words, xts[index // PARTS], product, smaller,
                    halves_first(turn * SPANS + index // PARTS, HALVES), index % PARTS,
                    SPAN, NUM_BITS, SUBNORMAL, UNPACK,
                )  # fmt: skip
            if PARITY:
                product += smaller * 16.0
            if GROUP_SIZE == 0:
                acc += product
                totals += sums
            else:
                scale = unit_of(scale_0, scale_2, unit_in(turn, SPANS, HALVES), UNITS)
                acc += scale[:, None] * product
                if min_rows is not None:
                    minimum = unit_of(min_0, min_2, unit_in(turn, SPANS, HALVES), UNITS)
                    acc += minimum[:, None] * spread_rows(sums, BLOCK_N)
        scale_0, scale_2, min_0, min_2 = next_scale_0, next_scale_2, next_min_0, next_min_2
    if GROUP_SIZE == 0:
        acc *= unit_of(scale_0, scale_2, 0, UNITS)[:, None]
        if min_rows is not None:
            acc += unit_of(min_0, min_2, 0, UNITS)[:, None] * spread_rows(totals, BLOCK_N)
    return acc * (1.0 / NORM)


@triton.jit
def multiply_span(
    words, xt, product, smaller, span: tl.constexpr, part: tl.constexpr, SPAN: tl.constexpr,
    NUM_BITS: tl.constexpr, SUBNORMAL: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Add one operand's product to `product`, or to `smaller` where it comes 16 times smaller."""
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    plane: tl.constexpr = span * SPAN % 128 // LENGTH
    tile: tl.constexpr = span * SPAN // 128 * (LENGTH // SPAN) + span * SPAN % LENGTH // SPAN
    weights = operand(words[tile], plane, part, NUM_BITS, xt.dtype, SUBNORMAL, UNPACK)
    if split_parity(NUM_BITS, xt.dtype, SUBNORMAL) and plane % 2 == 0:
        smaller = dot(weights, xt, smaller)
    else:
        product = dot(weights, xt, product)
    return product, smaller


@triton.jit
def accumulate_scaled_x(
    x_rows,
    word_rows,
    scale_row,
    min_row,
    first,
    last,
    K,
    NUM_BITS: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Steps ``first..last`` of a tile whose rows share their scales; fp32 ``[BLOCK_N, BLOCK_M]``.

    With ``xs = x * scale`` rounded to x's dtype, and z the zero code, it sums

        ``(q - z) * xs + min * x + z * scale * x``

    so that the rounding meets codes centred on 0, and every term with a code takes the same xs. Rounding
    xs in bf16 is like an error of a weight by at most 2**-8 of half its group's range, with 8 bits 1/2 of
    the step between codes: no more than the quantization, though not beside the weights of a row that is a
    hundredth of its neighbours in the group. `pick_tile` does not choose it in fp16, where xs underflows.
    """
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    META: tl.constexpr = scale_row.dtype.element_ty
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    PLANES: tl.constexpr = 128 // LENGTH
    PARTS: tl.constexpr = parts(NUM_BITS, DTYPE)
    MAGIC: tl.constexpr = magic(NUM_BITS, DTYPE, SUBNORMAL)
    NORM: tl.constexpr = norm(NUM_BITS, DTYPE, SUBNORMAL)
    PARITY: tl.constexpr = split_parity(NUM_BITS, DTYPE, SUBNORMAL)
    ZERO: tl.constexpr = 2 ** (NUM_BITS - 1)
    # Products of x with metadata of its own half-precision dtype are exact in the matrix unit.
    EXACT: tl.constexpr = META == DTYPE and DTYPE != tl.float32
    ROWS: tl.constexpr = 1 if DTYPE == tl.float32 else SUM_ROWS

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # One product serves both sums: in registers of the matrix unit's operand, rows 0-7 lie beside 8-15.
    is_min = tl.arange(0, ROWS) // 8 % 2 == 0
    metadata_sums = tl.zeros((ROWS, BLOCK_M), tl.float32)
    rest = tl.zeros((LENGTH, BLOCK_M), tl.float32)
    for step in range(first, last):
        for index in tl.static_range(STEP):
            block = step * STEP + index
            if not EVEN_K:
                block = tl.minimum(block, (K - 1) // 128)
            words = (load_words(word_rows, block, 0, NUM_BITS, LENGTH),)
            xts = ()
            sums = tl.zeros((ROWS, BLOCK_M), tl.float32)
            for plane in tl.static_range(PLANES):
                k = (step * STEP + index) * 128 + plane * LENGTH + tl.arange(0, LENGTH)
                xt = tl.trans(load_x(x_rows, k, K, EVEN_K))
                scale = load_row(scale_row, k, K, EVEN_K)
                if EXACT and not INTERPRET:
                    scaled = xt * tl.trans(scale)
                else:
                    scaled = round_to(xt.to(tl.float32) * tl.trans(scale).to(tl.float32), DTYPE)
                sums = column_sums(scaled, sums, -NORM * (MAGIC + ZERO), ROWS)
                if min_row is not None:
                    minimum = load_row(min_row, k, K, EVEN_K)
                    if EXACT:
                        metadata_sums = dot(tl.where(is_min[:, None], minimum, scale), xt, metadata_sums)
                    else:
                        middle = minimum.to(tl.float32) + ZERO * scale.to(tl.float32)
                        rest += tl.trans(middle) * xt.to(tl.float32)
                xts = xts + (scaled,)
            smaller = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            product = spread_rows(sums, BLOCK_N)
            for part in tl.static_range(PLANES * PARTS):
                product, smaller = multiply_span(
                    words, xts[part // PARTS], product, smaller, part // PARTS, part % PARTS, LENGTH,
                    NUM_BITS, SUBNORMAL, UNPACK,
                )  # fmt: skip
            if PARITY:
                product += smaller * 16.0
            acc += product
    acc *= 1.0 / NORM
    if min_row is not None:
        if EXACT:
            share = tl.where(is_min, 2.0 / ROWS, 2.0 * ZERO / ROWS)
            acc += tl.sum(metadata_sums * share[:, None], axis=0)[None, :]
        else:
            acc += tl.sum(rest, axis=0)[None, :]
    return acc


@triton.jit
def accumulate_weights(
    x_rows,
    word_rows,
    scale_ptr,
    min_ptr,
    first_n,
    n,
    first,
    last,
    K,
    last_group,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    GRAIN: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Steps ``first..last`` of a tile, weights rounded to x's dtype; fp32 ``[BLOCK_N, BLOCK_M]``."""
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    META: tl.constexpr = scale_ptr.dtype.element_ty
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    # A row of metadata with one element a thread would be read without the load pipeline.
    HALVE: tl.constexpr = GRAIN == LENGTH // 2 if GROUP_DIM == 1 else LENGTH == 2 * SUM_ROWS
    SPAN: tl.constexpr = LENGTH // 2 if HALVE else LENGTH
    HALF: tl.constexpr = UNPACK == "ptx" and META == DTYPE and DTYPE != tl.float32
    UNITS: tl.constexpr = STEP * 128 // GRAIN
    # Where whole spans share a group, each is read once, a step ahead.
    AHEAD: tl.constexpr = GROUP_DIM == 1 and GRAIN >= SPAN and UNITS <= 4
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale_rows, min_rows = scale_ptr, min_ptr
    scale_0, scale_2, min_0, min_2 = 0.0, 0.0, 0.0, 0.0
    if AHEAD:
        first_group = (first_n + n) * (last_group + 1)
        scale_rows = scale_ptr + first_group
        if min_ptr is not None:
            min_rows = min_ptr + first_group
        scale_0, scale_2, min_0, min_2 = load_metadata(
            scale_rows, min_rows, tl.minimum(first, tl.cdiv(K, STEP * 128) - 1), last_group,
            1.0, GROUP_SIZE, GRAIN, UNITS, EVEN_K,
        )  # fmt: skip
    for step in range(first, last):
        next_scale_0, next_scale_2, next_min_0, next_min_2 = scale_0, scale_2, min_0, min_2
        if AHEAD and GROUP_SIZE > 0:
            next_scale_0, next_scale_2, next_min_0, next_min_2 = load_metadata(
                scale_rows, min_rows, tl.minimum(step + 1, tl.cdiv(K, STEP * 128) - 1), last_group,
                1.0, GROUP_SIZE, GRAIN, UNITS, EVEN_K,
            )  # fmt: skip
        for index in tl.static_range(STEP * (LENGTH // SPAN)):
            block = step * STEP + index // (LENGTH // SPAN)
            offset = index % (LENGTH // SPAN) * SPAN
            if not EVEN_K:
                block = tl.minimum(block, (K - 1) // 128)
            words = load_words(word_rows, block, offset, NUM_BITS, SPAN)
            for plane in tl.static_range(128 // LENGTH):
                start = (step * STEP + index // (LENGTH // SPAN)) * 128 + plane * LENGTH + offset
                k = start + tl.arange(0, SPAN)
                xt = tl.trans(load_x(x_rows, k, K, EVEN_K))
                if AHEAD:
                    scale = unit_column(
                        scale_rows, scale_0, scale_2, unit_at(index, plane, LENGTH, SPAN, GRAIN), UNITS
                    )
                    minimum = unit_column(
                        min_rows, min_0, min_2, unit_at(index, plane, LENGTH, SPAN, GRAIN), UNITS
                    )
                else:
                    offsets = metadata_offsets(
                        first_n, n, k, start, K, last_group, GROUP_SIZE, GROUP_DIM, ROW_GROUP, SPAN, EVEN_K
                    )
                    scale, minimum = load_at(scale_ptr, offsets), load_at(min_ptr, offsets)
                if HALF:
                    weights = half_weights(words, scale, minimum, min_ptr is None, plane, NUM_BITS)
                else:
                    weights = scaled_weights(words, scale, minimum, min_ptr is None, plane, NUM_BITS)
                    weights = round_to(weights, DTYPE)
                acc = dot(weights, xt, acc)
        scale_0, scale_2, min_0, min_2 = next_scale_0, next_scale_2, next_min_0, next_min_2
    if HALF:
        acc *= 1.0 / half_norm(DTYPE)
    return acc


@triton.jit
def accumulate_tile(
    x_ptr,
    packed_ptr,
    scale_ptr,
    min_ptr,
    tile_m,
    tile_n,
    split,
    splits,
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
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``out^T`` of one tile over one of `splits` parts of K, fp32 ``[BLOCK_N, BLOCK_M]``, without bias."""
    steps = tl.cdiv(K, STEP * 128)
    # Not known to be 0 for a single part either: the compiler would then compute each address anew.
    first = split * steps // splits
    last = (split + 1) * steps // splits
    m = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    x_rows = x_ptr + m * stride_xm
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    n = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - tile_n * BLOCK_N)
    width = tl.cdiv(K, 128) * plane_length(NUM_BITS)
    word_rows = packed_ptr + (first_n + n) * width
    last_group = ((K if GROUP_DIM == 1 else N) - 1) // GROUP_SIZE if GROUP_SIZE > 0 else 0
    if SCALE_ON == "accumulator":
        groups = last_group + 1
        if EVEN_K and GROUP_SIZE == GRAIN:
            # The same number, but the compiler sees that rows begin at a multiple of a step's groups.
            groups = steps * (STEP * 128 // GRAIN)
        return accumulate_groups(
            x_rows, word_rows, scale_ptr + (first_n + n) * groups,
            None if min_ptr is None else min_ptr + (first_n + n) * groups,
            first, last, steps, K, last_group,
            NUM_BITS, GROUP_SIZE, GRAIN, SUBNORMAL, UNPACK, BLOCK_M, BLOCK_N, STEP, SUM_ROWS, EVEN_K,
        )  # fmt: skip
    elif SCALE_ON == "x":
        group = first_n // GROUP_SIZE if GROUP_SIZE > 0 else first_n * 0
        return accumulate_scaled_x(
            x_rows, word_rows, scale_ptr + group * K,
            None if min_ptr is None else min_ptr + group * K, first, last, K,
            NUM_BITS, SUBNORMAL, UNPACK, BLOCK_M, BLOCK_N, STEP, SUM_ROWS, EVEN_K,
        )  # fmt: skip
    else:
        return accumulate_weights(
            x_rows, word_rows, scale_ptr, min_ptr, first_n, n, first, last, K, last_group,
            NUM_BITS, GROUP_SIZE, GROUP_DIM, GRAIN, ROW_GROUP, UNPACK, BLOCK_M, BLOCK_N, STEP, SUM_ROWS,
            EVEN_K,
        )  # fmt: skip
