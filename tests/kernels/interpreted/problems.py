"""Problems for the kernels, and their exact answers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.numerics import make_weight, make_x
from woq_triton.quantize import quantize_tensors
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout


@dataclass
class Problem:
    """A quantized linear layer with its input, and its output in fp64.

    The answer is built from the codes and the stored metadata, so that an error is the kernel's own,
    apart from the quantization's.
    """

    x: Tensor
    packed: Tensor
    scale: Tensor
    min: Tensor | None
    bias: Tensor | None
    weight: Tensor
    expected: Tensor
    scheme: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``."""
        return self.weight.shape[0], self.weight.shape[1]


def dense_weight(
    packed: Tensor, scale: Tensor, min: Tensor | None, scheme: QuantScheme, shape: tuple[int, int]
) -> Tensor:
    """fp64 ``[out_features, in_features]``, by the formulas of the scheme."""
    size = scheme.resolve_group_size(shape)
    index = torch.arange(shape[scheme.group_dim]) // size
    codes = layout.unpack(packed, scheme.num_bits, shape[1]).double()
    wide = scale.double().index_select(scheme.group_dim, index)
    if min is None:
        return (codes - 2 ** (scheme.num_bits - 1)) * wide
    return codes * wide + min.double().index_select(scheme.group_dim, index)


def make_problem(
    M: int,
    N: int,
    K: int,
    scheme: QuantScheme,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    mean: float = 3.0,
    bias: bool = False,
) -> Problem:
    """A problem with x ``[M, K]`` and weight ``[N, K]``, quantized from `weight_dtype` (default `dtype`)."""
    # Factors of ten lie between groups and between runs of 16 weights along a group.
    kind = weight_dtype or dtype
    dense = make_weight(N, K, kind) if scheme.group_dim == 1 else make_weight(K, N, kind).T.contiguous()
    packed, scale, minimum = quantize_tensors(dense, scheme)
    weight = dense_weight(packed, scale, minimum, scheme, (N, K))
    x = make_x(M, K, dtype=dtype, mean=mean)
    vector = make_x(N, dtype=weight_dtype or dtype, mean=1.0, seed=2) if bias else None
    expected = x.double() @ weight.T
    if vector is not None:
        expected += vector.double()
    settings = (scheme.num_bits, scheme.resolve_group_size((N, K)), scheme.group_dim)
    return Problem(x, packed, scale, minimum, vector, weight, expected, settings)
