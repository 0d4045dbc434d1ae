"""The ops as torch's dispatcher knows them: ``torch.ops.woq_triton.linear``, ``.embedding``, ``.dequantize``.

They are flat functions of plain tensors and integers, so that they can be traced, compiled and
captured, and the dispatcher is the plug-in registry: an accelerator with kernels of its own registers
an implementation under its own dispatch key and is served by it from then on. Registered through
`torch.library.Library`, which costs less on each call than `torch.library.custom_op`.

Arguments, the same for every implementation:

==============  ==========================================================================
x               ``[..., in_features]``, bf16, fp16 or fp32, any strides, also without tokens
ids             any shape, int32 or int64
packed          int16 ``[out_features, packed_width]``, see `woq_triton_kernels.layout`
scale, min      ``[out_features, groups]`` for group_dim 1, ``[groups, in_features]`` for 0;
                min is None for symmetric weights
bias            ``[out_features]`` or None
group_size      positive; may be larger than the dimension, which is then one group
out_dtype       None means x's dtype (linear) or the scale's (embedding, dequantize)
==============  ==========================================================================
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from woq_triton import backends
from woq_triton.backends import cpu_packed
from woq_triton.quantize import WEIGHT_DTYPES
from woq_triton_kernels import layout

_WEIGHT = "Tensor packed, Tensor scale, Tensor? min"
_SCHEME = "int num_bits, int group_size, int group_dim, int out_features, int in_features"
_SCHEMAS = {
    "linear": f"(Tensor x, {_WEIGHT}, Tensor? bias, {_SCHEME}, ScalarType? out_dtype=None) -> Tensor",
    "embedding": f"(Tensor ids, {_WEIGHT}, {_SCHEME}, ScalarType? out_dtype=None) -> Tensor",
    "dequantize": f"({_WEIGHT}, {_SCHEME}, ScalarType? out_dtype=None) -> Tensor",
}
_REARRANGED = "linear_rearranged"
_REARRANGED_SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor? min, Tensor? scale_and_zero, Tensor? zero_rest, "
    "Tensor? bias, int group_size, int in_features) -> Tensor"
)
_DEVICE_OF_KEY = {"CPU": "cpu", "CUDA": "cuda", "XPU": "xpu", "CompositeExplicitAutograd": None}


def _check_weight(
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
    if out_dtype is not None and out_dtype not in WEIGHT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; ask for bfloat16, float16 or float32")


def _check_linear(
    x: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, bias: Tensor | None, *scheme: Any
) -> None:
    """Raise if activations do not fit their weight, or the weight itself is wrong."""
    _check_weight(packed, scale, min, *scheme)
    out_features, in_features = scheme[3:5]
    _check_x(x, packed, in_features)
    if bias is None:
        return
    if bias.shape != (out_features,) or bias.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, but must be float ({out_features},)")
    if bias.device != packed.device:
        raise ValueError(f"bias is on {bias.device}, the weight on {packed.device}; move them together")


def _check_x(x: Tensor, weight: Tensor, in_features: int) -> None:
    if x.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; cast it to bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the weight has in_features={in_features}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, but the weight is on {weight.device}; move one of them")


def _check_embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> None:
    """Raise if token ids do not fit their table, or the table itself is wrong."""
    _check_weight(packed, scale, min, *scheme)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids have dtype {ids.dtype}; cast them to int64")
    if ids.device != packed.device:
        raise ValueError(f"ids are on {ids.device}, but the weight is on {packed.device}; move one of them")


_CHECKS: dict[str, Callable[..., None]] = {
    "linear": _check_linear,
    "embedding": _check_embedding,
    "dequantize": _check_weight,
}


def _implement(op: str, device: str | None) -> Callable[..., Tensor]:
    """The function behind an op's dispatch key: check, find who serves the device, call it."""
    check, arity = _CHECKS[op], _SCHEMAS[op].count(",") + 1
    weight_index = 0 if op == "dequantize" else 1

    def run(*args: Any) -> Tensor:
        check(*args)
        if len(args) < arity:  # the dispatcher drops a trailing argument that has its default value
            args = (*args, None)
        served_by = backends.serve(device or args[weight_index].device.type)
        result: Tensor = getattr(served_by, op)(*args)
        return result

    return run


def _fake_linear(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    _check_linear(x, packed, *rest)
    out_features, out_dtype = rest[6], (rest[8] if len(rest) > 8 else None)
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)


def _fake_embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> Tensor:
    _check_embedding(ids, packed, scale, min, *scheme)
    out_dtype = scheme[5] if len(scheme) > 5 else None
    return scale.new_empty((*ids.shape, scheme[4]), dtype=out_dtype or scale.dtype)


def _fake_dequantize(packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> Tensor:
    _check_weight(packed, scale, min, *scheme)
    out_dtype = scheme[5] if len(scheme) > 5 else None
    return scale.new_empty((scheme[3], scheme[4]), dtype=out_dtype or scale.dtype)


_FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": _fake_linear,
    "embedding": _fake_embedding,
    "dequantize": _fake_dequantize,
}


def _linear_rearranged(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    min: Tensor | None,
    scale_and_zero: Tensor | None,
    zero_rest: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    in_features: int,
) -> Tensor:
    """The private op of layers whose codes are in a CPU kernel's own arrangement."""
    _check_x(x, codes, in_features)
    return cpu_packed.linear(x, codes, scale, min, scale_and_zero, zero_rest, bias, group_size)


def _fake_linear_rearranged(x: Tensor, codes: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    _check_x(x, codes, rest[-1])
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _refuse_autograd(op: str) -> Callable[..., Tensor]:
    """The function behind the Autograd key: a silently dropped gradient would be worse than an error."""

    def run(*args: Any) -> Tensor:
        if torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"woq_triton.{op} has no gradient, but an input of shape {tuple(value.shape)} "
                        "requires one; call the model under torch.no_grad() or detach the input"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = getattr(torch.ops.woq_triton, op).default(*args)
        return result

    return run


def _register() -> torch.library.Library:
    library = torch.library.Library("woq_triton", "DEF")
    for op, schema in _SCHEMAS.items():
        library.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key, device in _DEVICE_OF_KEY.items():
            library.impl(op, _implement(op, device), key)
        library.impl(op, _refuse_autograd(op), "Autograd")
        torch.library.register_fake(f"woq_triton::{op}", _FAKES[op], lib=library)
    library.define(_REARRANGED + _REARRANGED_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_REARRANGED, _linear_rearranged, "CPU")
    library.impl(_REARRANGED, _refuse_autograd(_REARRANGED), "Autograd")
    torch.library.register_fake(f"woq_triton::{_REARRANGED}", _fake_linear_rearranged, lib=library)
    return library


_library = _register()
"""Keeps the registrations alive: they end with this object."""
