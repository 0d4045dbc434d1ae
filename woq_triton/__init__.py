"""Weight-only quantization for models that DeepSpeed AutoTP shards, on hand-written Triton kernels.

Importing it needs torch alone and touches no device.
"""

import importlib
from types import ModuleType

from woq_triton.api import quantize_model
from woq_triton.modules import QuantizedEmbedding, QuantizedLinear
from woq_triton.report import QuantizationReport
from woq_triton.scheme import QuantScheme
from woq_triton.warmup import WarmupReport, warmup
from woq_triton.weight import QuantizedWeight, embedding, linear, quantize

__all__ = [
    "QuantScheme",
    "QuantizationReport",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "QuantizedWeight",
    "WarmupReport",
    "embedding",
    "linear",
    "quantize",
    "quantize_model",
    "warmup",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import `woq_triton.autotp`, and DeepSpeed with it, when it is first asked for."""
    if name == "autotp":
        return importlib.import_module("woq_triton.autotp")
    raise AttributeError(f"module 'woq_triton' has no attribute {name!r}")
