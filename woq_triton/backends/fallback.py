"""Devices without a kernel of their own: DeepSpeed's ops where they can serve a weight, else plain torch.

An accelerator is served by its own kernel from the moment that it registers one for its dispatch key;
then nothing here is called.
"""

from typing import Any

from torch import Tensor

from woq_triton import reference
from woq_triton.backends import deepspeed_ops


def choose(packed: Tensor, scale: Tensor, min: Tensor | None, *op_scheme: int) -> str:
    """Name of what serves a weight, ``deepspeed`` or ``reference``.

    Args:
        packed: As the ops take it, like the others.
        scale: Likewise.
        min: Likewise.
        op_scheme: num_bits, group_size, group_dim, out_features, in_features.
    """
    return "reference" if deepspeed_ops.refusal(packed, scale, min, *op_scheme) else "deepspeed"


def linear(
    x: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, bias: Tensor | None, *rest: Any
) -> Tensor:
    """``x @ weight.T + bias``, see `woq_triton.reference.linear`."""
    served = choose(packed, scale, min, *rest[:5]) == "deepspeed"
    return (deepspeed_ops if served else reference).linear(x, packed, scale, min, bias, *rest)


def embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *rest: Any) -> Tensor:
    """Rows of a weight, see `woq_triton.reference.embedding`."""
    return reference.embedding(ids, packed, scale, min, *rest)


def dequantize(packed: Tensor, scale: Tensor, min: Tensor | None, *rest: Any) -> Tensor:
    """A dense weight, see `woq_triton.reference.dequantize`."""
    served = choose(packed, scale, min, *rest[:5]) == "deepspeed"
    return (deepspeed_ops if served else reference).dequantize(packed, scale, min, *rest)
