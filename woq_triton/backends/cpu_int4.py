"""int4 codes as torch's packed CPU kernel takes them, for bf16 activations.

`torch.ops.aten._weight_int4pack_mm_for_cpu` computes ``w = (q - 8) * scale + zero`` with fp32 products and
sums, and is several times as fast as a dense bf16 layer at one token. Its arrangement, with B the rows in a
block (64 with AVX-512, 32 with AVX2)::

    codes [N / B, K, B / 2] uint8     byte (b, k, i) = code (b*B + i, k) | code (b*B + i + B/2, k) << 4

Beyond a few dozen tokens it loses to dequantizing block after block and multiplying.
"""

import functools

import torch
from torch import Tensor

from woq_triton.backends.cpu import block_weights, multiplies_bf16, multiply, product_dtype
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

_KERNEL_GROUPS = (256, 128, 64, 32)
"""Group sizes that torch's kernel knows."""

_BLOCK_ROWS = {"AVX512": 64, "AVX2": 32}

_ROWS_AT_A_TIME = 128
"""Rows that are rearranged at a time, whole blocks."""

_MOST_TOKENS = {True: 64, False: 128}
"""Tokens up to which torch's kernel is the quicker way, by whether the processor multiplies bf16."""


def fits(scheme: QuantScheme, shape: tuple[int, int], metadata: torch.dtype) -> bool:
    """Whether torch's kernel can hold a weight ``[out_features, in_features]`` exactly as quantized."""
    out_features, in_features = shape
    return (
        scheme.num_bits == 4
        and scheme.group_dim == 1
        and metadata == torch.bfloat16
        and out_features * in_features > 0
        and block_rows() > 0
        and out_features % block_rows() == 0
        and in_features % scheme.resolve_group_size(shape) == 0
        and _kernel_group(scheme.resolve_group_size(shape)) > 0
    )


@functools.cache
def block_rows() -> int:
    """Rows in a block of torch's arrangement; 0 where this torch's is not the one drawn above."""
    rows = _BLOCK_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0)
    if rows == 0:
        return 0
    codes = (torch.arange(2 * rows * 32) * 7 % 16).to(torch.uint8).view(2 * rows, 32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return rows if torch.equal(_blocks(codes, rows).view_as(packed), packed) else 0


def arrange(packed: Tensor, in_features: int) -> Tensor:
    """Canonical codes to torch's arrangement, uint8 ``[N, K / 2]``; N has whole blocks."""
    arranged = torch.empty(len(packed), in_features // 2, dtype=torch.uint8)
    for part, words in zip(arranged.split(_ROWS_AT_A_TIME), packed.split(_ROWS_AT_A_TIME), strict=True):
        part.view(-1).copy_(_blocks(layout.unpack(words, 4, in_features), block_rows()).view(-1))
    return arranged


def restore(arranged: Tensor) -> Tensor:
    """Undo `arrange`."""
    in_features = 2 * arranged.shape[1]
    packed = torch.empty(len(arranged), layout.packed_width(in_features, 4), dtype=torch.int16)
    for words, part in zip(packed.split(_ROWS_AT_A_TIME), arranged.split(_ROWS_AT_A_TIME), strict=True):
        blocks = part.view(-1, in_features, block_rows() // 2).transpose(1, 2)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=1).view(len(part), in_features)
        words.copy_(layout.pack(codes, 4))
    return packed


def _blocks(codes: Tensor, rows: int) -> Tensor:
    """Codes ``[N, K]`` to ``[N / rows, K, rows / 2]``, two in a byte."""
    low, high = codes.view(-1, 2, rows // 2, codes.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()


def arrange_metadata(scale: Tensor, min: Tensor | None, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as the kernel takes them, and what it cannot hold.

    The zero point ``min + 8 * scale`` has to be bf16. In a skewed group, whose typical weight is far smaller
    than its range, that rounding alone would be an error of several percent.

    Returns:
        bf16 ``[groups, N, 2]``, a group that is larger than the kernel knows repeated; and the rest of the
        zero point, bf16 ``[groups, N]``, which then has 16 bits of precision. None for symmetric weights.
    """
    repeats = group_size // _kernel_group(group_size)
    if min is None:
        zero, rest = torch.zeros_like(scale), None
    else:
        exact = min.float().add(scale, alpha=8)
        zero = exact.to(scale.dtype)
        rest = (exact - zero.float()).to(scale.dtype).t().contiguous()
    scale_and_zero = torch.stack((scale.t(), zero.t()), dim=-1).repeat_interleave(repeats, dim=0)
    return scale_and_zero, rest


def scale_of(scale_and_zero: Tensor, group_size: int) -> Tensor:
    """The scale ``[N, groups]`` inside what `arrange_metadata` made, as a view."""
    return scale_and_zero[:: group_size // _kernel_group(group_size), :, 0].t()


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
    """``tokens @ weight.T + bias`` for ``[M, K]`` activations of any float dtype, in that dtype.

    Args:
        tokens: ``[M, K]``.
        arranged: uint8 ``[N, K / 2]``.
        scale_and_zero: bf16 ``[groups, N, 2]``, see `arrange_metadata`.
        rest: bf16 ``[groups, N]`` or None, likewise.
        scale: ``[N, groups]``.
        min: As scale, or None.
        bias: ``[N]`` or None.
        group_size: Divides K.
    """
    if tokens.dtype == torch.bfloat16 and len(tokens) <= _MOST_TOKENS[multiplies_bf16()]:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(
            tokens.contiguous(), arranged, _kernel_group(group_size), scale_and_zero
        )
        if rest is not None:
            sums = tokens.unflatten(1, (len(rest), group_size)).sum(2)
            out.addmm_(sums, rest)
        return out if bias is None else out.add_(bias)
    out = tokens.new_empty(len(tokens), len(arranged))
    tokens = tokens.to(product_dtype(tokens, out.dtype))
    step = max(block_rows(), block_weights() // tokens.shape[1] // block_rows() * block_rows())
    for start in range(0, len(arranged), step):
        rows = slice(start, start + step)
        weight_t = _dequantize_t(arranged[rows], scale[rows], None if min is None else min[rows], group_size)
        multiply(tokens, weight_t, None if bias is None else bias[rows], out[:, rows])
    return out


def _dequantize_t(arranged: Tensor, scale: Tensor, min: Tensor | None, group_size: int) -> Tensor:
    """Some blocks as dense fp32 ``[K, rows]``: the kernel's arrangement is transposed already."""
    rows, in_features = arranged.shape[0], 2 * arranged.shape[1]
    blocks = arranged.view(rows // block_rows(), in_features, block_rows() // 2)
    weight = torch.empty(in_features, len(blocks), 2, block_rows() // 2)
    weight[:, :, 0] = (blocks & 15).transpose(0, 1)
    weight[:, :, 1] = (blocks >> 4).transpose(0, 1)
    grouped = weight.view(in_features // group_size, group_size, rows)
    if min is None:
        grouped -= 8
    grouped *= scale.t().float().unsqueeze(1)
    if min is not None:
        grouped += min.t().float().unsqueeze(1)
    return weight.view(in_features, rows)


def _kernel_group(group_size: int) -> int:
    """The largest group that torch's kernel knows and that divides a group; 0 if there is none."""
    return next((size for size in _KERNEL_GROUPS if group_size % size == 0), 0)
