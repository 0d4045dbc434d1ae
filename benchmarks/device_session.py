"""A run on a device: the time that is left, what was found and what was wrong."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from woq_triton import QuantizedWeight
from woq_triton.backends import triton as backend


class Session:
    """One run: the device, the time that is left, and what was found."""

    def __init__(self, dry: bool, seconds: float) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.ends = time.monotonic() + seconds
        self.found: dict[str, Any] = {}
        self.failures: list[str] = []

    def left(self) -> float:
        """Seconds until the run has to be over."""
        return self.ends - time.monotonic()

    def section(self, name: str, run: Callable[["Session"], Any]) -> None:
        """Run one part; if it fails, say so and go on with the next."""
        start = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            self.found[name] = run(self)
        except Exception as error:  # a failure of one part must not cost what the others would show
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"   FAILED: {error}", flush=True)
        print(f"   {time.monotonic() - start:.1f} s", flush=True)

    def expect(self, ok: bool, what: str) -> None:
        """Note a failure."""
        if not ok:
            self.failures.append(what)
            print(f"   WRONG: {what}", flush=True)


def dense64(qweight: QuantizedWeight) -> Tensor:
    """The weight in fp64 from codes and metadata as stored, ``[out_features, in_features]``."""
    size = qweight.scheme.resolve_group_size(qweight.shape)
    index = torch.arange(qweight.shape[qweight.scheme.group_dim], device=qweight.device) // size
    scale = qweight.scale.double().index_select(qweight.scheme.group_dim, index)
    codes = qweight.codes().double()
    if qweight.min is None:
        return (codes - qweight.scheme.zero_code) * scale
    return codes * scale + qweight.min.double().index_select(qweight.scheme.group_dim, index)


def call(x: Tensor, qweight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The Triton implementation, on a GPU and in the interpreter alike."""
    return backend.linear(x, qweight.packed, qweight.scale, qweight.min, bias, *qweight.op_scheme, None)
