"""Compiling a model's kernels when it is loaded, so that no request waits for one, nor a graph's capture."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from woq_triton import backends
from woq_triton.modules import QuantizedEmbedding, QuantizedLinear, QuantizedModule

_Kind = tuple[Any, ...]


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` made ready.

    Attributes:
        layers: Quantized layers of the model that Triton kernels serve.
        kinds: How many of them differ in shape, scheme, dtype or device.
        kernels: Kernels that were compiled, or found in Triton's cache on disk, and loaded.
        seconds: How long it took.
        reason: Why nothing was to be done, or an empty string.
    """

    layers: int
    kinds: int
    kernels: int
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        """One line."""
        if self.reason:
            return f"nothing to warm up: {self.reason}"
        return (
            f"{self.kernels} kernels for {self.layers} layers of {self.kinds} kinds ready "
            f"in {self.seconds:.1f} s"
        )


def warmup(
    model: nn.Module, max_tokens: int = 1024, dtype: torch.dtype | None = None, *, progress: bool = True
) -> WarmupReport:
    """Compile and load every kernel that a quantized model will launch, and make its scratch memory.

    Afterwards no call of the model with up to `max_tokens` tokens compiles anything, and CUDA graphs of it
    can be captured. Kernels are compiled for each kind of layer (shape, scheme, dtypes, device, bias or
    not) and each range of M that has a tile of its own, once for all layers of the kind; Triton keeps them
    on disk for the next start. Nothing is launched, and no result changes.

    Args:
        model: A model that `woq_triton.quantize_model` quantized, or a layer, on the device that will run it.
        max_tokens: Most rows of activations in a call: sequences times tokens of each.
        dtype: Of activations; by default each layer's own `weight_dtype`.
        progress: Show a progress bar on standard error of rank 0, if tqdm is installed.

    Returns:
        How many kernels are ready; with a reason if there was nothing to do, as on a CPU.

    Raises:
        TypeError: dtype is not bf16, fp16 or fp32.
        ValueError: max_tokens is not positive, or the model has no quantized layer.
    """
    start = time.perf_counter()
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1")
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"dtype is {dtype}; activations are bfloat16, float16 or float32")
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    if not layers:
        raise ValueError("the model has no quantized layer: call woq_triton.quantize_model first")
    served = [layer for layer in layers if backends.name_for(layer.packed.device.type) == "triton"]
    if not served:
        devices = ", ".join(sorted({layer.packed.device.type for layer in layers}))
        return WarmupReport(0, 0, 0, time.perf_counter() - start, f"no Triton kernel serves {devices}")
    kinds = {_kind(layer, dtype): layer for layer in served}
    compiled: set[int] = set()
    for layer in _shown(list(kinds.values()), progress):
        compiled |= {id(handle.compiled) for handle in _prepare(layer, max_tokens, dtype)}
    seconds = time.perf_counter() - start
    reason = "" if compiled else "this Triton or driver compiles at the first call of each kernel"
    return WarmupReport(len(served), len(kinds), len(compiled), seconds, reason)


def _kind(layer: QuantizedModule, dtype: torch.dtype | None) -> _Kind:
    """Equal for layers that launch the same kernels."""
    bias = layer.op_bias if isinstance(layer, QuantizedLinear) else None
    tensors = tuple(
        None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)
        for tensor in (layer.packed, layer.scale, layer.min, bias)
    )
    return isinstance(layer, QuantizedEmbedding), tensors, layer.op_scheme, dtype or layer.weight_dtype


def _prepare(layer: QuantizedModule, max_tokens: int, dtype: torch.dtype | None) -> list[Any]:
    """Handles of all kernels that a layer launches; makes the scratch of its device too."""
    implementation = backends.serve(layer.packed.device.type)
    implementation.reserve(layer.packed.device)
    weight = (layer.packed, layer.scale, layer.min)
    if isinstance(layer, QuantizedLinear):
        kind = dtype or layer.weight_dtype
        handles: list[Any] = implementation.prepare_linear(
            *weight, layer.op_bias, *layer.op_scheme, kind, max_tokens
        )
        return handles
    handles = implementation.prepare_embedding(*weight, *layer.op_scheme, layer.weight_dtype)
    return handles


def _shown(layers: list[QuantizedModule], progress: bool) -> Iterator[QuantizedModule]:
    """Go through layers with a progress bar on rank 0."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if progress and rank == 0:
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            pass
        else:
            yield from tqdm(layers, desc="compiling kernels", unit="kind", leave=False, disable=None)
            return
    yield from layers
