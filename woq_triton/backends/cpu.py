"""The ops on a CPU: dequantize a cache-sized block of rows and multiply, block after block.

No dense weight is ever held. Shapes and conventions are those of `woq_triton.ops`.
"""

import math

import torch
from torch import Tensor

from woq_triton import reference
from woq_triton.quantize import row_blocks
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

dequantize = reference.dequantize
embedding = reference.embedding


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
    """``x @ weight.T + bias`` with fp32 products and sums."""
    scheme = QuantScheme(num_bits, group_size, group_dim, min is None)
    tokens = x.reshape(math.prod(x.shape[:-1]), in_features).float()
    out = torch.empty(tokens.shape[0], out_features, dtype=out_dtype or x.dtype, device=x.device)
    if in_features == 0:
        out[:] = 0 if bias is None else bias
    for start, stop in row_blocks(scheme, out_features, in_features):
        codes = layout.unpack(packed[start:stop], num_bits, in_features)
        weight = reference.dequantize_rows(codes, scale, min, scheme, out_features, start)
        block_bias = None if bias is None else bias[start:stop].float()
        out[:, start:stop] = torch.nn.functional.linear(tokens, weight, block_bias)
    return out.view(*x.shape[:-1], out_features)
