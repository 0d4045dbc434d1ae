"""The ops on a CPU: dequantize a cache-sized block of rows and multiply, block after block.

No dense weight is ever held. Shapes and conventions are those of `woq_triton.ops`. Layers can do better by
keeping their codes in an arrangement of torch's own kernels, see `woq_triton.backends.cpu_packed`.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from woq_triton import reference
from woq_triton.quantize import row_blocks
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

dequantize = reference.dequantize
embedding = reference.embedding

_LEAST_BF16_TOKENS = 8
"""From this many tokens on, a bf16 product repays the rounding of the weights to bf16."""


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
    """``x @ weight.T + bias`` with fp32 sums; see `product_dtype` for the products."""
    scheme = QuantScheme(num_bits, group_size, group_dim, min is None)
    tokens = x.reshape(math.prod(x.shape[:-1]), in_features)
    out = torch.empty(tokens.shape[0], out_features, dtype=out_dtype or x.dtype)
    if in_features == 0:
        out[:] = 0 if bias is None else bias
    tokens = tokens.to(product_dtype(tokens, out.dtype))
    for start, stop in row_blocks(scheme, out_features, in_features, block_weights()):
        codes = layout.unpack(packed[start:stop], num_bits, in_features, torch.int16)
        weight = reference.dequantize_rows(codes, scale, min, scheme, out_features, start)
        block_bias = None if bias is None else bias[start:stop]
        multiply(tokens, weight.t(), block_bias, out[:, start:stop])
    return out.view(*x.shape[:-1], out_features)


def block_weights() -> int:
    """Weights that are dequantized at a time: a share near the caches of each thread, and few barriers."""
    return torch.get_num_threads() << 19


def product_dtype(tokens: Tensor, out_dtype: torch.dtype) -> torch.dtype:
    """What a dense product of ``[M, in_features]`` activations is computed in.

    bf16 where the activations and the result are bf16, the processor multiplies bf16 and there are enough
    tokens; the weights are then rounded to bf16, as those of a dense model are. Otherwise fp32.
    """
    bf16 = tokens.dtype == out_dtype == torch.bfloat16
    return (
        torch.bfloat16 if bf16 and len(tokens) >= _LEAST_BF16_TOKENS and multiplies_bf16() else torch.float32
    )


@functools.cache
def multiplies_bf16() -> bool:
    """Whether the processor has bf16 dot products; where it lacks them, torch's take longer than fp32's."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def multiply(tokens: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``tokens @ weight_t + bias`` into out.

    Args:
        tokens: ``[M, in_features]``, bf16 or fp32.
        weight_t: fp32 ``[in_features, features]``; rounded to the tokens' dtype.
        bias: ``[features]`` or None.
        out: ``[M, features]``, any float dtype and strides.
    """
    product = tokens @ weight_t.to(tokens.dtype)
    if bias is None:
        out.copy_(product)
    else:
        torch.add(product, bias, out=out)


def multiply_blocks(
    tokens: Tensor, weight_t: Callable[[slice], Tensor], out_features: int, grain: int, bias: Tensor | None
) -> Tensor:
    """``tokens @ weight.T + bias``, the weight made block after block: ``[M, out_features]`` in x's dtype.

    Args:
        tokens: ``[M, in_features]``, any float dtype.
        weight_t: Makes some rows of the weight, transposed: fp32 ``[in_features, rows]``.
        out_features: Rows of the weight.
        grain: A block's rows are a multiple of it.
        bias: ``[out_features]`` or None.
    """
    out = tokens.new_empty(len(tokens), out_features)
    tokens = tokens.to(product_dtype(tokens, out.dtype))
    step = max(grain, block_weights() // tokens.shape[1] // grain * grain)
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        multiply(tokens, weight_t(rows), None if bias is None else bias[rows], out[:, rows])
    return out


def to_weights(codes: Tensor, centre: int, scale: Tensor, min: Tensor | None) -> Tensor:
    """Turn codes into weights in place.

    Args:
        codes: fp32 ``[groups, group_size, rows]``.
        centre: The code that stands for 0 in symmetric weights.
        scale: ``[rows, groups]``.
        min: As scale, or None.
    """
    if min is None:
        codes -= centre
    codes *= scale.t().float().unsqueeze(1)
    if min is not None:
        codes += min.t().float().unsqueeze(1)
    return codes
