"""Autograd-free layers on a quantized weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from woq_triton.lazy_weight import LazyWeight
from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight, quantize


class QuantizedModule(nn.Module):
    """What quantized layers share: the weight's tensors, their casts and moves, a readable `weight`.

    Attributes:
        packed: int16 ``[out_features, packed_width]``, a frozen Parameter.
        scale: Metadata of the shape that the scheme gives, a buffer.
        min: As scale; None when symmetric.
        scheme: How the weight was quantized.
        weight_dtype: Dtype that the layer presents as its weight's. Casting the module changes this
            and the bias; packed, scale and min keep their values, so that no cast loses anything.

    Args:
        qweight: The weight. Modules made from one whose `packed` is a Parameter share it.
        weight_dtype: By default the metadata's dtype.
    """

    packed: nn.Parameter
    scale: Tensor
    min: Tensor | None

    def __init__(self, qweight: QuantizedWeight, weight_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        packed = qweight.packed
        self.packed = (
            packed if isinstance(packed, nn.Parameter) else nn.Parameter(packed, requires_grad=False)
        )
        self.register_buffer("scale", qweight.scale)
        if qweight.min is None:
            self.min = None
        else:
            self.register_buffer("min", qweight.min)
        self.scheme: QuantScheme = qweight.scheme
        self.weight_shape = qweight.shape
        self.weight_dtype = weight_dtype or qweight.dtype
        self._op_scheme = qweight.op_scheme

    @property
    def qweight(self) -> QuantizedWeight:
        """The quantized weight; its tensors are the module's own."""
        return QuantizedWeight(self.packed, self.scale, self.min, self.scheme, self.weight_shape)

    @property
    def weight(self) -> Tensor:
        """A stand-in for the dense weight: shape, dtype and device are free, any arithmetic dequantizes."""
        return LazyWeight(self.qweight, self.weight_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModule":
        # Set aside, as a cast would round them.
        buffers: dict[str, Tensor | None] = {}
        for name in ("scale", "min"):
            if name in self._buffers:
                buffers[name] = self._buffers.pop(name)
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(buffers)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self.packed.device)).dtype
        for name, buffer in buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            if moved.dtype != buffer.dtype:
                moved = buffer.to(moved.device)
            if torch._has_compatible_shallow_copy_type(buffer, moved):
                buffer.data = moved  # in place, so that tied modules go on sharing it
            else:
                self._buffers[name] = moved
        return self

    def extra_repr(self) -> str:
        """Shape and scheme, as ``print(model)`` shows them."""
        return f"{self.weight_shape[0]}, {self.weight_shape[1]}, {self.scheme}, dtype={self.weight_dtype}"


class QuantizedLinear(QuantizedModule):
    """``x @ weight.T + bias`` on a quantized weight; x ``[..., in_features]``, any float dtype.

    Args:
        qweight: The weight ``[out_features, in_features]``.
        bias: ``[out_features]`` or None; copied into a frozen Parameter that shares its storage.
        weight_dtype: By default the metadata's dtype.
    """

    bias: nn.Parameter | None

    def __init__(
        self, qweight: QuantizedWeight, bias: Tensor | None = None, weight_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(qweight, weight_dtype)
        self.out_features, self.in_features = qweight.shape
        # A Parameter of its own: DeepSpeed's carry references that keep the dense layer alive.
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Module, scheme: QuantScheme, name: str = "linear") -> "QuantizedLinear":
        """Quantize a layer that has a ``weight [out_features, in_features]`` and a ``bias``.

        Args:
            linear: An `nn.Linear`, or a layer that computes the same.
            scheme: How to quantize.
            name: What errors call the layer.

        Raises:
            TypeError: The weight is not bf16, fp16 or fp32.
            ValueError: The weight is not 2-D, or holds values that cannot be quantized.
        """
        weight, bias = _tensor(linear, "weight", name), getattr(linear, "bias", None)
        return cls(quantize(weight, scheme, name), bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]`` in x's dtype."""
        out: Tensor = torch.ops.woq_triton.linear.default(
            x, self.packed, self.scale, self.min, self.bias, *self._op_scheme
        )
        return out

    def extra_repr(self) -> str:
        """Shape, scheme and bias, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class QuantizedEmbedding(QuantizedModule):
    """Rows of a quantized table, in `weight_dtype`; only the rows asked for are dequantized.

    Args:
        qweight: The table ``[num_embeddings, embedding_dim]``.
        padding_idx: Kept for those who read it; it has a meaning in training only.
        weight_dtype: By default the metadata's dtype.
    """

    def __init__(
        self,
        qweight: QuantizedWeight,
        padding_idx: int | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(qweight, weight_dtype)
        self.num_embeddings, self.embedding_dim = qweight.shape
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, scheme: QuantScheme, name: str = "embedding"
    ) -> "QuantizedEmbedding":
        """Quantize an `nn.Embedding`.

        Args:
            embedding: The layer; its weight is ``[num_embeddings, embedding_dim]``.
            scheme: How to quantize.
            name: What errors call the layer.

        Raises:
            TypeError: The weight is not bf16, fp16 or fp32.
            ValueError: The layer renormalizes its rows (`max_norm`), or the weight cannot be quantized.
        """
        if embedding.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm={embedding.max_norm}, which rewrites its rows; set it to None"
            )
        weight = _tensor(embedding, "weight", name)
        return cls(quantize(weight, scheme, name), embedding.padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...]``, int32 or int64, to ``[..., embedding_dim]``."""
        rows: Tensor = torch.ops.woq_triton.embedding.default(
            ids, self.packed, self.scale, self.min, *self._op_scheme, self.weight_dtype
        )
        return rows


def _tensor(module: nn.Module, attribute: str, name: str) -> Tensor:
    value: Any = getattr(module, attribute, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} ({type(module).__name__}) has no tensor called {attribute}")
    return value
