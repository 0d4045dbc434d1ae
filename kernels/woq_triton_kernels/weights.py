"""Codes to weights: scale and min applied to each code, for products that take finished weights.

In fp32 for every scheme (`scaled_weights`), and in packed half precision (`half_weights`) where scale
and min have the activations' dtype and the target has the instructions: the code is made exact first
(``magic + q - magic``), then one fused multiply-add rounds once. Folding the magic into min instead
would round ``min - magic * scale``, which is far larger than a weight.
"""

import triton
import triton.language as tl

from woq_triton_kernels.unpack import codes_f32, pair, shift_words


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


@triton.constexpr_function
def half_shift(plane, num_bits, dtype):
    """How far `half_weights` wants its words moved right for a plane."""
    if num_bits == 4 and dtype == tl.float16:
        return 8 * (plane // 2)
    return num_bits * plane


@triton.constexpr_function
def half_asm(plane, num_bits, dtype, symmetric):
    """PTX that makes weights of shifted words: $1 words, $2 scale, $3 min, two of each in a register."""
    if dtype == tl.float16:
        one, kind = 0x3C00, "f16x2"
        if num_bits == 8:
            mask, bits, minus = 0xFF, 0x6400, 0xE480 if symmetric else 0xE400  # 1024 + q, -1152, -1024
        elif plane % 2 == 0:
            mask, bits, minus = 0x0F, 0x6400, 0xE408 if symmetric else 0xE400  # 1024 + q, -1032, -1024
        else:
            mask, bits, minus = 0xF0, 0x5400, 0xD480 if symmetric else 0xD400  # 64 + q, -72, -64
    else:
        one, kind = 0x3F80, "bf16x2"
        mask, bits, minus = 0x7F if num_bits == 8 else 0x0F, 0x4300, 0xC308 if symmetric else 0xC300
    steps = [f"lop3.b32 $0, $1, {pair(mask)}, {pair(bits)}, 0xea", f"mov.b32 one, {pair(one)}"]
    if dtype == tl.bfloat16 and num_bits == 8:
        # 128 + (q & 127), and -128 or -256 for the top bit: q - 128 together. 0xae is (~a & b) | c.
        steps.append(f"lop3.b32 minus, $1, {pair(0x80)}, {pair(0xC300)}, 0xae")
    else:
        steps.append(f"mov.b32 minus, {pair(minus)}")
    steps.append(f"fma.rn.{kind} $0, $0, one, minus")
    if symmetric:
        steps.append("mov.b32 minus, 0x00000000")
    steps.append(f"fma.rn.{kind} $0, $0, $2, {'minus' if symmetric else '$3'}")
    return "{ .reg .b32 one, minus; " + "; ".join(steps) + "; }"


@triton.jit
def half_weights(words, scale, minimum, SYMMETRIC: tl.constexpr, PLANE: tl.constexpr, NUM_BITS: tl.constexpr):
    """Weights of one plane in the dtype of scale, fp16 or bf16; arguments as in `scaled_weights`."""
    DTYPE: tl.constexpr = scale.dtype
    SHIFT: tl.constexpr = half_shift(PLANE, NUM_BITS, DTYPE)
    ASM: tl.constexpr = half_asm(PLANE, NUM_BITS, DTYPE, SYMMETRIC)
    shifted = shift_words(words, SHIFT, "ptx")
    if SYMMETRIC:
        minimum = scale
    elif NUM_BITS == 8 and DTYPE == tl.bfloat16:
        # The code comes out as q - 128. The middle of a group is no larger than its largest weight.
        middle = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x43004300; fma.rn.bf16x2 $0, $1, zero, $2; }",
            "=r,r,r",
            [scale.to(tl.int16, bitcast=True), minimum.to(tl.int16, bitcast=True)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        minimum = middle.to(DTYPE, bitcast=True)
    bits = tl.inline_asm_elementwise(
        ASM,
        "=&r,r,r,r",
        [shifted, scale.to(tl.int16, bitcast=True), minimum.to(tl.int16, bitcast=True)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)
