"""Quantization of models that DeepSpeed AutoTP has sharded; the only part that imports DeepSpeed."""

from woq_triton.autotp.install import install, uninstall
from woq_triton.autotp.policy import ReplacePolicy
from woq_triton.autotp.quantize import quantize_model

__all__ = ["ReplacePolicy", "install", "quantize_model", "uninstall"]
