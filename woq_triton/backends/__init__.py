"""What serves an op on a device: one module an implementation, each with the same three functions.

``linear``, ``embedding`` and ``dequantize``, with the signatures of `woq_triton.reference`.
"""

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

IMPLEMENTATIONS = {
    "reference": "woq_triton.reference",
    "cpu": "woq_triton.backends.cpu",
    "triton": "woq_triton.backends.triton",
    "deepspeed": "woq_triton.backends.deepspeed_ops",
    "fallback": "woq_triton.backends.fallback",
}
"""Importable implementations by name."""

_BY_DEVICE = {"cpu": "cpu", "cuda": "triton", "xpu": "triton"}


def name_for(device_type: str) -> str:
    """Name of the implementation that serves a device, as reports show it.

    ``WOQ_TRITON_IMPL`` in the environment forces one for all devices.

    Raises:
        ValueError: ``WOQ_TRITON_IMPL`` names no implementation.
    """
    forced = os.environ.get("WOQ_TRITON_IMPL")
    if forced is None:
        return _BY_DEVICE.get(device_type, "fallback")
    if forced not in IMPLEMENTATIONS:
        raise ValueError(f"WOQ_TRITON_IMPL is {forced!r}, but must be one of {', '.join(IMPLEMENTATIONS)}")
    return forced


def name_for_weight(packed: Tensor, scale: Tensor, min: Tensor | None, *op_scheme: int) -> str:
    """Name of what serves a weight, as reports show it.

    Args:
        packed: As the ops take it, like the others.
        scale: Likewise.
        min: Likewise.
        op_scheme: num_bits, group_size, group_dim, out_features, in_features.
    """
    device_type = packed.device.type
    name = name_for(device_type)
    if name != "fallback":
        return name
    key = torch._C._dispatch_key_for_device(device_type)
    if torch._C._dispatch_has_kernel_for_dispatch_key("woq_triton::linear", key):
        return f"kernel registered for {key}"
    chosen: str = serve(device_type).choose(packed, scale, min, *op_scheme)
    return chosen


@functools.cache
def serve(device_type: str) -> ModuleType:
    """The implementation that serves a device; chosen at first use, then kept.

    Raises:
        ImportError: The device is served by Triton, and Triton is not installed.
    """
    name = name_for(device_type)
    try:
        return importlib.import_module(IMPLEMENTATIONS[name])
    except ImportError as error:
        raise ImportError(
            f"device {device_type!r} is served by the {name} implementation, which failed to import "
            f"({error}); install it, or set WOQ_TRITON_IMPL=reference to do without"
        ) from error
