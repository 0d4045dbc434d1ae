"""Codes to weights: scale and min applied to each code, for products that take finished weights.

In fp32 for every scheme (`scaled_weights`), and in packed half precision (`half_weights`) where scale
and min have the activations' dtype and the target has the instructions: one fused multiply-add rounds
once. bf16 takes the code as the subnormal that its bits are, ``q * 2**-133``, which a multiply-add of PTX
keeps, with a scale as much larger. In fp16 there is no room for such a scale: the code is made exact
first (``magic + q - magic``). Folding the magic into min instead would round ``min - magic * scale``,
which is far larger than a weight.
"""

import triton
import triton.language as tl

from woq_triton_kernels.unpack import INTERPRET, codes_f32, pair, round_to, shift_words


@triton.jit
def metadata_offsets(
    first_n,
    n,
    k,
    start,
    K,
    last_group,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Offsets into scale and min of a run of columns: ``[rows, SPAN]``, or 1 where they are the same.

    Args:
        first_n: int64, the tile's first row.
        n: int32 or int64 ``[rows]``, rows of the tile from first_n on, all inside the weight.
        k: ``[SPAN]``, in_features indices from start on, possibly past the end.
        start: The first of k.
        K: in_features.
        last_group: Index of the last group along group_dim.
        GROUP_SIZE: Weights in a group; 0 for one group.
        GROUP_DIM: Dimension that groups run along.
        ROW_GROUP: group_dim 0: all rows are in the first one's group.
        SPAN: Number of columns.
        EVEN_K: k never passes the end.
    """
    columns = k if EVEN_K else tl.minimum(k, K - 1)
    if GROUP_DIM == 0:
        if GROUP_SIZE == 0:
            return columns[None, :]
        elif ROW_GROUP:
            return first_n // GROUP_SIZE * K + columns[None, :]
        else:
            return ((first_n + n) // GROUP_SIZE * K)[:, None] + columns[None, :]
    elif GROUP_SIZE == 0:
        return (first_n + n)[:, None]
    elif GROUP_SIZE % SPAN == 0:
        return ((first_n + n) * (last_group + 1) + tl.minimum(start // GROUP_SIZE, last_group))[:, None]
    else:
        return ((first_n + n) * (last_group + 1))[:, None] + (columns // GROUP_SIZE)[None, :]


@triton.jit
def load_at(ptr, offsets):
    """Metadata at offsets from `metadata_offsets`; 0 if there is none."""
    if ptr is None:
        return 0.0
    else:
        return tl.load(ptr + offsets)


@triton.jit
def scaled_weights(
    words, scale, minimum, SYMMETRIC: tl.constexpr, PLANE: tl.constexpr, NUM_BITS: tl.constexpr
):
    """Weights of one plane in fp32.

    Args:
        words: int16 ``[rows, columns]``.
        scale: Of a float dtype, as words or 1 in a dimension where they share it.
        minimum: As scale.
        SYMMETRIC: There is no minimum.
        PLANE: Which plane.
        NUM_BITS: 4 or 8.
    """
    codes = codes_f32(words, PLANE, NUM_BITS)
    if SYMMETRIC:
        return (codes - 2 ** (NUM_BITS - 1)) * scale.to(tl.float32)
    else:
        return codes * scale.to(tl.float32) + minimum.to(tl.float32)


HALF_NORM = tl.constexpr(2.0**-69)
"""What `half_weights` in bf16 come multiplied with: scale, times 2**64, must not overflow, and min must stay
above bf16's subnormals. So it serves scales below 2**63, and weights down to 2**-57 with full precision."""


@triton.constexpr_function
def half_norm(dtype):
    """The power of two that `half_weights` are multiplied with."""
    return HALF_NORM.value if dtype == tl.bfloat16 else 1.0


@triton.constexpr_function
def half_shift(plane, num_bits):
    """How far `half_weights` wants its words moved right for a plane."""
    return num_bits * plane if num_bits == 8 else 8 * (plane // 2)


@triton.constexpr_function
def half_asm(plane, num_bits, dtype, symmetric):
    """PTX that makes weights of shifted words: $1 words, $2 scale, $3 min, two of each in a register."""
    mask = 0xFF if num_bits == 8 else 0x0F << 4 * (plane % 2)
    if dtype == tl.bfloat16:
        return f"{{ .reg .b32 code; and.b32 code, $1, {pair(mask)}; fma.rn.bf16x2 $0, code, $2, $3; }}"
    bits, minus = 0x6400, 0xE400  # 1024 + q, -1024
    if symmetric:
        minus = 0xE480 if num_bits == 8 else 0xE408  # -1152, -1032
    if num_bits == 4 and plane % 2:
        bits, minus = 0x5400, 0xD480 if symmetric else 0xD400  # 64 + q, -72, -64
    steps = [
        f"lop3.b32 $0, $1, {pair(mask)}, {pair(bits)}, 0xea",
        f"mov.b32 one, {pair(0x3C00)}",
        f"mov.b32 minus, {pair(minus)}",
        "fma.rn.f16x2 $0, $0, one, minus",
    ]
    if symmetric:
        steps.append("mov.b32 minus, 0x00000000")
    steps.append(f"fma.rn.f16x2 $0, $0, $2, {'minus' if symmetric else '$3'}")
    return "{ .reg .b32 one, minus; " + "; ".join(steps) + "; }"


@triton.jit
def half_scale(value, FACTOR: tl.constexpr):
    """Half-precision metadata times a power of two."""
    if INTERPRET:
        return round_to(value.to(tl.float32) * FACTOR, value.dtype)
    else:
        return value * tl.full((1, 1), FACTOR, tl.float32).to(value.dtype)


@triton.jit
def half_weights(words, scale, minimum, SYMMETRIC: tl.constexpr, PLANE: tl.constexpr, NUM_BITS: tl.constexpr):
    """Weights of one plane times `half_norm`, in the dtype of scale; arguments as in `scaled_weights`."""
    DTYPE: tl.constexpr = scale.dtype
    SHIFT: tl.constexpr = half_shift(PLANE, NUM_BITS)
    ASM: tl.constexpr = half_asm(PLANE, NUM_BITS, DTYPE, SYMMETRIC)
    shifted = shift_words(words, SHIFT, "ptx")
    if SYMMETRIC:
        minimum = scale
    if DTYPE == tl.bfloat16:
        if SYMMETRIC:
            minimum = half_scale(scale, HALF_NORM * -(2.0 ** (NUM_BITS - 1)))
        else:
            minimum = half_scale(minimum, HALF_NORM)
        # A code read as bf16 is 2**-133 of itself, in odd planes of 4 bits 16 times as much.
        scale = half_scale(scale, HALF_NORM * (2.0**129 if NUM_BITS == 4 and PLANE % 2 == 1 else 2.0**133))
    bits = tl.inline_asm_elementwise(
        ASM,
        "=&r,r,r,r",
        [shifted, scale.to(tl.int16, bitcast=True), minimum.to(tl.int16, bitcast=True)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)
