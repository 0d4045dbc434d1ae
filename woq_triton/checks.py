"""What a request to an op must be: each check raises with the value and the way out, and costs no work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from woq_triton.quantize import WEIGHT_DTYPES
from woq_triton_kernels import layout


def check_weight(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Raise if a quantized weight's tensors do not belong together, or the output dtype is no float."""
    if num_bits not in layout.CODES_PER_WORD or group_dim not in (0, 1) or group_size < 1:
        raise ValueError(
            f"no kernel for num_bits={num_bits}, group_dim={group_dim}, group_size={group_size}; "
            "num_bits must be 4 or 8, group_dim 0 or 1, group_size positive"
        )
    width = layout.packed_width(in_features, num_bits)
    if packed.dtype != torch.int16 or packed.shape != (out_features, width):
        raise ValueError(
            f"packed is {packed.dtype} {tuple(packed.shape)}, but int{num_bits} codes of a "
            f"({out_features}, {in_features}) weight are torch.int16 {(out_features, width)}"
        )
    if group_dim == 0:
        shape = (-(-out_features // group_size), in_features)
    else:
        shape = (out_features, -(-in_features // group_size))
    for name, meta in (("scale", scale), ("min", min)):
        if meta is None:
            continue
        if meta.shape != shape or meta.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{name} is {meta.dtype} {tuple(meta.shape)}, but must be float {shape}")
        if meta.device != packed.device:
            raise ValueError(f"{name} is on {meta.device}, packed on {packed.device}; move them together")
    if min is not None and min.dtype != scale.dtype:
        raise ValueError(f"min is {min.dtype}, scale {scale.dtype}; give both one dtype")
    if out_dtype is not None and out_dtype not in WEIGHT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; ask for bfloat16, float16 or float32")


def check_linear(
    x: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, bias: Tensor | None, *scheme: Any
) -> None:
    """Raise if activations do not fit their weight, or the weight itself is wrong."""
    check_weight(packed, scale, min, *scheme)
    out_features, in_features = scheme[3:5]
    check_x(x, packed, in_features)
    if bias is None:
        return
    if bias.shape != (out_features,) or bias.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, but must be float ({out_features},)")
    if bias.device != packed.device:
        raise ValueError(f"bias is on {bias.device}, the weight on {packed.device}; move them together")


def check_x(x: Tensor, weight: Tensor, in_features: int) -> None:
    """Raise if activations have another dtype, width or device than their weight takes."""
    if x.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; cast it to bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the weight has in_features={in_features}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, but the weight is on {weight.device}; move one of them")


def check_embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> None:
    """Raise if token ids do not fit their table, or the table itself is wrong."""
    check_weight(packed, scale, min, *scheme)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids have dtype {ids.dtype}; cast them to int64")
    if ids.device != packed.device:
        raise ValueError(f"ids are on {ids.device}, but the weight is on {packed.device}; move one of them")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise if a tensor that kernels read as one block of memory is none."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}, but kernels read it as "
                f"contiguous; keep {name}.contiguous() instead"
            )


CHECKS: dict[str, Callable[..., None]] = {
    "linear": check_linear,
    "embedding": check_embedding,
    "dequantize": check_weight,
}
"""What every implementation's request passes, by op."""
