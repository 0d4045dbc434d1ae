"""A quantized weight as one value, and the tensor-level functions of the public API."""

from dataclasses import dataclass

import torch
from torch import Tensor

from woq_triton import ops as _ops  # registers torch.ops.woq_triton  # noqa: F401
from woq_triton.quantize import quantize_tensors, row_blocks
from woq_triton.reference import dequantize_rows
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``[out_features, in_features]`` as packed codes and metadata.

    Attributes:
        packed: int16 ``[out_features, packed_width]``, see `woq_triton_kernels.layout`.
        scale: ``scheme.metadata_shape(shape)``, bf16, fp16 or fp32.
        min: As scale, or None when the scheme is symmetric.
        scheme: How it was quantized.
        shape: ``(out_features, in_features)``; packed is padded along in_features, shape is not.
    """

    packed: Tensor
    scale: Tensor
    min: Tensor | None
    scheme: QuantScheme
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the metadata, which is that of the weight that was quantized."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scale and min together."""
        return self.packed.nbytes + self.scale.nbytes + (0 if self.min is None else self.min.nbytes)

    @property
    def op_scheme(self) -> tuple[int, int, int, int, int]:
        """``(num_bits, group_size, group_dim, out_features, in_features)`` as the ops take them."""
        group_size = self.scheme.resolve_group_size(self.shape)
        return (self.scheme.num_bits, group_size, self.scheme.group_dim, *self.shape)

    def codes(self) -> Tensor:
        """The codes, uint8 ``[out_features, in_features]``."""
        return layout.unpack(self.packed, self.scheme.num_bits, self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight ``[out_features, in_features]``, computed in fp32.

        Args:
            dtype: bf16, fp16 or fp32; by default `self.dtype`.
        """
        dense: Tensor = torch.ops.woq_triton.dequantize(
            self.packed, self.scale, self.min, *self.op_scheme, dtype
        )
        return dense

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same weight on another device."""
        minimum = None if self.min is None else self.min.to(device)
        return QuantizedWeight(
            self.packed.to(device), self.scale.to(device), minimum, self.scheme, self.shape
        )

    def shard(self, dim: int, start: int, stop: int) -> "QuantizedWeight":
        """Part ``start:stop`` of the weight along a dimension, as a copy.

        It equals quantizing that part of the dense weight, bit for bit.

        Args:
            dim: 0 (out_features) or 1 (in_features).
            start: First row or column.
            stop: Row or column after the last.

        Raises:
            ValueError: The range is not inside the weight, or cuts a group in two.
        """
        length = self.shape[dim]
        if not 0 <= start <= stop <= length:
            raise ValueError(f"shard {start}:{stop} is not inside the {length} of dimension {dim}")
        shape = (stop - start, self.shape[1]) if dim == 0 else (self.shape[0], stop - start)
        size = 1
        if dim == self.scheme.group_dim:
            size = self.scheme.resolve_group_size(self.shape)
            if (start % size and start < length) or (stop % size and stop < length):
                raise ValueError(f"shard {start}:{stop} cuts a group of {size} in two; align it to {size}")
        groups = slice(start // size, -(-stop // size))
        rows = self.packed[start:stop] if dim == 0 else self._shard_columns(start, stop)
        scale, minimum = (
            None if meta is None else (meta[groups] if dim == 0 else meta[:, groups]).contiguous().clone()
            for meta in (self.scale, self.min)
        )
        assert scale is not None
        return QuantizedWeight(rows.clone(), scale, minimum, self.scheme, shape)

    def relative_error(self, weight: Tensor) -> float:
        """Frobenius norm of the quantization error over that of the weight; 0 for an empty weight.

        Args:
            weight: The dense weight that was quantized, ``[out_features, in_features]``.
        """
        error = norm = 0.0
        for start, stop in row_blocks(self.scheme, *self.shape):
            block = weight[start:stop].detach().float()
            codes = layout.unpack(self.packed[start:stop], self.scheme.num_bits, self.shape[1])
            dense = dequantize_rows(codes, self.scale, self.min, self.scheme, self.shape[0], start)
            # Summed in fp64, as squares leave the range of fp32 early.
            error += float(torch.linalg.vector_norm(dense.sub_(block), dtype=torch.float64)) ** 2
            norm += float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2
        return float((error / norm) ** 0.5) if norm else 0.0

    def _shard_columns(self, start: int, stop: int) -> Tensor:
        if start % layout.BLOCK_K == 0:
            words = layout.words_per_block(self.scheme.num_bits)
            if stop % layout.BLOCK_K == 0 or stop == self.shape[1]:
                return self.packed[:, start // layout.BLOCK_K * words : -(-stop // layout.BLOCK_K) * words]
        return layout.pack(self.codes()[:, start:stop], self.scheme.num_bits)


def quantize(weight: Tensor, scheme: QuantScheme, name: str = "weight") -> QuantizedWeight:
    """Quantize a dense weight.

    Streams over blocks of rows: the scratch memory is a few MB whatever the weight's size.

    Args:
        weight: ``[out_features, in_features]``, bf16, fp16 or fp32; either may be 0.
        scheme: How to quantize.
        name: What errors call the weight, usually the layer's name.

    Raises:
        TypeError: The weight is not bf16, fp16 or fp32.
        ValueError: The weight is not 2-D, has NaN or infinite values, or a group spans more than
            fp32 can hold.
    """
    packed, scale, minimum = quantize_tensors(weight, scheme, name)
    return QuantizedWeight(packed, scale, minimum, scheme, (weight.shape[0], weight.shape[1]))


def linear(
    x: Tensor, qweight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias`` on a quantized weight, with fp32 sums; no gradient.

    Args:
        x: ``[..., in_features]``, bf16, fp16 or fp32, any strides; 1-D and without tokens too.
        qweight: The weight ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
        out_dtype: Dtype of the result, by default x's.

    Returns:
        ``[..., out_features]``.

    Raises:
        TypeError: An unsupported dtype.
        ValueError: Shapes or devices that do not fit.
        RuntimeError: x requires a gradient outside `torch.no_grad`.
    """
    out: Tensor = torch.ops.woq_triton.linear(
        x, qweight.packed, qweight.scale, qweight.min, bias, *qweight.op_scheme, out_dtype
    )
    return out


def embedding(ids: Tensor, qweight: QuantizedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a quantized table; only those asked for are dequantized.

    Args:
        ids: Row numbers of any shape, int32 or int64.
        qweight: The table ``[num_embeddings, embedding_dim]``.
        out_dtype: Dtype of the result, by default the metadata's.

    Returns:
        ``[*ids.shape, embedding_dim]``.

    Raises:
        TypeError: An unsupported dtype.
        ValueError: ids and table are on different devices.
        IndexError: On CPU, an id outside the table.
    """
    rows: Tensor = torch.ops.woq_triton.embedding(
        ids, qweight.packed, qweight.scale, qweight.min, *qweight.op_scheme, out_dtype
    )
    return rows
