"""What serves an op on a device: one module an implementation, each with the same three functions.

``linear``, ``embedding`` and ``dequantize``, with the signatures of `woq_triton.reference`.
"""

import functools
import importlib
import os
from types import ModuleType

IMPLEMENTATIONS = {
    "reference": "woq_triton.reference",
    "cpu": "woq_triton.backends.cpu",
    "triton": "woq_triton.backends.triton",
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
        return _BY_DEVICE.get(device_type, "reference")
    if forced not in IMPLEMENTATIONS:
        raise ValueError(f"WOQ_TRITON_IMPL is {forced!r}, but must be one of {', '.join(IMPLEMENTATIONS)}")
    return forced


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
