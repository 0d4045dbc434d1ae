"""Quantize a model in place: match layers, check everything, then replace one layer after another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from woq_triton import backends, mapped_memory
from woq_triton.config import FALLBACK, Schemes, parse_config, scheme_for
from woq_triton.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedModule,
    QuantizedScaledEmbedding,
    is_conv1d,
    rearrange_for_cpu,
)
from woq_triton.quantize import WEIGHT_DTYPES, check_values, quantized_nbytes
from woq_triton.report import LayerReport, QuantizationReport, SkippedLayer
from woq_triton.scheme import QuantScheme
from woq_triton.weight import QuantizedWeight, quantize


@dataclass(frozen=True)
class Conversion:
    """How a dense layer becomes a quantized one.

    Attributes:
        weight: The dense weight ``[out_features, in_features]``.
        build: Makes the quantized layer from the quantized weight.
        release: Called when the layer was replaced, to let go of memory that something else holds.
    """

    weight: Tensor
    build: Callable[[QuantizedWeight], QuantizedModule]
    release: Callable[[], None] | None = None


Tie = tuple[Any, ...]

Converter = Callable[[nn.Module], "Conversion | str | None"]
"""Says how a layer is converted, or why it is not (a string), or None where it knows nothing of it."""


@dataclass(frozen=True)
class PlannedLayer:
    """A layer that will be quantized.

    Attributes:
        names: More than one where the model uses the module in several places.
        module: The dense layer.
        scheme: How it will be quantized.
        conversion: How it becomes a quantized one.
        tie: Equal for layers whose weights are the same memory.
    """

    names: tuple[str, ...]
    module: nn.Module
    scheme: QuantScheme
    conversion: Conversion
    tie: Tie


@dataclass
class Plan:
    """The verdict on every layer that a key matches."""

    layers: list[PlannedLayer]
    skipped: list[SkippedLayer]
    unmatched_keys: list[str]

    def leave_alone(self, name: str, reason: str) -> None:
        """Move a planned layer to those left alone."""
        for index, layer in enumerate(self.layers):
            if layer.names[0] == name:
                self.layers.pop(index)
                self.skipped.append(_skip(name, layer.module, reason))
                return


Agree = Callable[[Plan | None, Exception | None], Plan]
"""Settles the plan with other ranks; gets None and the error where making it failed."""


def agree_alone(plan: Plan | None, error: Exception | None) -> Plan:
    """The verdict of a single process: its own plan, or its own error."""
    if error is not None:
        raise error
    assert plan is not None
    return plan


def convert_plain(module: nn.Module) -> Conversion | str | None:
    """Convert torch's own linear and embedding layers, and subclasses that run their forward.

    A subclass with a forward of its own does something besides, which a replacement would lose; of
    those, transformers' embeddings that multiply by a constant are known, and Falcon's linear layer.
    Transformers' Conv1D (GPT-2) is a linear layer with a transposed weight.
    """
    if is_conv1d(module):
        weight, conv_bias = cast(Tensor, module.weight), cast(Tensor, module.bias)
        return Conversion(weight.t(), lambda qweight: QuantizedLinear(qweight, conv_bias))
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the instance (offloading does that)"
    forward = type(module).forward
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if "weight" not in module._parameters:
        return "its weight is computed from other tensors (weight norm, pruning); make it permanent first"
    if forward is nn.Linear.forward:
        bias: Any = module.bias
        return Conversion(module.weight, lambda qweight: QuantizedLinear(qweight, bias))
    if forward is nn.Embedding.forward:
        if module.max_norm is not None:
            return f"it renormalizes its rows (max_norm={module.max_norm})"
        return Conversion(module.weight, lambda qweight: QuantizedEmbedding(qweight, module.padding_idx))
    if _is_falcon_linear(module):
        bias = module.bias
        return Conversion(module.weight, lambda qweight: QuantizedLinear(qweight, bias))
    if isinstance(module, nn.Embedding) and _is_scaled_embedding(module):
        scale: Any = module.embed_scale
        padding = module.padding_idx
        return Conversion(module.weight, lambda qweight: QuantizedScaledEmbedding(qweight, scale, padding))
    return f"{type(module).__name__} has a forward of its own"


def _is_falcon_linear(module: nn.Module) -> bool:
    """Whether a layer is the one of transformers' Falcon, which rounds before it adds the bias."""
    kind = type(module)
    return kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.models.falcon.")


def _is_scaled_embedding(module: nn.Embedding) -> bool:
    """Whether an embedding of transformers multiplies by `embed_scale` and does nothing else."""
    kind = type(module)
    named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith(
        "transformers.models."
    )
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and module.max_norm is None
    scale: Any = getattr(module, "embed_scale", None)
    if not named or not alone or scale is None or module.weight.is_meta:
        return False
    ids = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
    with torch.no_grad():
        rows = nn.functional.embedding(ids, module.weight)
        wanted = rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
        return torch.equal(module(ids), wanted)


def quantize_model(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    *,
    converters: Sequence[Converter] = (convert_plain,),
    agree: Agree = agree_alone,
    on_layer: Callable[[int, int], None] | None = None,
    report: QuantizationReport | None = None,
) -> QuantizationReport:
    """Quantize a model's layers in place and freeze it, as `woq_triton.quantize_model` documents.

    Args:
        model: The model.
        ds_config: A DeepSpeed config, see `woq_triton.config.parse_config`.
        converters: Asked in turn what to do with a layer; the first that knows decides.
        agree: Settles the verdict with other ranks before anything changes.
        on_layer: Called with (layers done, layers in all) after each layer.
        report: What was quantized before, one layer at a time; the rest is added to it.

    Raises:
        TypeError: An unsupported weight.
        ValueError: The config is wrong or matches nothing, a layer is already quantized, or a
            weight cannot be quantized; nothing was changed.
    """
    plan, error = None, None
    report = report or QuantizationReport()
    try:
        plan = make_plan(model, parse_config(ds_config), converters, [layer.name for layer in report.layers])
    except Exception as caught:  # every kind: a rank that failed has to tell the others
        error = caught
    plan = agree(plan, error)
    report.skipped += plan.skipped
    report.unmatched_keys = plan.unmatched_keys
    done: dict[Tie, tuple[LayerReport, QuantizedWeight]] = {}
    total = len(report.layers) + len(plan.layers)
    mapped_memory.drop_files([*model.parameters(), *model.buffers()])
    while plan.layers:
        # A layer is forgotten as soon as it is replaced, so that its dense weight can go.
        report.layers.append(_replace(model, plan.layers.pop(0), done))
        if on_layer is not None:
            on_layer(len(report.layers), total)
    model.requires_grad_(False)
    done.clear()  # it holds weights, which are rearranged next
    _rearrange(model, report)
    return report


def _rearrange(model: nn.Module, report: QuantizationReport) -> None:
    """Arrange layers on a CPU for its kernels, and put in the report what serves them now."""
    rearrange_for_cpu(model)
    for index, layer in enumerate(report.layers):
        module = model.get_submodule(layer.name)
        assert isinstance(module, QuantizedModule)
        nbytes = 0 if layer.tied_to else module.nbytes
        report.layers[index] = replace(layer, bytes_after=nbytes, implementation=module.implementation)


def make_plan(
    model: nn.Module, schemes: Schemes, converters: Sequence[Converter], finished: Sequence[str] = ()
) -> Plan:
    """Decide what happens to each layer, and check every weight; changes nothing.

    Args:
        model: The model.
        schemes: What the config says.
        converters: Asked in turn what to do with a layer.
        finished: Names of layers that were quantized before, by the same config.

    Raises:
        TypeError: An unsupported weight.
        ValueError: Keys overlap or match nothing, a layer is already quantized, tied layers get
            different schemes, or a weight cannot be quantized.
    """
    plan = Plan([], [], [])
    matched_keys: set[str] = set()
    for names, module in _named_layers(model):
        if names[0] in finished:
            matched_keys.update(match[0] for match in (scheme_for(names[0], schemes),) if match)
            continue
        judged = judge(names, module, schemes, converters)
        if judged is None:
            continue
        key, verdict = judged
        matched_keys.add(key)
        if isinstance(verdict, PlannedLayer):
            plan.layers.append(verdict)
        else:
            plan.skipped.append(verdict)
    plan.unmatched_keys = [key for key in schemes if key != FALLBACK and key not in matched_keys]
    _settle_tied(model, plan)
    if not plan.layers and not finished:
        raise ValueError(_nothing_matched(model, schemes, plan))
    for layer in plan.layers:
        check_values(layer.conversion.weight, layer.scheme, f"layer {layer.names[0]!r}")
        mapped_memory.drop_pages(layer.conversion.weight)
    return plan


def judge(
    names: tuple[str, ...], module: nn.Module, schemes: Schemes, converters: Sequence[Converter]
) -> tuple[str, PlannedLayer | SkippedLayer] | None:
    """The key that matches a module, and what is to happen to it; None if that is nothing.

    Raises:
        ValueError: Keys overlap, or the module is quantized already.
    """
    verdict = next((v for v in (convert(module) for convert in converters) if v is not None), None)
    if verdict is None and not _own_weights(module):
        return None
    match = _settle_match(names, schemes)
    if match is None:
        return None
    key, scheme = match
    if isinstance(module, QuantizedModule):
        if scheme is None:
            return None
        raise ValueError(
            f"layer {names[0]!r} is already quantized ({module.scheme}) and matched by the key {key!r}; "
            "quantize a model once, or leave the layer alone with null"
        )
    if scheme is None:
        return key, _skip(names[0], module, f"left alone by the key {key!r}")
    if verdict is None or isinstance(verdict, str):
        unknown = f"{type(module).__name__} is not a layer that can be quantized"
        return key, _skip(names[0], module, verdict or unknown)
    if (reason := _unfit(verdict.weight, scheme)) is not None:
        return key, _skip(names[0], module, reason)
    return key, PlannedLayer(names, module, scheme, verdict, _tie(verdict.weight))


def _named_layers(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Module]]:
    """All modules below the model with all their names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    return [(tuple(names[key]), module) for key, module in modules.items()]


def _settle_match(names: tuple[str, ...], schemes: Schemes) -> tuple[str, QuantScheme | None] | None:
    matches = [scheme_for(name, schemes) for name in names]
    for name, match in zip(names, matches, strict=True):
        if match != matches[0] and (match is None or matches[0] is None or match[1] != matches[0][1]):
            raise ValueError(
                f"layers {names[0]!r} and {name!r} are one module, but the config treats them differently; "
                "give both the same settings"
            )
    return matches[0]


def _own_weights(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() >= 2]


def _skip(name: str, module: nn.Module, reason: str) -> SkippedLayer:
    nbytes = sum(parameter.nbytes for parameter in _own_weights(module))
    return SkippedLayer(name, type(module).__name__, reason, nbytes)


def _unfit(weight: Tensor, scheme: QuantScheme) -> str | None:
    """Why a weight is left alone, or None if it can be quantized with gain."""
    if weight.dtype not in WEIGHT_DTYPES:
        return f"its weight is {weight.dtype}, not bfloat16, float16 or float32"
    if weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}, not two dimensions"
    if weight.device.type == "meta":
        return "its weight is on the meta device; load it first"
    after = quantized_nbytes((weight.shape[0], weight.shape[1]), scheme, weight.dtype)
    if after >= weight.nbytes > 0:
        return f"it would not shrink ({weight.nbytes} bytes, {after} quantized with {scheme})"
    return None


def _tie(weight: Tensor) -> Tie:
    """Equal for weights that are the same memory, seen the same way."""
    if weight.numel() == 0:
        return (id(weight),)
    return (weight.device, weight.data_ptr(), weight.shape, weight.stride())


def _settle_tied(model: nn.Module, plan: Plan) -> None:
    """Tied weights are quantized once and alike, or all left alone."""
    first: dict[Tie, PlannedLayer] = {}
    for layer in plan.layers:
        other = first.setdefault(layer.tie, layer)
        if other.scheme != layer.scheme:
            first_text, second_text = (f"{p.names[0]!r} ({p.scheme})" for p in (other, layer))
            raise ValueError(
                f"layers {first_text} and {second_text} share one weight; give both the same settings"
            )
    converted = {id(layer.module) for layer in plan.layers}
    for name, module in model.named_modules():
        if id(module) in converted:
            continue
        ties = {_tie(weight) for weight in _own_weights(module)}
        for layer in [layer for layer in plan.layers if layer.tie in ties]:
            plan.leave_alone(layer.names[0], f"it shares its weight with {name!r}, which is left alone")


def _nothing_matched(model: nn.Module, schemes: Schemes, plan: Plan) -> str:
    if plan.skipped:
        first = plan.skipped[0]
        return (
            f"nothing to quantize: all {len(plan.skipped)} matching layers are left alone, "
            f"the first, {first.name!r}, because {first.reason}"
        )
    if isinstance(model, (nn.Linear, nn.Embedding)):
        return (
            f"the model is itself a {type(model).__name__} and cannot be replaced in place; "
            "make its successor by QuantizedLinear.from_linear or QuantizedEmbedding.from_embedding"
        )
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    keys = ", ".join(repr(key) for key in schemes)
    return f"no layer's name has any of the keys {keys}; the model has layers such as {', '.join(names[-4:])}"


def _replace(
    model: nn.Module, layer: PlannedLayer, done: dict[Tie, tuple[LayerReport, QuantizedWeight]]
) -> LayerReport:
    """Quantize one layer, put the new module in its places, and say what was done."""
    module, report = convert_layer(layer, done)
    for place in layer.names:
        parent, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    if layer.conversion.release is not None:
        layer.conversion.release()
    return report


def convert_layer(
    layer: PlannedLayer, done: dict[Tie, tuple[LayerReport, QuantizedWeight]]
) -> tuple[QuantizedModule, LayerReport]:
    """Make the quantized module for a layer.

    Args:
        layer: The verdict on the layer.
        done: What became of the weights so far, for those that are tied to them; gets this one added.
    """
    weight, name = layer.conversion.weight, layer.names[0]
    kind = type(layer.module).__name__
    if layer.tie in done:
        first, qweight = done[layer.tie]
        module = layer.conversion.build(qweight)
        report = replace(first, name=name, kind=kind, bytes_before=0, bytes_after=0, tied_to=first.name)
    else:
        qweight = quantize(weight, layer.scheme, f"layer {name!r}")
        module = layer.conversion.build(qweight)
        report = LayerReport(
            name=name,
            kind=kind,
            shape=qweight.shape,
            scheme=layer.scheme,
            bytes_before=weight.nbytes,
            bytes_after=qweight.nbytes,
            relative_error=qweight.relative_error(weight),
            implementation=backends.name_for(weight.device.type),
        )
        done[layer.tie] = report, module.qweight
        mapped_memory.drop_pages(weight)
    _carry_over(layer.module, module)
    return module, report


def _carry_over(dense: nn.Module, quantized: nn.Module) -> None:
    """Keep the mode and the hooks that were set on the dense layer."""
    quantized.train(dense.training)
    for attribute in (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    ):
        # The dictionary itself: the handle that removes a hook knows no other.
        setattr(quantized, attribute, getattr(dense, attribute))
