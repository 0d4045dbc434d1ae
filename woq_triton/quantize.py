"""Float weights to codes, scale and min: the one quantization rule.

Within a group, with Q = 2**num_bits - 1::

    asymmetric   w ~ q * scale + min                  scale = (max - min) / Q
    symmetric    w ~ (q - 2**(num_bits-1)) * scale    scale = max|w| / (2**(num_bits-1) - 1)

Two choices keep every weight within half a *stored* step of its value, whatever the storage dtype:
the scale is rounded up when stored, so that Q steps always span the group, and codes are computed
against the metadata as stored. `min` is itself a weight, hence exact. A group of one repeated value
is exact too: its scale is 0 (asymmetric) or the value's magnitude (symmetric). Only where the last
step would lie beyond the dtype's largest number is the scale rounded down, at the cost of up to one
step, so that what is dequantized stays finite.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_BLOCK_WEIGHTS = 1 << 18  # weights in a pass: a few MB of scratch, which the caches hold


def quantize_tensors(
    weight: Tensor, scheme: QuantScheme, name: str = "weight"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight into packed codes and metadata.

    Streams over blocks of rows, so that the scratch memory is a few MB whatever the weight's size.

    Args:
        weight: ``[out_features, in_features]``, bf16, fp16 or fp32, any device.
        scheme: How to quantize.
        name: What errors call the weight, usually the layer's name.

    Returns:
        ``(packed, scale, min)``: int16 ``[out_features, packed_width]``, and metadata of shape
        ``scheme.metadata_shape(weight.shape)`` in the weight's dtype; min is None when symmetric.

    Raises:
        TypeError: The weight is not bf16, fp16 or fp32.
        ValueError: The weight is not 2-D, has NaN or infinite values, or a group spans more than
            fp32 can hold.
    """
    check_weight(weight, name)
    weight = weight.detach()
    low, high = _group_bounds(weight, scheme)
    _check_bounds(low, high, scheme, name)
    scale, minimum = _metadata(low, high, scheme)

    rows, in_features = weight.shape
    width = layout.packed_width(in_features, scheme.num_bits)
    packed = torch.empty(rows, width, dtype=torch.int16, device=weight.device)
    for start, stop in row_blocks(scheme, rows, in_features):
        codes = _codes(weight[start:stop], scale, minimum, scheme, start, rows)
        packed[start:stop] = layout.pack(codes, scheme.num_bits)
    return packed, scale, minimum


def check_weight(weight: Tensor, name: str) -> None:
    """Refuse a weight whose dtype or rank cannot be quantized.

    Raises:
        TypeError: It is no dense tensor with values, or its dtype is not one of `WEIGHT_DTYPES`.
        ValueError: The weight is not 2-D.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} is a {type(weight).__name__}; quantize a tensor")
    if weight.layout != torch.strided or weight.device.type == "meta":
        kind = "on the meta device" if weight.device.type == "meta" else str(weight.layout)
        raise TypeError(f"{name} is {kind}; quantize a dense weight that is loaded")
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"{name} has dtype {weight.dtype}; quantize a bfloat16, float16 or float32 weight")
    if weight.dim() != 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; quantize a 2-D [out_features, in_features] weight"
        )


def check_values(weight: Tensor, scheme: QuantScheme, name: str) -> None:
    """Refuse values that cannot be quantized, without quantizing.

    Raises:
        ValueError: NaN or infinite values, or a group that spans more than fp32 can hold.
    """
    low, high = _group_bounds(weight.detach(), scheme)
    _check_bounds(low, high, scheme, name)


def quantized_nbytes(shape: tuple[int, int], scheme: QuantScheme, dtype: torch.dtype) -> int:
    """Bytes of codes, scale and min of an ``[out_features, in_features]`` weight of a dtype."""
    groups = math.prod(scheme.metadata_shape(shape))
    metadata = groups * dtype.itemsize * (1 if scheme.symmetric else 2)
    return shape[0] * layout.packed_width(shape[1], scheme.num_bits) * 2 + metadata


def row_blocks(
    scheme: QuantScheme, rows: int, in_features: int, block_weights: int = _BLOCK_WEIGHTS
) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` row ranges that bound the scratch memory of a pass over a weight.

    Where groups run along the rows, a range is either whole groups or part of one. A weight without
    columns has none.

    Args:
        scheme: How the weight is quantized.
        rows: out_features.
        in_features: Columns.
        block_weights: About how many weights a range holds.
    """
    if in_features == 0:
        return
    step = max(1, block_weights // in_features)
    span = rows
    if scheme.group_dim == 0:
        size = scheme.resolve_group_size((rows, in_features))
        step, span = (step - step % size, rows) if size <= step else (step, size)
    for first in range(0, rows, max(1, span)):
        last = min(rows, first + span)
        for start in range(first, last, step):
            yield start, min(last, start + step)


def group_view(
    values: Tensor, metas: Sequence[Tensor], scheme: QuantScheme, start: int, rows: int
) -> tuple[Tensor, list[Tensor]]:
    """See a block of rows group by group, so that its metadata broadcasts over it.

    Args:
        values: ``[block_rows, in_features]``, a block that `row_blocks` yields.
        metas: Scale, and min if there is one, of the whole weight.
        scheme: How the weight is quantized.
        start: First row of the block.
        rows: out_features of the whole weight.

    Returns:
        The values with the grouped dimension split in two, padded to whole groups with zeros, and the
        metadata in fp32 with a dimension of 1 in the place of the group. `ungroup` undoes it.
    """
    block_rows, columns = values.shape
    size = scheme.resolve_group_size((rows, columns))
    if scheme.group_dim == 1:
        size = min(size, columns)
        pad = -columns % size
        values = torch.nn.functional.pad(values, (0, pad)) if pad else values
        grouped = values.view(block_rows, (columns + pad) // size, size)
        return grouped, [meta[start : start + block_rows].float().unsqueeze(2) for meta in metas]
    first, last = start // size, -(-(start + block_rows) // size)
    if last - first > 1:
        pad = -block_rows % size
        values = torch.nn.functional.pad(values, (0, 0, 0, pad)) if pad else values
    grouped = values.view(last - first, -1, columns)
    return grouped, [meta[first:last].float().unsqueeze(1) for meta in metas]


def ungroup(grouped: Tensor, scheme: QuantScheme, block_rows: int, columns: int) -> Tensor:
    """The block of rows ``[block_rows, columns]`` behind the result of `group_view`."""
    if scheme.group_dim == 1:
        return grouped.flatten(1)[:, :columns]
    return grouped.flatten(0, 1)[:block_rows]


def _codes(
    weight: Tensor, scale: Tensor, minimum: Tensor | None, scheme: QuantScheme, start: int, rows: int
) -> Tensor:
    """Nearest codes of a block of rows, uint8."""
    metas = [scale] if minimum is None else [scale, minimum]
    values, metas = group_view(weight.float(), metas, scheme, start, rows)
    steps = values - (metas[1] if minimum is not None else 0.0)
    # A zero scale belongs to a constant group, whose distance to min is 0 as well.
    steps = steps.div_(torch.where(metas[0] == 0, 1.0, metas[0])).round_()
    # Only a scale that was rounded down leaves weights beyond the last step.
    if minimum is None:
        steps.clamp_(1 - scheme.zero_code, scheme.zero_code - 1).add_(scheme.zero_code)
    else:
        steps.clamp_(0, scheme.max_code)
    return ungroup(steps.to(torch.uint8), scheme, *weight.shape)


def _group_bounds(weight: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight of each group, in the weight's dtype and metadata's shape."""
    dim = scheme.group_dim
    rows, columns = weight.shape
    groups_shape = scheme.metadata_shape((rows, columns))
    if weight.numel() == 0:
        return weight.new_zeros(groups_shape), weight.new_zeros(groups_shape)
    size = min(scheme.resolve_group_size((rows, columns)), weight.shape[dim])
    whole = weight.shape[dim] // size
    body = weight.narrow(dim, 0, whole * size).unflatten(dim, (whole, size))
    low, high = body.amin(dim + 1), body.amax(dim + 1)
    if whole * size < weight.shape[dim]:
        tail = weight.narrow(dim, whole * size, weight.shape[dim] - whole * size)
        low = torch.cat((low, tail.amin(dim, keepdim=True)), dim)
        high = torch.cat((high, tail.amax(dim, keepdim=True)), dim)
    return low, high


def _check_bounds(low: Tensor, high: Tensor, scheme: QuantScheme, name: str) -> None:
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError(f"{name} has NaN or infinite values and cannot be quantized; mend the checkpoint")
    if not scheme.symmetric and not bool(torch.isfinite(high.float() - low.float()).all()):
        raise ValueError(
            f"{name} has a group whose range exceeds float32; rescale the weight, or quantize symmetrically"
        )


def _metadata(low: Tensor, high: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor | None]:
    scale = torch.empty(low.shape, dtype=low.dtype, device=low.device)
    pieces = (meta.flatten().split(_BLOCK_WEIGHTS // 8) for meta in (scale, low, high))
    for scale_piece, low_piece, high_piece in zip(*pieces, strict=True):
        low64, high64 = low_piece.double(), high_piece.double()
        if scheme.symmetric:
            steps = torch.where(low64 == high64, 1.0, float(scheme.zero_code - 1))
            start, span = torch.zeros_like(low64), torch.maximum(low64.abs(), high64.abs())
        else:
            steps = torch.full_like(low64, scheme.max_code)
            start, span = low64, high64 - low64
        rounded = _round_up(span / steps, low.dtype)
        beyond = start + steps * rounded.double() > torch.finfo(low.dtype).max
        scale_piece.copy_(torch.where(beyond, _next(rounded, -1), rounded))
    return scale, None if scheme.symmetric else low.contiguous()


def _round_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative fp64 values to the next dtype value that is not smaller."""
    rounded = values.to(dtype)
    return torch.where(rounded.double() < values, _next(rounded, 1), rounded)


def _next(values: Tensor, step: int) -> Tensor:
    """The neighbours of positive floats: they are ordered as their bits are."""
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    return (bits + step).view(values.dtype)
