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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from woq_triton import backends
from woq_triton.backends import cpu_packed
from woq_triton.checks import CHECKS, check_embedding, check_linear, check_weight, check_x

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
    "Tensor? bias, int num_bits, int group_size, int in_features) -> Tensor"
)
_DEVICE_OF_KEY = {"CPU": "cpu", "CUDA": "cuda", "XPU": "xpu", "CompositeExplicitAutograd": None}
# Refused in the implementations of these devices instead: a Python function behind the Autograd key would
# be another way through the dispatcher on every call.
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradXPU")


def _implement(op: str, device: str | None) -> Callable[..., Tensor]:
    """The function behind an op's dispatch key: check, find who serves the device, call it."""
    check, arity = CHECKS[op], _SCHEMAS[op].count(",") + 1
    weight_index = 0 if op == "dequantize" else 1
    found: dict[ModuleType, Callable[..., Tensor]] = {}

    def checking(implementation: ModuleType) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(implementation, op)
        if getattr(implementation, "CHECKS_REQUESTS", False):
            return function

        def checked(*args: Any) -> Tensor:
            check(*args)
            if len(args) < arity:  # the dispatcher drops a trailing argument that has its default value
                args = (*args, None)
            return function(*args)

        return checked

    def run(*args: Any) -> Tensor:
        if torch.is_grad_enabled():
            _refuse_gradient(op, args)
        device_type = device or args[weight_index].device.type
        implementation = backends.serve(device_type)
        function = found.get(implementation)
        if function is None:
            function = found[implementation] = checking(implementation)
        return function(*args)

    return run


def _fake_linear(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    check_linear(x, packed, *rest)
    out_features, out_dtype = rest[6], (rest[8] if len(rest) > 8 else None)
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)


def _fake_embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> Tensor:
    check_embedding(ids, packed, scale, min, *scheme)
    out_dtype = scheme[5] if len(scheme) > 5 else None
    return scale.new_empty((*ids.shape, scheme[4]), dtype=out_dtype or scale.dtype)


def _fake_dequantize(packed: Tensor, scale: Tensor, min: Tensor | None, *scheme: Any) -> Tensor:
    check_weight(packed, scale, min, *scheme)
    out_dtype = scheme[5] if len(scheme) > 5 else None
    return scale.new_empty((scheme[3], scheme[4]), dtype=out_dtype or scale.dtype)


_FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": _fake_linear,
    "embedding": _fake_embedding,
    "dequantize": _fake_dequantize,
}


def _fake(op: str) -> Callable[..., Tensor]:
    """What the compiler calls in place of an op."""

    def run(*args: Any) -> Tensor:
        if torch.is_grad_enabled():
            _refuse_gradient(op, args)
        return _FAKES[op](*args)

    return run


def _linear_rearranged(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    min: Tensor | None,
    scale_and_zero: Tensor | None,
    zero_rest: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    in_features: int,
) -> Tensor:
    """The private op of layers whose codes are in a CPU kernel's own arrangement."""
    check_x(x, codes, in_features)
    return cpu_packed.linear(x, codes, scale, min, scale_and_zero, zero_rest, bias, num_bits, group_size)


def _fake_linear_rearranged(x: Tensor, codes: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    check_x(x, codes, rest[-1])
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _refuse_gradient(op: str, args: tuple[Any, ...]) -> None:
    """Raise if an input requires a gradient: one that is silently dropped would be worse than an error."""
    for value in args:
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"woq_triton.{op} has no gradient, but an input of shape {tuple(value.shape)} "
                "requires one; call the model under torch.no_grad() or detach the input"
            )


def _refuse_autograd(op: str) -> Callable[..., Tensor]:
    """The function behind the Autograd key of devices whose implementation may be someone else's."""

    def run(*args: Any) -> Tensor:
        if torch.is_grad_enabled():
            _refuse_gradient(op, args)
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
        for key in _DEVICE_OF_KEY:
            if f"Autograd{key}" in _AUTOGRAD_KEYS:
                library.impl(op, torch.library.fallthrough_kernel, f"Autograd{key}")
        torch.library.register_fake(f"woq_triton::{op}", _fake(op), lib=library)
    library.define(_REARRANGED + _REARRANGED_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_REARRANGED, _linear_rearranged, "CPU")
    library.impl(_REARRANGED, _refuse_autograd(_REARRANGED), "Autograd")
    torch.library.register_fake(f"woq_triton::{_REARRANGED}", _fake_linear_rearranged, lib=library)
    return library


_library = _register()
"""Keeps the registrations alive: they end with this object."""
