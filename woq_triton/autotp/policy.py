"""Quantize each layer the moment AutoTP has cut its shard, so that a rank never holds a dense model.

AutoTP has no hook for this, but torch has: it announces every module that is registered in another
one. `ReplacePolicy` listens while an engine is made. When AutoTP puts one of its layers in place, the
layer is quantized on the spot, the quantized one takes its place, and the dense shard is released
before the next is cut. What AutoTP leaves as it is, embeddings and the like, is quantized at the end.
"""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from woq_triton import model as _model
from woq_triton.autotp.loading import CheckpointLoading
from woq_triton.autotp.quantize import CONVERTERS, quantize_model
from woq_triton.autotp.ranks import Ranks
from woq_triton.config import parse_config
from woq_triton.modules import QuantizedModule
from woq_triton.quantize import check_values
from woq_triton.report import QuantizationReport


class ReplacePolicy:
    """Quantizes the model of the engine that is made inside the ``with`` block.

    ::

        with woq_triton.autotp.ReplacePolicy(ds_config) as policy:
            engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 2}, ...)
        print(policy.report)

    The result is that of `quantize_model` on the finished engine. A layer that cannot be quantized
    does not stop the others, but makes the block raise at its end, on every rank: the model is not
    usable then.

    Args:
        ds_config: As for `quantize_model`.
        on_layer: Called with the number of layers done after each layer.

    Attributes:
        report: What was quantized, on this rank; complete when the block has ended.

    Raises:
        ValueError: The configuration is wrong.
    """

    def __init__(self, ds_config: Mapping[str, Any], on_layer: Callable[[int], None] | None = None) -> None:
        self.report = QuantizationReport()
        self._ds_config = ds_config
        self._schemes = parse_config(ds_config)
        self._on_layer = on_layer
        self._root: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._layers: list[QuantizedModule] = []
        self._table: nn.Module | None = None
        self._error: Exception | None = None
        self._loading: CheckpointLoading | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "ReplacePolicy":
        """Start to listen."""
        of_module: Callable[..., Any] = self._registered
        of_parameter: Callable[..., Any] = self._loaded
        self._handles = [
            register_module_module_registration_hook(of_module),
            register_module_parameter_registration_hook(of_parameter),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to listen, agree with the other ranks, and quantize what AutoTP left plain.

        Raises:
            RuntimeError: No engine was made.
            Exception: A layer failed, on this rank or another.
        """
        while self._handles:
            self._handles.pop().remove()
        self._names.clear()
        if error is not None:
            if self._loading is not None and isinstance(error, NotImplementedError):
                self._loading.finish()  # torch says no more than that something has no value
            if self._error is not None and isinstance(error, Exception):
                raise self._error from error  # what went wrong first
            return
        if self._root is None:
            raise RuntimeError("no DeepSpeed inference engine was made inside the ReplacePolicy block")
        if self._loading is not None:
            try:
                self._loading.finish()
            except ValueError as missing:
                self._error = self._error or missing
        for layer in self._layers:
            # It described the dense shard, and was needed only as long as AutoTP went on.
            vars(layer.packed).pop(DS_AUTOTP_UC_META, None)
        self._layers.clear()
        Ranks.of(self._root).confirm(self._error)
        quantize_model(self._root, self._ds_config, report=self.report)

    def _registered(self, parent: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
        """What torch calls before it registers a module; the module returned takes its place."""
        if isinstance(parent, InferenceEngine) and name == "module":
            self._start(module)
            return None
        if not isinstance(module, TensorParallel_Layer) or id(parent) not in self._names:
            return None
        path = self._names[id(parent)]
        try:
            if self._table is not None and not self._table.weight.is_meta:
                self._quantize_table(self._table)
            return self._quantize(f"{path}.{name}" if path else name, module)
        except Exception as error:
            # Raised here it would leave the other ranks waiting in DeepSpeed's next collective.
            self._error = self._error or error
            return None

    def _loaded(self, owner: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """What torch calls before it registers a parameter; the one returned takes its place."""
        if self._loading is None or parameter is None or parameter.is_meta:
            return None
        try:
            return self._loading.registered(owner, name, parameter)
        except ValueError as error:
            self._error = self._error or error
            return None

    def _start(self, root: nn.Module) -> None:
        if self._root is not None:
            self._error = RuntimeError(
                "two engines were made inside one ReplacePolicy block; use one for each"
            )
        self._root = root
        self._names = {id(module): name for name, module in root.named_modules()}
        self._table = _table_to_load(root)
        if any(parameter.is_meta for parameter in root.parameters()):
            self._loading = CheckpointLoading(root)

    def _quantize_table(self, dense: nn.Module) -> None:
        """Quantize the input embedding as soon as it is loaded, before the head needs as much again."""
        self._table = None
        name = self._names[id(dense)]
        module = self._quantize(name, dense)
        if module is not None:
            assert self._root is not None
            parent, _, attribute = name.rpartition(".")
            setattr(self._root.get_submodule(parent), attribute, module)
            # Loops over modules in DeepSpeed go on to hold the table; not its memory.
            weight: Any = dense.weight
            weight.data = weight.new_empty(0)

    def _quantize(self, name: str, dense: nn.Module) -> nn.Module | None:
        if dense.weight.is_meta:
            return None
        judged = _model.judge((name,), dense, self._schemes, CONVERTERS)
        if judged is None or not isinstance(judged[1], _model.PlannedLayer):
            return None  # it is judged again, and reported, at the end
        planned = judged[1]
        check_values(planned.conversion.weight, planned.scheme, f"layer {name!r}")
        described = getattr(dense.weight, DS_AUTOTP_UC_META, None)
        module, report = _model.convert_layer(planned, {})
        if described is not None:
            # AutoTP divides the head counts of modules in which it finds a weight that carries this.
            setattr(module.packed, DS_AUTOTP_UC_META, described)
        self._layers.append(module)
        self.report.layers.append(report)
        if self._on_layer is not None:
            self._on_layer(len(self.report.layers))
        if planned.conversion.release is not None:
            planned.conversion.release()
        return module


def _table_to_load(root: nn.Module) -> nn.Module | None:
    """The input embedding, if DeepSpeed will load it from a file and nothing else needs its weight."""
    find = getattr(root, "get_input_embeddings", None)
    table = find() if find is not None else None
    if table is None or getattr(getattr(root, "config", None), "tie_word_embeddings", True):
        return None
    places = [name for name, module in root.named_modules(remove_duplicate=False) if module is table]
    weight = getattr(table, "weight", None)
    return table if len(places) == 1 and weight is not None and weight.is_meta else None
