"""A layer's codes in the arrangement of torch's own CPU kernels, in place of the canonical one.

Which kernel serves a weight is settled here; `cpu_int4`, `cpu_int8_planes` and `cpu_int8_bags` know the
arrangements. The codes are the same, only their order differs, so `restore` gives back the canonical weight
bit for bit. Scale and min keep their values and shapes, and become views of the order that the kernel reads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from woq_triton import backends
from woq_triton.backends import cpu_int4, cpu_int8_bags, cpu_int8_planes
from woq_triton.scheme import QuantScheme

INT4, PLANES, BAGS = "cpu (torch int4)", "cpu (torch int4, two planes)", "cpu (FBGEMM int8)"
"""The kernels, as reports call them."""


@dataclass(frozen=True)
class Rearranged:
    """A weight's tensors as a CPU kernel takes them.

    Attributes:
        codes: uint8, two dimensions, as the kernel's module says.
        scale: ``[out_features, groups]``, a view of memory in another order.
        min: As scale; None when symmetric.
        scale_and_zero: INT4 and PLANES: bf16 ``[kernel groups, out_features, 2]``, holds the scale.
        zero_rest: INT4, where the rests of the zero points are no columns: bf16 ``[groups, out_features]``.
    """

    codes: Tensor
    scale: Tensor
    min: Tensor | None
    scale_and_zero: Tensor | None = None
    zero_rest: Tensor | None = None


def kernel_for(
    scheme: QuantScheme, shape: tuple[int, int], metadata: torch.dtype, activations: torch.dtype, device: str
) -> str | None:
    """The kernel that serves a weight faster rearranged; None if it is best left canonical.

    Args:
        scheme: How it was quantized.
        shape: ``(out_features, in_features)``.
        metadata: Dtype of its scale.
        activations: Dtype that is expected of x; others are served too, but not faster.
        device: Type of the device it is on.
    """
    if device != "cpu" or backends.name_for("cpu") != "cpu":
        return None
    if activations == torch.bfloat16 and cpu_int4.fits(scheme, shape, metadata):
        return INT4
    if activations == torch.bfloat16 and cpu_int8_planes.fits(scheme, shape, metadata):
        return PLANES
    return BAGS if cpu_int8_bags.fits(scheme, shape) else None


def rearrange(
    kernel: str,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    scheme: QuantScheme,
    shape: tuple[int, int],
) -> Rearranged:
    """Rearrange a weight for a kernel that `kernel_for` chose.

    Args:
        kernel: INT4, PLANES or BAGS.
        packed: int16 ``[out_features, packed_width]``, see `woq_triton_kernels.layout`.
        scale: ``[out_features, groups]``.
        min: As scale, or None.
        scheme: How it was quantized.
        shape: ``(out_features, in_features)``.
    """
    group_size = scheme.resolve_group_size(shape)
    min_view = None if min is None else min.t().contiguous().t()
    if kernel == BAGS:
        codes = cpu_int8_bags.arrange(packed, shape[1], group_size)
        return Rearranged(codes, scale.t().contiguous().t(), min_view)
    if kernel == PLANES:
        scale_and_zero = cpu_int8_planes.metadata(scale, min, group_size)
        scale_view = cpu_int8_planes.scale_of(scale_and_zero, group_size)
        return Rearranged(cpu_int8_planes.arrange(packed, shape[1]), scale_view, min_view, scale_and_zero)
    codes, scale_and_zero, rest = cpu_int4.arrange(packed, scale, min, shape[1], group_size)
    scale_view = cpu_int4.scale_of(scale_and_zero, scale.shape[1], group_size)
    return Rearranged(codes, scale_view, min_view, scale_and_zero, rest)


def restore(kernel: str, codes: Tensor, scheme: QuantScheme, shape: tuple[int, int]) -> Tensor:
    """The canonical codes, int16 ``[out_features, packed_width]``, of a weight that is rearranged."""
    if kernel == INT4:
        return cpu_int4.restore(codes, shape[1])
    if kernel == PLANES:
        return cpu_int8_planes.restore(codes)
    return cpu_int8_bags.restore(codes, *shape, scheme.resolve_group_size(shape))


def linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    min: Tensor | None,
    scale_and_zero: Tensor | None,
    zero_rest: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """``x @ weight.T + bias`` on a rearranged weight: ``[..., in_features] -> [..., out_features]``."""
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if scale_and_zero is None:
        out = cpu_int8_bags.linear(tokens, codes, scale, min, bias, group_size)
    elif num_bits == 8:
        out = cpu_int8_planes.linear(tokens, codes, scale_and_zero, scale, min, bias, group_size)
    else:
        out = cpu_int4.linear(tokens, codes, scale_and_zero, zero_rest, scale, min, bias, group_size)
    return out.view(*x.shape[:-1], len(scale))
