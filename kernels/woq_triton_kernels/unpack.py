"""Codes to matrix operands: the magic numbers.

An operand is a plane of packed words seen as floats, two 16-bit words to a register. Masking a plane
and setting a few exponent bits gives a float that is linear in the code, with no conversion::

    fp16, magic       0x6400 | code             = 1024 + q
    bf16, magic       0x4300 | code  (4 bits)   =  128 + q
    bf16, magic       0x4300 | (code & 0x7f)    =  128 + (q & 127)     the two parts of an 8-bit code,
                      0x4300 | (code & 0x80)    =  128 + (q & 128)     multiplied one after the other
    fp16, subnormal   code in bits 3..0         = 2**-24 * q           no exponent at all: fp16
                      code in bits 7..4         = 2**-20 * q           subnormals are exact

The subnormal form needs no correction and half the shifts. Matrix units that keep fp16 subnormals
take it: NVIDIA's (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, to A100; Khattak and
Mikaitis, "Accurate Models of NVIDIA Tensor Cores", 2025, to B200) and AMD's CDNA3; CDNA2's flush them.

Every float here is exact. `magic`, `norm` and `split_parity` say how to get back to q.
"""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, which has no bf16 arithmetic."""


@triton.constexpr_function
def magic(num_bits, dtype, subnormal):
    """What a plane's operands hold beside the code, all parts together."""
    if dtype == tl.float32 or (subnormal and dtype == tl.float16):
        return 0
    if dtype == tl.float16:
        return 1024
    return 128 if num_bits == 4 else 256


@triton.constexpr_function
def norm(num_bits, dtype, subnormal):
    """The power of two in which sums of operands are kept."""
    if dtype != tl.float16 or not subnormal:
        return 1.0
    return 2.0**-20 if num_bits == 4 else 2.0**-24


@triton.constexpr_function
def split_parity(num_bits, dtype, subnormal):
    """Whether operands of even planes are 16 times smaller than `norm` says."""
    return num_bits == 4 and dtype == tl.float16 and subnormal


@triton.constexpr_function
def parts(num_bits, dtype):
    """Operands that make up one plane, to be multiplied with the same activations and added."""
    return 2 if num_bits == 8 and dtype == tl.bfloat16 else 1


@triton.constexpr_function
def _field(plane, part, num_bits, dtype, subnormal):
    """Shift, mask and exponent bits of an operand."""
    if num_bits == 8:
        if dtype == tl.bfloat16:
            return 8 * plane, (0x80 if part else 0x7F), 0x4300
        return 8 * plane, 0xFF, 0 if subnormal else 0x6400
    if subnormal and dtype == tl.float16:
        return 8 * (plane // 2), 0x0F << 4 * (plane % 2), 0
    return 4 * plane, 0x0F, 0x6400 if dtype == tl.float16 else 0x4300


@triton.constexpr_function
def _shift_of(plane, part, num_bits, dtype, subnormal):
    return _field(plane, part, num_bits, dtype, subnormal)[0]


@triton.constexpr_function
def _mask_of(plane, part, num_bits, dtype, subnormal):
    return _field(plane, part, num_bits, dtype, subnormal)[1]


@triton.constexpr_function
def _bits_of(plane, part, num_bits, dtype, subnormal):
    return _field(plane, part, num_bits, dtype, subnormal)[2]


@triton.constexpr_function
def pair(half):
    """A 16-bit constant in both halves of a register, as assembly writes it."""
    return f"{half * 0x00010001:#010x}"


@triton.constexpr_function
def _shift_asm(unpack, shift):
    return f"shr.u32 $0, $1, {shift};" if unpack == "ptx" else f"v_lshrrev_b32 $0, {shift}, $1"


@triton.constexpr_function
def _mask_asm(unpack, mask, bits):
    if unpack == "ptx":
        # 0xea is the truth table of (a & b) | c.
        lop3 = f"lop3.b32 $0, $1, {pair(mask)}, {pair(bits)}, 0xea;"
        return lop3 if bits else f"and.b32 $0, $1, {pair(mask)};"
    return "v_and_or_b32 $0, $1, $2, $3" if bits else f"v_and_b32 $0, {pair(mask)}, $1"


@triton.jit
def shift_words(words, SHIFT: tl.constexpr, UNPACK: tl.constexpr):
    """Both words of each register moved right; bits of the neighbour come in and are masked later."""
    if SHIFT == 0:
        return words
    elif UNPACK == "plain":
        return words >> SHIFT
    else:
        ASM: tl.constexpr = _shift_asm(UNPACK, SHIFT)
        REGS: tl.constexpr = "=r,r" if UNPACK == "ptx" else "=v,v"
        return tl.inline_asm_elementwise(ASM, REGS, [words], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def mask_words(words, MASK: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, UNPACK: tl.constexpr):
    """``(words & MASK) | BITS`` seen as `DTYPE`."""
    if UNPACK == "plain":
        masked = (words & MASK) | BITS
    elif UNPACK == "gcn" and BITS != 0:
        # A three-operand instruction of gfx9 takes no literal: mask and bits come in registers.
        AND_OR: tl.constexpr = _mask_asm(UNPACK, MASK, BITS)
        mask = tl.full((1, 1), MASK, tl.int16)
        bits = tl.full((1, 1), BITS, tl.int16)
        masked = tl.inline_asm_elementwise(
            AND_OR, "=v,v,v,v", [words, mask, bits], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        ASM: tl.constexpr = _mask_asm(UNPACK, MASK, BITS)
        REGS: tl.constexpr = "=r,r" if UNPACK == "ptx" else "=v,v"
        masked = tl.inline_asm_elementwise(ASM, REGS, [words], dtype=tl.int16, is_pure=True, pack=2)
    return masked.to(DTYPE, bitcast=True)


@triton.jit
def codes_f32(words, PLANE: tl.constexpr, NUM_BITS: tl.constexpr):
    """Codes of a plane as fp32, by ``0x4b000000 | q`` = 2**23 + q."""
    wide = (words.to(tl.int32) >> (NUM_BITS * PLANE)) & (2**NUM_BITS - 1)
    return (wide | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def operand(
    words,
    PLANE: tl.constexpr,
    PART: tl.constexpr,
    NUM_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """One operand of a plane, as `DTYPE`: see the top of the file for its value.

    Args:
        words: int16 ``[BLOCK_N, columns]``.
        PLANE: Which plane.
        PART: Which of the plane's `parts`.
        NUM_BITS: 4 or 8.
        DTYPE: The activations' dtype; fp32 operands are the codes themselves.
        SUBNORMAL: Use the subnormal form (fp16 only).
        UNPACK: "ptx" or "gcn" for two words an instruction, "plain" for what every target has.
    """
    if DTYPE == tl.float32:
        return codes_f32(words, PLANE, NUM_BITS)
    else:
        SHIFT: tl.constexpr = _shift_of(PLANE, PART, NUM_BITS, DTYPE, SUBNORMAL)
        MASK: tl.constexpr = _mask_of(PLANE, PART, NUM_BITS, DTYPE, SUBNORMAL)
        BITS: tl.constexpr = _bits_of(PLANE, PART, NUM_BITS, DTYPE, SUBNORMAL)
        return mask_words(shift_words(words, SHIFT, UNPACK), MASK, BITS, DTYPE, UNPACK)


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """An fp32 tensor rounded to nearest in `DTYPE`."""
    if INTERPRET and DTYPE == tl.bfloat16:
        # The interpreter truncates instead.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
