"""Plain torch versions of the ops: the oracle that every implementation is tested against.

They serve any device torch knows, in fp32, without regard to speed: `linear` rebuilds the dense
weight. All shapes and conventions are those of `woq_triton.ops`.
"""

import torch
from torch import Tensor

from woq_triton.quantize import group_view, row_blocks, ungroup
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout


def dequantize_rows(
    codes: Tensor, scale: Tensor, min: Tensor | None, scheme: QuantScheme, out_features: int, start: int
) -> Tensor:
    """Dense fp32 weights of a run of rows.

    Args:
        codes: uint8 ``[rows, in_features]``, the codes of rows ``start : start + rows``.
        scale: The whole weight's scale, any float dtype.
        min: The whole weight's min, or None when symmetric.
        scheme: How the weight was quantized.
        out_features: Rows of the whole weight.
        start: First of the rows.

    Returns:
        fp32 ``[rows, in_features]``.
    """
    metas = [scale] if min is None else [scale, min]
    values, metas = group_view(codes.float(), metas, scheme, start, out_features)
    if min is None:
        values -= scheme.zero_code
    values *= metas[0]
    if min is not None:
        values += metas[1]
    return ungroup(values, scheme, *codes.shape)


def dequantize(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Dense weight ``[out_features, in_features]``, in `out_dtype` or else the scale's dtype."""
    scheme = QuantScheme(num_bits, group_size, group_dim, min is None)
    dense = torch.empty(out_features, in_features, dtype=out_dtype or scale.dtype, device=packed.device)
    for start, stop in row_blocks(scheme, out_features, in_features):
        codes = layout.unpack(packed[start:stop], num_bits, in_features)
        dense[start:stop] = dequantize_rows(codes, scale, min, scheme, out_features, start)
    return dense


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``x @ weight.T + bias``, computed in fp32: ``[..., in_features] -> [..., out_features]``."""
    weight = dequantize(
        packed, scale, min, num_bits, group_size, group_dim, out_features, in_features, torch.float32
    )
    out = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    return out.to(out_dtype or x.dtype)


def embedding(
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Rows ``ids`` of the weight, only those dequantized: ``[*ids.shape, in_features]``."""
    flat = ids.reshape(-1)
    codes = layout.unpack(packed.index_select(0, flat), num_bits, in_features)
    rows = codes.float()
    if min is None:
        rows -= 2 ** (num_bits - 1)
    if group_dim == 0:
        row_scale, row_min = scale[flat // group_size], None if min is None else min[flat // group_size]
    else:
        columns = torch.arange(in_features, device=ids.device) // group_size
        row_scale, row_min = scale[flat][:, columns], None if min is None else min[flat][:, columns]
    rows *= row_scale.float()
    if row_min is not None:
        rows += row_min.float()
    return rows.to(out_dtype or scale.dtype).view(*ids.shape, in_features)
