"""int4 weights for torch's packed CPU kernel, see `cpu_nibbles`.

The kernel's zero point, ``min + 8 * scale``, has to be bf16. In a skewed group, whose typical weight is far
smaller than its range, that rounding alone would be an error of several percent. What it leaves out is::

    sum_g rest[n, g] * sum_k x[g, k]

a product with the groups' sums of x. A product of its own takes up to half as long as the kernel, most of it
to be called. So the rests are further columns of the weight, a column for each of their base-16 digits, the
sums stand behind x, divided by 1, 16, and so on, and the kernel does it all. Where such columns would cost
more than a sixteenth of the codes, the rests stay bf16 and are multiplied by themselves.
"""

import functools

import torch
from torch import Tensor

from woq_triton.backends import cpu, cpu_nibbles
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

_MOST_TOKENS = {True: 64, False: 128}
"""Tokens up to which torch's kernel is the quicker way, by whether the processor multiplies bf16."""

_LEAST_DIGITS, _MOST_DIGITS = 2, 4
"""Columns for a group's rest. Two are 8 bits, as bf16 has; more, where the kernel's whole groups leave room,
serve groups whose rests are far smaller than the row's largest."""

_REST_SHARE = 16
"""The columns of the rests are at most in_features over this."""


def fits(scheme: QuantScheme, shape: tuple[int, int], metadata: torch.dtype) -> bool:
    """Whether torch's kernel can hold a weight ``[out_features, in_features]`` exactly as quantized."""
    return (
        scheme.num_bits == 4
        and scheme.group_dim == 1
        and cpu_nibbles.fits(scheme.resolve_group_size(shape), shape, metadata)
    )


def arrange(
    packed: Tensor, scale: Tensor, min: Tensor | None, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A weight as the kernel takes it.

    Args:
        packed: Canonical codes, int16 ``[N, packed_width]``; N has whole blocks.
        scale: bf16 ``[N, groups]``.
        min: As scale, or None.
        in_features: Columns of the weight.
        group_size: Divides in_features.

    Returns:
        Codes, uint8 ``[N, (in_features + C) / 2]``, C the columns of the rests, which may be none; bf16
        ``[(in_features + C) / kernel group, N, 2]``, a group that is larger than the kernel knows repeated;
        the rests, bf16 ``[groups, N]``, if they are no columns and not all zero as for symmetric weights.
    """
    scale_and_zero, rest = metadata(scale, min, group_size)
    columns = 0 if rest is None else _rest_columns(len(rest), group_size)
    rest_codes = scale.new_empty(len(packed), 0, dtype=torch.uint8)
    if rest is not None and columns:
        rest_codes, rest_scale = _quantize_rest(rest.t(), columns)
        groups = columns // cpu_nibbles.kernel_group(group_size)
        rest_metadata = torch.stack((rest_scale, torch.zeros_like(rest_scale)), dim=-1)
        scale_and_zero = torch.cat((scale_and_zero, rest_metadata.expand(groups, -1, -1)))
    arranged = torch.empty(len(packed), (in_features + columns) // 2, dtype=torch.uint8)
    for start in range(0, len(packed), cpu_nibbles.ROWS_AT_A_TIME):
        rows = slice(start, start + cpu_nibbles.ROWS_AT_A_TIME)
        codes = layout.unpack(packed[rows], 4, in_features)
        arranged[rows] = cpu_nibbles.arrange(torch.cat((codes, rest_codes[rows]), dim=1))
    return arranged, scale_and_zero, None if rest is None or columns else rest.to(scale.dtype)


def restore(arranged: Tensor, in_features: int) -> Tensor:
    """The canonical codes of what `arrange` made."""
    packed = torch.empty(len(arranged), layout.packed_width(in_features, 4), dtype=torch.int16)
    for start in range(0, len(arranged), cpu_nibbles.ROWS_AT_A_TIME):
        rows = slice(start, start + cpu_nibbles.ROWS_AT_A_TIME)
        packed[rows] = layout.pack(cpu_nibbles.restore(arranged[rows])[:, :in_features].contiguous(), 4)
    return packed


def metadata(scale: Tensor, min: Tensor | None, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as the kernel takes them, bf16 ``[in_features / kernel group, N, 2]``.

    And the rest of the zero point, fp32 ``[groups, N]``, None for symmetric weights.
    """
    if min is None:
        zero, rest = torch.zeros_like(scale), None
    else:
        exact = min.float().add(scale, alpha=8)
        zero = exact.to(scale.dtype)
        rest = (exact - zero.float()).t().contiguous()
    repeats = group_size // cpu_nibbles.kernel_group(group_size)
    return torch.stack((scale.t(), zero.t()), dim=-1).repeat_interleave(repeats, dim=0), rest


def scale_of(scale_and_zero: Tensor, groups: int, group_size: int) -> Tensor:
    """The scale ``[N, groups]`` inside what `arrange` made, as a view."""
    repeats = group_size // cpu_nibbles.kernel_group(group_size)
    return scale_and_zero[: groups * repeats : repeats, :, 0].t()


def linear(
    tokens: Tensor,
    arranged: Tensor,
    scale_and_zero: Tensor,
    rest: Tensor | None,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """``tokens @ weight.T + bias`` for ``[M, in_features]`` activations of any float dtype, in that dtype.

    Args:
        tokens: ``[M, in_features]``.
        arranged: Codes as `arrange` made them.
        scale_and_zero: Likewise.
        rest: Likewise.
        scale: ``[N, groups]``.
        min: As scale, or None.
        bias: ``[N]`` or None.
        group_size: Divides in_features.
    """
    in_features, groups = tokens.shape[1], scale.shape[1]
    if tokens.dtype != torch.bfloat16 or len(tokens) > _MOST_TOKENS[cpu.multiplies_bf16()]:

        def weight_t(rows: slice) -> Tensor:
            low, high = cpu_nibbles.halves(arranged[rows])
            codes = low[:, :in_features], high[:, :in_features]
            return cpu_nibbles.dequantize_t(*codes, 8, scale[rows], None if min is None else min[rows])

        return cpu.multiply_blocks(tokens, weight_t, len(scale), cpu_nibbles.block_rows(), bias)
    columns = 2 * arranged.shape[1] - in_features
    if columns or rest is not None:
        sums = tokens.unflatten(1, (groups, group_size)).sum(2)
    if columns:
        values = sums.unsqueeze(1) * _place_values(-(-columns // groups))
        tokens = torch.cat((tokens, values.flatten(1)[:, :columns]), dim=1)
    out = cpu_nibbles.multiply(tokens, arranged, group_size, scale_and_zero)
    if rest is not None:
        out.addmm_(sums, rest)
    return out if bias is None else out.add_(bias)


def _rest_columns(groups: int, group_size: int) -> int:
    """How many columns the rests take: whole groups of the kernel; 0 if that is too many."""
    group = cpu_nibbles.kernel_group(group_size)
    columns = -(-_LEAST_DIGITS * groups // group) * group
    return columns if columns * _REST_SHARE <= groups * group_size else 0


@functools.cache
def _place_values(digits: int) -> Tensor:
    """What the digits stand for, bf16 ``[digits, 1]``: powers of two, so that nothing is rounded."""
    return (0.0625 ** torch.arange(digits)).to(torch.bfloat16).unsqueeze(1)


def _quantize_rest(rest: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Rests fp32 ``[N, groups]`` as digits around 8, uint8 ``[N, columns]``, and a scale, bf16 ``[N]``.

    The first digits of all groups come first. Columns that are left over are 8, which is 0 to the kernel.
    """
    groups = rest.shape[1]
    scale = (rest.abs().amax(1) / 7).to(torch.bfloat16)
    left = (rest / scale.float().unsqueeze(1)).nan_to_num_(0)  # 0 / 0 where bf16 holds every zero point
    codes = torch.full((len(rest), columns), 8, dtype=torch.uint8)
    for digit in range(min(columns // groups, _MOST_DIGITS)):
        value = left.round().clamp_(-8, 7)
        codes[:, digit * groups : (digit + 1) * groups] = (value + 8).to(torch.uint8)
        left = (left - value) * 16
    return codes, scale
