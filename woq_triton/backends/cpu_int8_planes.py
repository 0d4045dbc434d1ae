"""int8 weights for torch's packed int4 CPU kernel, see `cpu_nibbles`: two planes of 4-bit codes.

With a code ``q = 16 * high + low``, the weight is a sum of two that the kernel can multiply::

    q * scale + min = (high - 8) * 16 * scale + zero_high  +  (low - 8) * scale + zero_low

so the planes lie side by side as one weight of twice the columns, and x is repeated. The zero point ``min +
136 * scale`` is shared out as a bf16 number and a bf16 rest, 16 bits of precision.
"""

import torch
from torch import Tensor

from woq_triton.backends import cpu, cpu_nibbles
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

_CENTRE = 8 * 16 + 8
"""What the kernel takes from a code in all."""

_MOST_TOKENS = {True: 32, False: 64}
"""Tokens up to which torch's kernel is the quicker way, by whether the processor multiplies bf16."""


def fits(scheme: QuantScheme, shape: tuple[int, int], metadata: torch.dtype) -> bool:
    """Whether torch's kernel can hold a weight ``[out_features, in_features]``, and quickly.

    With AVX2 the kernel is bound by its instructions, and two planes take twice as long as one.
    """
    return (
        scheme.num_bits == 8
        and scheme.group_dim == 1
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_nibbles.fits(scheme.resolve_group_size(shape), shape, metadata)
    )


def arrange(packed: Tensor, in_features: int) -> Tensor:
    """Canonical codes as the kernel takes them, uint8 ``[N, in_features]``; N has whole blocks."""
    arranged = torch.empty(len(packed), in_features, dtype=torch.uint8)
    for start in range(0, len(packed), cpu_nibbles.ROWS_AT_A_TIME):
        rows = slice(start, start + cpu_nibbles.ROWS_AT_A_TIME)
        codes = layout.unpack(packed[rows], 8, in_features)
        arranged[rows] = cpu_nibbles.arrange(torch.cat((codes >> 4, codes & 15), dim=1))
    return arranged


def restore(arranged: Tensor) -> Tensor:
    """Undo `arrange`."""
    in_features = arranged.shape[1]
    packed = torch.empty(len(arranged), layout.packed_width(in_features, 8), dtype=torch.int16)
    for start in range(0, len(arranged), cpu_nibbles.ROWS_AT_A_TIME):
        rows = slice(start, start + cpu_nibbles.ROWS_AT_A_TIME)
        high, low = cpu_nibbles.restore(arranged[rows]).chunk(2, dim=1)
        packed[rows] = layout.pack(high << 4 | low, 8)
    return packed


def metadata(scale: Tensor, min: Tensor | None, group_size: int) -> Tensor:
    """Scales and zero points of both planes: bf16 ``[2 * in_features / kernel group, N, 2]``.

    Args:
        scale: bf16 ``[N, groups]``.
        min: As scale, or None.
        group_size: A group that is larger than the kernel knows is repeated.
    """
    exact = scale.float() * (_CENTRE - 128) if min is None else min.float().add(scale, alpha=_CENTRE)
    zero = exact.to(scale.dtype)
    rest = (exact - zero.float()).to(scale.dtype)
    repeats = group_size // cpu_nibbles.kernel_group(group_size)
    planes = torch.stack((torch.stack((scale * 16, zero)), torch.stack((scale, rest))))  # [2, 2, N, groups]
    return planes.permute(0, 3, 2, 1).repeat_interleave(repeats, dim=1).flatten(0, 1).contiguous()


def scale_of(scale_and_zero: Tensor, group_size: int) -> Tensor:
    """The scale ``[N, groups]`` inside what `metadata` made, as a view."""
    repeats = group_size // cpu_nibbles.kernel_group(group_size)
    return scale_and_zero[len(scale_and_zero) // 2 :: repeats, :, 0].t()


def linear(
    tokens: Tensor,
    arranged: Tensor,
    scale_and_zero: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """``tokens @ weight.T + bias`` for ``[M, in_features]`` activations of any float dtype, in that dtype.

    Args:
        tokens: ``[M, in_features]``.
        arranged: Codes as `arrange` made them.
        scale_and_zero: See `metadata`.
        scale: ``[N, groups]``.
        min: As scale, or None.
        bias: ``[N]`` or None.
        group_size: Divides in_features.
    """
    if tokens.dtype == torch.bfloat16 and len(tokens) <= _MOST_TOKENS[cpu.multiplies_bf16()]:
        repeated = torch.cat((tokens, tokens), dim=1)
        out = cpu_nibbles.multiply(repeated, arranged, group_size, scale_and_zero)
        return out if bias is None else out.add_(bias)

    def weight_t(rows: slice) -> Tensor:
        high, low = cpu_nibbles.as_blocks(arranged[rows]).chunk(2, dim=1)
        lower_rows, upper_rows = high << 4 | low & 15, high & 240 | low >> 4
        return cpu_nibbles.dequantize_t(
            lower_rows, upper_rows, 128, scale[rows], None if min is None else min[rows]
        )

    return cpu.multiply_blocks(tokens, weight_t, len(scale), cpu_nibbles.block_rows(), bias)
