"""The inner loops that `decode` and `gemm` share: one tile of ``out^T = W · x^T`` over a range of blocks.

A step reads one packed block (128 columns) of BLOCK_N weight rows, takes the planes apart and
multiplies each with its own run of activation columns. The weights are the left operand, which may
stay in registers. Three ways to bring in scale and min:

======================  ================================================================================
accumulate_groups       on the accumulator, once a group: ``acc += scale * (q · x) + min * sum(x)``.
                        Needs whole planes in each group (GRAIN = columns that surely share a group).
accumulate_scaled_x     group_dim 0 with one row group in the tile: on the activations, once a column.
accumulate_weights      on the weights, before the product. Serves every scheme.
======================  ================================================================================

Rows and columns past the end are clamped to the last one; what they compute is never stored, except
columns of a ragged last block, whose activations read as 0.
"""

import triton
import triton.language as tl

from woq_triton_kernels.unpack import (
    codes_f32,
    dot,
    magic,
    norm,
    operand,
    parts,
    round_to,
    split_parity,
)


@triton.constexpr_function
def zero_code(num_bits):
    """The code of 0 in a symmetric scheme."""
    return 2 ** (num_bits - 1)


@triton.constexpr_function
def plane_length(num_bits):
    """Columns in one plane of a block, and words in a block."""
    return 32 if num_bits == 4 else 64


@triton.jit
def load_plane(x_rows, k, K, EVEN_K: tl.constexpr):
    """Activations ``[BLOCK_M, columns]`` of columns k; 0 past the end."""
    ptrs = x_rows[:, None] + k[None, :]
    if EVEN_K:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=k[None, :] < K, other=0.0)


@triton.jit
def load_row(row, k, K, EVEN_K: tl.constexpr):
    """Metadata ``[columns]`` of columns k; 0 past the end."""
    if EVEN_K:
        return tl.load(row + k)
    return tl.load(row + k, mask=k < K, other=0.0)


@triton.jit
def column_sums(xt, acc, NORM: tl.constexpr, ROWS: tl.constexpr):
    """``acc + NORM * sum over columns``, in every row of ``[ROWS, BLOCK_M]``: a product with ones.

    The matrix unit does it in the accumulator's own layout, where a reduction would need shuffles
    and shared memory. fp32 has no such unit and sums to ``[1, BLOCK_M]``.
    """
    if xt.dtype == tl.float32:
        return acc + tl.sum(xt, axis=0)[None, :]
    ones = tl.full((ROWS, xt.shape[0]), NORM, tl.float32).to(xt.dtype)
    return dot(ones, xt, acc)


@triton.jit
def spread_rows(sums, BLOCK_N: tl.constexpr):
    """Equal rows ``[ROWS, BLOCK_M]`` repeated to ``[BLOCK_N, BLOCK_M]``."""
    ROWS: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    if ROWS == 1 or ROWS == BLOCK_N:
        return sums
    repeated = tl.broadcast_to(sums[None, :, :], (BLOCK_N // ROWS, ROWS, BLOCK_M))
    return tl.reshape(repeated, (BLOCK_N, BLOCK_M))


@triton.jit
def accumulate_groups(
    x_rows,
    word_rows,
    scale_rows,
    min_rows,
    first,
    last,
    K,
    last_group,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Blocks ``first..last`` of a tile with scale and min on the accumulator; fp32 ``[BLOCK_N, BLOCK_M]``."""
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    PARTS: tl.constexpr = parts(NUM_BITS, DTYPE)
    MAGIC: tl.constexpr = magic(NUM_BITS, DTYPE, SUBNORMAL)
    NORM: tl.constexpr = norm(NUM_BITS, DTYPE, SUBNORMAL)
    PARITY: tl.constexpr = split_parity(NUM_BITS, DTYPE, SUBNORMAL)
    ZERO: tl.constexpr = zero_code(NUM_BITS)
    ROWS: tl.constexpr = 1 if DTYPE == tl.float32 else SUM_ROWS
    columns = tl.arange(0, LENGTH)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, last):
        words = tl.load(word_rows[:, None] + (block * LENGTH + columns)[None, :])
        for unit in tl.static_range(128 // GRAIN):
            group = 0
            if GROUP_SIZE > 0:
                group = (block * 128 + unit * GRAIN) // GROUP_SIZE
                if not EVEN_K:
                    group = tl.minimum(group, last_group)
            scale = tl.load(scale_rows + group).to(tl.float32)
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            smaller = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            sums = tl.zeros((ROWS, BLOCK_M), tl.float32)
            for plane in tl.static_range(unit * (GRAIN // LENGTH), (unit + 1) * (GRAIN // LENGTH)):
                xt = tl.trans(load_plane(x_rows, block * 128 + plane * LENGTH + columns, K, EVEN_K))
                sums = column_sums(xt, sums, NORM, ROWS)
                for part in tl.static_range(PARTS):
                    weights = operand(words, plane, part, NUM_BITS, DTYPE, SUBNORMAL, UNPACK)
                    if PARITY and plane % 2 == 0:
                        smaller = dot(weights, xt, smaller)
                    else:
                        product = dot(weights, xt, product)
            if PARITY:
                product += smaller * 16.0
            sums = spread_rows(sums, BLOCK_N)
            if min_rows is None:
                acc += scale[:, None] * (product - (MAGIC + ZERO) * sums)
            else:
                offset = tl.load(min_rows + group).to(tl.float32) - MAGIC * scale
                acc += scale[:, None] * product
                acc += offset[:, None] * sums
    return acc * (1.0 / NORM)


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
    EVEN_K: tl.constexpr,
):
    """Blocks ``first..last`` of a tile whose rows share their scales; fp32 ``[BLOCK_N, BLOCK_M]``.

    With ``xs = x * scale`` rounded to x's dtype, and z the zero code, it sums

        ``(q - z) * xs + (min + z * scale) * x``

    so that the rounding meets codes centred on 0, and every term takes the same xs.
    """
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    PARTS: tl.constexpr = parts(NUM_BITS, DTYPE)
    MAGIC: tl.constexpr = magic(NUM_BITS, DTYPE, SUBNORMAL)
    NORM: tl.constexpr = norm(NUM_BITS, DTYPE, SUBNORMAL)
    PARITY: tl.constexpr = split_parity(NUM_BITS, DTYPE, SUBNORMAL)
    ZERO: tl.constexpr = zero_code(NUM_BITS)
    columns = tl.arange(0, LENGTH)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_M, LENGTH), tl.float32)
    for block in range(first, last):
        words = tl.load(word_rows[:, None] + (block * LENGTH + columns)[None, :])
        smaller = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for plane in tl.static_range(128 // LENGTH):
            k = block * 128 + plane * LENGTH + columns
            x = load_plane(x_rows, k, K, EVEN_K).to(tl.float32)
            scale = load_row(scale_row, k, K, EVEN_K).to(tl.float32)[None, :]
            xs = round_to(x * scale, DTYPE)
            rest -= (MAGIC + ZERO) * xs.to(tl.float32)
            if min_row is not None:
                minimum = load_row(min_row, k, K, EVEN_K).to(tl.float32)[None, :]
                rest += (minimum + ZERO * scale) * x
            xt = tl.trans(xs)
            for part in tl.static_range(PARTS):
                weights = operand(words, plane, part, NUM_BITS, DTYPE, SUBNORMAL, UNPACK)
                if PARITY and plane % 2 == 0:
                    smaller = dot(weights, xt, smaller)
                else:
                    acc = dot(weights, xt, acc)
        if PARITY:
            acc += smaller * 16.0
    return acc * (1.0 / NORM) + tl.sum(rest, axis=1)[None, :]


@triton.jit
def accumulate_weights(
    x_rows,
    word_rows,
    scale_ptr,
    min_ptr,
    rows,
    first,
    last,
    K,
    last_group,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Blocks ``first..last`` of a tile, weights rounded to x's dtype; fp32 ``[BLOCK_N, BLOCK_M]``."""
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    columns = tl.arange(0, LENGTH)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, last):
        words = tl.load(word_rows[:, None] + (block * LENGTH + columns)[None, :])
        for plane in tl.static_range(128 // LENGTH):
            k = block * 128 + plane * LENGTH + columns
            xt = tl.trans(load_plane(x_rows, k, K, EVEN_K))
            codes = codes_f32(words, plane, NUM_BITS)
            start = block * 128 + plane * LENGTH
            weights = scaled_weights(
                codes,
                scale_ptr,
                min_ptr,
                rows,
                k,
                start,
                K,
                last_group,
                NUM_BITS,
                GROUP_SIZE,
                GROUP_DIM,
                LENGTH,
            )
            acc = dot(round_to(weights, DTYPE), xt, acc)
    return acc


@triton.jit
def accumulate_tile(
    x_ptr,
    packed_ptr,
    scale_ptr,
    min_ptr,
    tile_m,
    tile_n,
    first,
    last,
    M,
    N,
    K,
    stride_xm,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    SCALE_ON: tl.constexpr,
    GRAIN: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``out^T`` of one tile over blocks ``first..last``, fp32 ``[BLOCK_N, BLOCK_M]``, without bias."""
    m = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    n = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    x_rows = x_ptr + m * stride_xm
    word_rows = packed_ptr + n * (tl.cdiv(K, 128) * plane_length(NUM_BITS))
    length = K if GROUP_DIM == 1 else N
    last_group = (length - 1) // GROUP_SIZE if GROUP_SIZE > 0 else 0
    if SCALE_ON == "accumulator":
        scale_rows = scale_ptr + n * (last_group + 1)
        min_rows = None if min_ptr is None else min_ptr + n * (last_group + 1)
        return accumulate_groups(
            x_rows,
            word_rows,
            scale_rows,
            min_rows,
            first,
            last,
            K,
            last_group,
            NUM_BITS,
            GROUP_SIZE,
            GRAIN,
            SUBNORMAL,
            UNPACK,
            BLOCK_M,
            BLOCK_N,
            SUM_ROWS,
            EVEN_K,
        )
    elif SCALE_ON == "x":
        group = (tile_n * BLOCK_N // GROUP_SIZE).to(tl.int64) if GROUP_SIZE > 0 else 0
        scale_row = scale_ptr + group * K
        min_row = None if min_ptr is None else min_ptr + group * K
        return accumulate_scaled_x(
            x_rows,
            word_rows,
            scale_row,
            min_row,
            first,
            last,
            K,
            NUM_BITS,
            SUBNORMAL,
            UNPACK,
            BLOCK_M,
            BLOCK_N,
            EVEN_K,
        )
    else:
        return accumulate_weights(
            x_rows,
            word_rows,
            scale_ptr,
            min_ptr,
            n,
            first,
            last,
            K,
            last_group,
            NUM_BITS,
            GROUP_SIZE,
            GROUP_DIM,
            BLOCK_M,
            BLOCK_N,
            EVEN_K,
        )


@triton.jit
def scaled_weights(
    codes,
    scale_ptr,
    min_ptr,
    rows,
    k,
    start,
    K,
    last_group,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Weights of one plane in fp32: ``codes * scale + min``.

    Args:
        codes: fp32 ``[rows, LENGTH]``.
        scale_ptr: The whole weight's scale.
        min_ptr: Its min, or None.
        rows: int64 ``[rows]``, out_features indices inside the weight.
        k: ``[LENGTH]``, in_features indices from start on, possibly past the end.
        start: The first of k.
        K: in_features.
        last_group: Index of the last group along group_dim.
        NUM_BITS: 4 or 8.
        GROUP_SIZE: Weights in a group; 0 for one group.
        GROUP_DIM: Dimension that groups run along.
        LENGTH: Columns in the plane.
    """
    if GROUP_DIM == 0:
        groups = rows // GROUP_SIZE if GROUP_SIZE > 0 else rows * 0
        offsets = (groups * K)[:, None] + tl.minimum(k, K - 1)[None, :]
    elif GROUP_SIZE == 0:
        offsets = rows[:, None]
    elif GROUP_SIZE % LENGTH == 0:
        offsets = (rows * (last_group + 1) + tl.minimum(start // GROUP_SIZE, last_group))[:, None]
    else:
        groups = tl.minimum(k // GROUP_SIZE, last_group)
        offsets = (rows * (last_group + 1))[:, None] + groups[None, :]
    scale = tl.load(scale_ptr + offsets).to(tl.float32)
    if min_ptr is None:
        return (codes - 2 ** (NUM_BITS - 1)) * scale
    return codes * scale + tl.load(min_ptr + offsets).to(tl.float32)
