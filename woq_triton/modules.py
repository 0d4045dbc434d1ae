"""Autograd-free layers on a quantized weight."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from woq_triton import backends
from woq_triton.backends import cpu_packed
from woq_triton.lazy_weight import LazyWeight
from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight, quantize

_EXTRA = ("scale_and_zero", "zero_rest")
"""Buffers that a layer has besides scale and min while its codes are rearranged for int4."""


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
    def op_scheme(self) -> tuple[int, int, int, int, int]:
        """``(num_bits, group_size, group_dim, out_features, in_features)``, as the ops take them."""
        return self._op_scheme

    @property
    def weight(self) -> Tensor:
        """A stand-in for the dense weight: shape, dtype and device are free, any arithmetic dequantizes."""
        return LazyWeight(
            lambda: self.qweight, self.scheme, self.weight_shape, self.weight_dtype, self.packed.device
        )

    @property
    def implementation(self) -> str:
        """What serves the layer, as reports show it."""
        return backends.name_for_weight(self.packed, self.scale, self.min, *self._op_scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata, as the layer holds them."""
        return self.qweight.nbytes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModule":
        code = torch.empty(0, dtype=self.packed.dtype, device=self.packed.device)
        if fn(code).dtype != code.dtype:
            raise TypeError("Module.type would cast packed codes; use .to(dtype), .half() or .bfloat16()")
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

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # Take the saved metadata's dtype: copied into another, it would be rounded.
        for name in ("scale", "min"):
            saved, buffer = state_dict.get(prefix + name), self._buffers.get(name)
            if isinstance(saved, Tensor) and buffer is not None and saved.is_floating_point():
                self._buffers[name] = buffer.to(saved.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

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
        self._wants_rearranged = False
        self._kernel: str | None = None
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
            TypeError: The weight is not bf16, fp16 or fp32, or is stored transposed.
            ValueError: The weight is not 2-D, or holds values that cannot be quantized.
        """
        if is_conv1d(linear):
            raise TypeError(
                f"{name} is a Conv1D, whose weight is [in_features, out_features]; use quantize_model, or "
                "QuantizedLinear(quantize(layer.weight.t(), scheme), layer.bias)"
            )
        weight, bias = _tensor(linear, "weight", name), getattr(linear, "bias", None)
        return cls(quantize(weight, scheme, name), bias)

    @property
    def op_bias(self) -> Tensor | None:
        """The bias that the op adds; subclasses that add it themselves give it None."""
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]`` in x's dtype."""
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``; subclasses that have more to do with the bias call this."""
        op_scheme = self._op_scheme
        if self.rearranged:
            out: Tensor = torch.ops.woq_triton.linear_rearranged.default(
                x,
                self.packed,
                self.scale,
                self.min,
                *(self._buffers.get(name) for name in _EXTRA),
                bias,
                op_scheme[0],
                op_scheme[1],
                op_scheme[4],
            )
        else:
            out = torch.ops.woq_triton.linear.default(x, self.packed, self.scale, self.min, bias, *op_scheme)
        return out

    def rearrange(self) -> bool:
        """Keep the codes as torch's fastest CPU kernel takes them, where one serves this weight.

        They take the place of the canonical codes. What leaves the layer stays canonical: `qweight`,
        `state_dict`, pickles and copies on other devices; a copy or a cast is rearranged again. Not for
        layers that share their weight with another, see `rearrange_for_cpu`.

        Returns:
            Whether the codes are rearranged now.
        """
        self._wants_rearranged = True
        return self._settle_arrangement()

    @property
    def rearranged(self) -> bool:
        """Whether `packed` holds uint8 codes as `woq_triton.backends.cpu_packed` arranges them."""
        return self._kernel is not None

    @property
    def qweight(self) -> QuantizedWeight:
        """The quantized weight; its tensors are the layer's own, or canonical copies if rearranged."""
        qweight = super().qweight
        if self._kernel is None:
            return qweight
        packed = cpu_packed.restore(self._kernel, self.packed, self.scheme, self.weight_shape)
        minimum = None if self.min is None else self.min.contiguous()
        return replace(qweight, packed=packed, scale=self.scale.contiguous(), min=minimum)

    @property
    def implementation(self) -> str:
        """What serves the layer, as reports show it."""
        return self._kernel or super().implementation

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata, as the layer holds them."""
        extra = [self._buffers[name] for name in _EXTRA if name in self._buffers]
        scale = [] if extra else [self.scale]  # otherwise part of scale_and_zero
        tensors = (self.packed, self.min, *scale, *extra)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _settle_arrangement(self) -> bool:
        """Rearrange, or restore, according to where the layer is and what it is cast to."""
        kernel = None
        if self._wants_rearranged:
            kernel = cpu_packed.kernel_for(
                self.scheme, self.weight_shape, self.scale.dtype, self.weight_dtype, self.packed.device.type
            )
        if kernel != self._kernel:
            self._restore()
        if kernel is not None and not self.rearranged:
            tensors = cpu_packed.rearrange(
                kernel, self.packed, self.scale, self.min, self.scheme, self.weight_shape
            )
            self._hold(tensors, kernel)
        return self.rearranged

    def _restore(self) -> None:
        if self.rearranged:
            qweight = self.qweight
            self._hold(cpu_packed.Rearranged(qweight.packed, qweight.scale, qweight.min), None)

    def _hold(self, tensors: cpu_packed.Rearranged, kernel: str | None) -> None:
        # A new Parameter, so that whoever shares the old one keeps what it had.
        packed = nn.Parameter(tensors.codes, requires_grad=False)
        vars(packed).update(vars(self.packed))
        self.packed, self._kernel = packed, kernel
        self.scale, self.min = tensors.scale, tensors.min
        for name, buffer in zip(_EXTRA, (tensors.scale_and_zero, tensors.zero_rest), strict=True):
            if name in self._buffers:
                delattr(self, name)
            if buffer is not None:
                self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        if fn(torch.empty(0, dtype=torch.uint8, device=self.packed.device)).device.type != "cpu":
            self._restore()
        super()._apply(fn, recurse)
        self._settle_arrangement()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rearranged:
            destination.update({prefix + name: tensor for name, tensor in self._canonical().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._restore()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._settle_arrangement()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.rearranged:
            tensors = self._canonical()
            packed = nn.Parameter(tensors.pop("packed"), requires_grad=False)
            state["_parameters"] = {**self._parameters, "packed": packed}
            others = {name: buffer for name, buffer in self._buffers.items() if name not in _EXTRA}
            state["_buffers"] = {**others, **tensors}
            state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - set(_EXTRA)
            state["_kernel"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle_arrangement()

    def _canonical(self) -> dict[str, Tensor]:
        qweight = self.qweight
        tensors = {"packed": qweight.packed, "scale": qweight.scale, "min": qweight.min}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

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


class QuantizedScaledEmbedding(QuantizedEmbedding):
    """A `QuantizedEmbedding` whose rows are multiplied by a constant, as Gemma and BART have them.

    Args:
        qweight: The table ``[num_embeddings, embedding_dim]``.
        embed_scale: The constant; a scalar tensor is rounded to `weight_dtype` first.
        padding_idx: Kept for those who read it.
        weight_dtype: By default the metadata's dtype.
    """

    embed_scale: Tensor | float

    def __init__(
        self,
        qweight: QuantizedWeight,
        embed_scale: Tensor | float,
        padding_idx: int | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(qweight, padding_idx, weight_dtype)
        if isinstance(embed_scale, Tensor):
            self.register_buffer("embed_scale", embed_scale, persistent=False)
        else:
            self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...]``, int32 or int64, to ``[..., embedding_dim]``."""
        scale = self.embed_scale
        return super().forward(ids) * (scale.to(self.weight_dtype) if isinstance(scale, Tensor) else scale)


def rearrange_for_cpu(model: nn.Module) -> None:
    """Rearrange every layer of a model that a CPU kernel serves, see `QuantizedLinear.rearrange`.

    Layers that share their weight with another, such as a head tied to its embedding, stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    owners = Counter(id(layer.packed) for layer in layers)
    for layer in layers:
        if isinstance(layer, QuantizedLinear) and owners[id(layer.packed)] == 1:
            layer.rearrange()


def _tensor(module: nn.Module, attribute: str, name: str) -> Tensor:
    value: Any = getattr(module, attribute, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} ({type(module).__name__}) has no tensor called {attribute}")
    return value


def is_conv1d(module: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D: linear, with its weight ``[in_features, out_features]``."""
    forward = type(module).forward
    return forward.__module__ == "transformers.pytorch_utils" and forward.__qualname__ == "Conv1D.forward"
