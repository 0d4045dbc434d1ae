"""A layer's codes in the arrangement of torch's own CPU kernels, in place of the canonical one.

Which kernel serves a weight is settled here; `cpu_int4` and `cpu_int8` know the arrangements. The codes are
the same, only their order differs, so `restore` gives back the canonical weight bit for bit. Scale and min
keep their values and shapes, and become views of the order that the kernel reads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from woq_triton import backends
from woq_triton.backends import cpu_int4, cpu_int8
from woq_triton.scheme import QuantScheme

NAMES = {4: "cpu (torch int4)", 8: "cpu (FBGEMM int8)"}
"""What reports call the kernels, by num_bits."""


@dataclass(frozen=True)
class Rearranged:
    """A weight's tensors as a CPU kernel takes them.

    Attributes:
        codes: uint8, two dimensions, see `cpu_int4` and `cpu_int8`.
        scale: ``[out_features, groups]``, a view of memory in another order.
        min: As scale; None when symmetric.
        scale_and_zero: int4 only: bf16 ``[groups, out_features, 2]``, holds the scale.
        zero_rest: int4 with min only: bf16 ``[groups, out_features]``.
    """

    codes: Tensor
    scale: Tensor
    min: Tensor | None
    scale_and_zero: Tensor | None = None
    zero_rest: Tensor | None = None


def fits(
    scheme: QuantScheme, shape: tuple[int, int], metadata: torch.dtype, activations: torch.dtype, device: str
) -> bool:
    """Whether a weight is served faster rearranged.

    Args:
        scheme: How it was quantized.
        shape: ``(out_features, in_features)``.
        metadata: Dtype of its scale.
        activations: Dtype that is expected of x; others are served too, but not faster.
        device: Type of the device it is on.
    """
    if device != "cpu" or backends.name_for("cpu") != "cpu":
        return False
    if scheme.num_bits == 4:
        return activations == torch.bfloat16 and cpu_int4.fits(scheme, shape, metadata)
    return cpu_int8.fits(scheme, shape)


def rearrange(
    packed: Tensor, scale: Tensor, min: Tensor | None, scheme: QuantScheme, shape: tuple[int, int]
) -> Rearranged:
    """Rearrange a weight that `fits`.

    Args:
        packed: int16 ``[out_features, packed_width]``, see `woq_triton_kernels.layout`.
        scale: ``[out_features, groups]``.
        min: As scale, or None.
        scheme: How it was quantized.
        shape: ``(out_features, in_features)``.
    """
    group_size = scheme.resolve_group_size(shape)
    min_view = None if min is None else min.t().contiguous().t()
    if scheme.num_bits == 8:
        codes = cpu_int8.arrange(packed, shape[1], group_size)
        return Rearranged(codes, scale.t().contiguous().t(), min_view)
    scale_and_zero, rest = cpu_int4.arrange_metadata(scale, min, group_size)
    scale_view = cpu_int4.scale_of(scale_and_zero, group_size)
    return Rearranged(cpu_int4.arrange(packed, shape[1]), scale_view, min_view, scale_and_zero, rest)


def restore(codes: Tensor, scheme: QuantScheme, shape: tuple[int, int]) -> Tensor:
    """The canonical codes, int16 ``[out_features, packed_width]``, of a rearranged weight."""
    if scheme.num_bits == 4:
        return cpu_int4.restore(codes)
    return cpu_int8.restore(codes, *shape, scheme.resolve_group_size(shape))


def linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    min: Tensor | None,
    scale_and_zero: Tensor | None,
    zero_rest: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """``x @ weight.T + bias`` on a rearranged weight: ``[..., in_features] -> [..., out_features]``."""
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if scale_and_zero is None:
        out = cpu_int8.linear(tokens, codes, scale, min, bias, group_size)
    else:
        out = cpu_int4.linear(tokens, codes, scale_and_zero, zero_rest, scale, min, bias, group_size)
    return out.view(*x.shape[:-1], len(scale))
