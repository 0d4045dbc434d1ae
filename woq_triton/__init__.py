"""Weight-only quantization for models that DeepSpeed AutoTP shards, on hand-written Triton kernels.

Importing it needs torch alone and touches no device.
"""

from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight, embedding, linear, quantize

__all__ = ["QuantScheme", "QuantizedWeight", "embedding", "linear", "quantize"]
__version__ = "0.1.0"
