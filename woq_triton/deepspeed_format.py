"""To and from the layout in which DeepSpeed's own quantizer keeps a weight.

DeepSpeed (``deepspeed.inference.quantization.utils``) stores, for ``w = q / scale + min``::

    data    uint8 [N, K] (int8), or [N, K / 2] (int4): the even column in the high nibble
    scale   [N, groups, 1] for group_dim 1, [groups, 1, K] for group_dim 0; the reciprocal of a step
    min     as scale

Codes carry over exactly. The step does not: its reciprocal is rounded to the metadata's dtype, and is
infinite for a constant group, whose codes then all stand for `min`.
"""

import torch
from torch import Tensor

from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight
from woq_triton_kernels import layout


def to_deepspeed(qweight: QuantizedWeight, name: str = "weight") -> tuple[Tensor, Tensor, Tensor]:
    """Repack a quantized weight for DeepSpeed's DeQuantizer and its kernels.

    Symmetric weights become asymmetric ones with ``min = -zero_code * step``, which is exact.

    Args:
        qweight: The weight ``[N, K]``; its groups must be whole, and K even for int4.
        name: What errors call the weight.

    Returns:
        ``(data, scale, min)`` as described above, scale and min in the weight's metadata dtype.

    Raises:
        ValueError: The layout has no room for the weight: a shorter last group, an odd K, or a step
            whose reciprocal (or a symmetric min) the dtype cannot hold; bf16 or fp32 metadata can.
    """
    columns = qweight.shape[1]
    scheme = qweight.scheme
    size = scheme.resolve_group_size(qweight.shape)
    if qweight.shape[scheme.group_dim] % size:
        raise ValueError(
            f"{name}: DeepSpeed's layout has whole groups only, but {size} does not divide "
            f"{qweight.shape[scheme.group_dim]}; choose a group_size that does"
        )
    codes = qweight.codes()
    if scheme.num_bits == 4:
        if columns % 2:
            raise ValueError(
                f"{name}: DeepSpeed's int4 layout needs an even number of columns, not {columns}"
            )
        codes = codes[:, 0::2] << 4 | codes[:, 1::2]
    dim = scheme.group_dim + 1
    step = qweight.scale
    minimum = step * -scheme.zero_code if qweight.min is None else qweight.min
    scale = _reciprocal(step, name, "reciprocal scale")
    if not bool(minimum.isfinite().all()):
        raise ValueError(
            f"{name}: the min of a symmetric group is beyond {step.dtype}; quantize asymmetrically"
        )
    return codes.contiguous(), scale.unsqueeze(dim), minimum.unsqueeze(dim)


def from_deepspeed(
    data: Tensor,
    scale: Tensor,
    min: Tensor,
    scheme: QuantScheme,
    name: str = "weight",
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Take over a weight that DeepSpeed quantized, with its codes as they are.

    Args:
        data: uint8 ``[N, K]`` for int8 or ``[N, K / 2]`` for int4.
        scale: DeepSpeed's reciprocal scale, ``[N, groups, 1]`` or ``[groups, 1, K]``.
        min: As scale.
        scheme: The settings that DeepSpeed quantized with; asymmetric, as all of its weights are.
        name: What errors call the weight.
        dtype: Of the metadata. In fp16 or bf16 the step is rounded once more, by up to an eighth of a
            step (fp16) or half of one (bf16) at the largest int8 code.

    Raises:
        ValueError: The tensors do not belong to such a weight, or a step overflows the dtype.
    """
    if scheme.symmetric:
        raise ValueError(f"{name}: DeepSpeed quantizes asymmetrically; give a scheme with symmetric=False")
    if data.dtype != torch.uint8 or data.dim() != 2:
        raise ValueError(f"{name}: data is {data.dtype} {tuple(data.shape)}, but must be 2-D torch.uint8")
    codes = data
    if scheme.num_bits == 4:
        codes = torch.stack((data >> 4, data & 0xF), dim=-1).flatten(1)
    shape = (codes.shape[0], codes.shape[1])
    dim = scheme.group_dim + 1
    expected = scheme.metadata_shape(shape)
    for what, meta in (("scale", scale), ("min", min)):
        wanted = (*expected[:dim], 1, *expected[dim:])
        if tuple(meta.shape) != wanted:
            raise ValueError(
                f"{name}: {what} has shape {tuple(meta.shape)}, but {scheme} of {shape} has {wanted}"
            )
    step = _reciprocal(scale.squeeze(dim).to(dtype), name, "step")
    packed = layout.pack(codes, scheme.num_bits)
    return QuantizedWeight(packed, step.contiguous(), min.squeeze(dim).to(dtype).contiguous(), scheme, shape)


def _reciprocal(values: Tensor, name: str, what: str) -> Tensor:
    """1 / values in their dtype, 0 and infinity exchanged; refuse what overflows or turns subnormal."""
    exact = values.double().reciprocal()
    stored = exact.to(values.dtype)
    regular = (values != 0) & values.isfinite()
    lost = regular & (stored.isinf() | (stored.abs() < torch.finfo(values.dtype).tiny))
    if bool(lost.any()):
        worst = float(exact[lost].abs().max())
        raise ValueError(f"{name}: its {what} {worst:.3g} is beyond {values.dtype}; use bfloat16 or float32")
    return stored
