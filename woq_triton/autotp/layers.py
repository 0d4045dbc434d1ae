"""Quantized counterparts of the layers that DeepSpeed AutoTP makes.

Each keeps the communication of the layer it replaces and swaps the matmul or the look-up for a
quantized one. A shard is quantized by itself: its groups start at its own first row or column.
"""

from copy import deepcopy
from typing import Any

from deepspeed import comm as dist
from deepspeed.module_inject.layers import (
    GatherFromTensorParallelRegion,
    TensorParallel_Layer,
    is_autotp_training_mode,
)
from torch import Tensor, nn

from woq_triton.modules import QuantizedEmbedding, QuantizedLinear
from woq_triton.weight import QuantizedWeight

_CARRIED = (
    "mp_group",
    "tp_world_size",
    "tp_index",
    "world_size",
    "rank",
    "is_tp_parallel",
    "name",
    "tp_meta",
    "support_training",
    "gather_output",
    "is_vocab_parallel_lm_head",
    "vocab_size",
    "vocab_start_index",
    "vocab_end_index",
    "_partition_sizes",
)
"""Attributes of AutoTP's layers that DeepSpeed, or a user, reads from outside."""


class _Parallel(nn.Module):
    """What the parallel layers share: attributes of the layer replaced, and its process group.

    Attributes:
        mp_group: The tensor-parallel process group. Copies share it. A pickle cannot hold it: set it
            on the unpickled layer before use.
        tp_world_size: Ranks that share the weight.
        tp_index: This rank among them.
    """

    mp_group: Any
    tp_world_size: int
    tp_index: int
    _partition_sizes: tuple[int, ...]

    def _carry_over(self, layer: TensorParallel_Layer) -> None:
        for attribute in _CARRIED:
            if hasattr(layer, attribute):
                setattr(self, attribute, getattr(layer, attribute))

    def _group(self) -> Any:
        if self.mp_group is None:
            raise RuntimeError(
                f"{type(self).__name__} is shard {self.tp_index} of {self.tp_world_size} but has no process "
                "group (pickling drops it); set its mp_group"
            )
        return self.mp_group

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Sum over the ranks, in the dtype of the partial sums, as the layer replaced does."""
        if self.tp_world_size == 1:
            return partial
        # DeepSpeed's shared-memory reduction silently skips what is not contiguous.
        partial = partial.contiguous()
        if is_autotp_training_mode():
            dist.all_reduce(partial, group=self._group())
        else:
            dist.inference_all_reduce(partial, group=self._group())
        return partial

    def _own_columns(self, x: Tensor) -> Tensor:
        """This rank's part of a replicated input."""
        total = sum(self._partition_sizes)
        if x.shape[-1] != total:
            raise ValueError(f"x has shape {tuple(x.shape)}, but the sharded layer takes {total} features")
        start = sum(self._partition_sizes[: self.tp_index])
        return x.narrow(-1, start, self._partition_sizes[self.tp_index])

    def _gather(self, out: Tensor) -> Tensor:
        if self.tp_world_size == 1:
            return out
        gathered: Tensor = GatherFromTensorParallelRegion.apply(self._group(), out, self._partition_sizes)
        return gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Parallel":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            copied.__dict__[name] = value if name == "mp_group" else deepcopy(value, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mp_group": None}

    def extra_repr(self) -> str:
        """As the plain layer's, and which shard it is."""
        return f"{super().extra_repr()}, shard {self.tp_index} of {self.tp_world_size}"


class QuantizedColumnParallel(_Parallel, QuantizedLinear):
    """Output features split over the ranks: ``x [..., in] -> [..., this rank's out]``.

    With `gather_output` every rank returns the features of all.

    Args:
        qweight: This rank's shard ``[out_features / ranks, in_features]``.
        layer: The layer replaced.
    """

    gather_output: bool = False

    def __init__(self, qweight: QuantizedWeight, layer: TensorParallel_Layer) -> None:
        super().__init__(qweight, layer.bias)
        self._carry_over(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Local features, gathered if the layer gathers."""
        out = super().forward(x)
        return self._gather(out) if self.gather_output else out


class QuantizedRowParallel(_Parallel, QuantizedLinear):
    """Input features split over the ranks: the partial results are summed, then the bias is added once.

    Args:
        qweight: This rank's shard ``[out_features, in_features / ranks]``.
        layer: The layer replaced.
    """

    def __init__(self, qweight: QuantizedWeight, layer: TensorParallel_Layer) -> None:
        super().__init__(qweight, layer.bias)
        self._carry_over(layer)

    @property
    def op_bias(self) -> None:
        """None: the bias is added after the sum."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., this rank's in] -> [..., out_features]``, the same on every rank."""
        out = self._all_reduce(self.multiply(x, None))
        if self.bias is not None:
            out += self.bias
        return out


class QuantizedReplicatedInput(QuantizedRowParallel):
    """A row-parallel layer that gets all input features and takes its own: lm_head, mostly."""

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., all in_features] -> [..., out_features]``."""
        return super().forward(self._own_columns(x))


class _ParallelEmbedding(_Parallel, QuantizedEmbedding):
    """What the parallel embeddings share: the factor that some models multiply rows with."""

    embed_scale: Tensor | None

    def __init__(self, qweight: QuantizedWeight, layer: TensorParallel_Layer) -> None:
        super().__init__(qweight, layer.padding_idx)
        self._carry_over(layer)
        if layer.embed_scale is None:
            self.embed_scale = None  # DeepSpeed's loading trips over a buffer that is None
        else:
            self.register_buffer("embed_scale", layer.embed_scale, persistent=False)

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class QuantizedVocabParallelEmbedding(_ParallelEmbedding):
    """Rows of the table split over the ranks; a rank contributes the tokens that it holds.

    Args:
        qweight: This rank's rows ``[num_embeddings / ranks, embedding_dim]``.
        layer: The layer replaced.
    """

    vocab_start_index: int
    vocab_end_index: int

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...] -> [..., embedding_dim]``, the same on every rank."""
        if self.tp_world_size == 1:
            return self._scaled(super().forward(ids))
        elsewhere = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        local = super().forward((ids - self.vocab_start_index).masked_fill(elsewhere, 0))
        return self._scaled(self._all_reduce(local.masked_fill(elsewhere.unsqueeze(-1), 0.0)))


class QuantizedHiddenParallelEmbedding(_ParallelEmbedding):
    """Columns of the table split over the ranks, and gathered after the look-up.

    Args:
        qweight: This rank's columns ``[num_embeddings, embedding_dim / ranks]``.
        layer: The layer replaced.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...] -> [..., embedding_dim]``, all columns."""
        return self._scaled(self._gather(super().forward(ids)))
