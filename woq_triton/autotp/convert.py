"""Which of DeepSpeed's layers becomes which quantized one, decided by the forward that it runs."""

from collections.abc import Callable

from deepspeed.module_inject import layers as ds_layers
from torch import Tensor, nn

from woq_triton.autotp import stock
from woq_triton.autotp.layers import (
    QuantizedColumnParallel,
    QuantizedHiddenParallelEmbedding,
    QuantizedReplicatedInput,
    QuantizedRowParallel,
    QuantizedVocabParallelEmbedding,
)
from woq_triton.model import Conversion
from woq_triton.modules import QuantizedEmbedding, QuantizedModule
from woq_triton.weight import QuantizedWeight

_Build = Callable[[QuantizedWeight, ds_layers.TensorParallel_Layer], QuantizedModule]

_BY_FORWARD: dict[str, _Build] = {
    "LmHeadLinearAllreduce": QuantizedReplicatedInput,
    "LinearAllreduceWithReplicatedInput": QuantizedReplicatedInput,
    "LinearAllreduce": QuantizedRowParallel,
    "SubParamLinearAllreduce": QuantizedRowParallel,
    "LinearLayer": QuantizedColumnParallel,
    "SubParamLinearLayer": QuantizedColumnParallel,
    "VocabParallelEmbedding": QuantizedVocabParallelEmbedding,
    "HiddenParallelEmbedding": QuantizedHiddenParallelEmbedding,
}
"""The quantized layer for each forward, by the name of DeepSpeed's class that defines it."""

_BROKEN = {
    "conv_LinearLayer": "DeepSpeed's conv_LinearLayer multiplies by its Conv1D weight the wrong way round",
    "Conv_LinearALlreduce": "DeepSpeed's Conv_LinearALlreduce cuts its input by the number of outputs",
}
"""Layers that inherit a known forward but compute something wrong, or fail, before quantization."""

_CYCLES = ("gather_params", "_tp_partition")
"""Attributes of AutoTP's parameters that refer back to the layer."""


def convert_autotp(module: nn.Module) -> Conversion | str | None:
    """Convert the layers that DeepSpeed AutoTP makes, and subclasses that run their forward.

    Returns:
        How to convert the layer, or why it is left alone; None for layers that are not DeepSpeed's.
    """
    if (left := stock.reason(module)) is not None:
        return left
    if type(module) is ds_layers.EmbeddingLayer and isinstance(module.weight, Tensor):
        return Conversion(module.weight, QuantizedEmbedding)
    if not isinstance(module, ds_layers.TensorParallel_Layer):
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the instance (offloading does that)"
    if module.defer_collectives_to_compiler:
        return "its collectives are left to DeepSpeed's compile pass; quantize before compiling"
    for name, reason in _BROKEN.items():
        if isinstance(module, getattr(ds_layers, name, ())):
            return reason
    build = next((b for name, b in _BY_FORWARD.items() if _runs_forward_of(module, name)), None)
    if build is None:
        return f"{type(module).__name__} has a forward of its own"
    return Conversion(module.weight, lambda qweight: build(qweight, module), lambda: _release(module))


def _runs_forward_of(module: nn.Module, name: str) -> bool:
    known = getattr(ds_layers, name, None)
    return known is not None and type(module).forward is known.forward


def _release(module: ds_layers.TensorParallel_Layer) -> None:
    """Give the dense shard's memory back now, not when the garbage collector finds the cycle."""
    for parameter in module.parameters(recurse=False):
        for attribute in _CYCLES:
            if hasattr(parameter, attribute):
                delattr(parameter, attribute)
    module.weight.data = module.weight.new_empty(0)
