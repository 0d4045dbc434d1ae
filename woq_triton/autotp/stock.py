"""Layers that DeepSpeed's own quantizer made: their codes are taken over where that is asked for.

DeepSpeed's ``QuantizedLinear`` and ``QuantizedEmbedding`` keep what the module `woq_triton.deepspeed_format`
describes, in one Parameter. A config that asks for the very settings of such a layer gets a layer of this
package with the same codes; quantizing them again with others would add a second error to the first, so
that such a layer is left to DeepSpeed, and the report says why.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.inference.quantization import layers as stock
from torch import nn

from woq_triton.config import Schemes, scheme_for
from woq_triton.deepspeed_format import from_deepspeed
from woq_triton.modules import QuantizedEmbedding, QuantizedLinear, QuantizedModule
from woq_triton.report import LayerReport
from woq_triton.scheme import QuantScheme

_KINDS = (stock.QuantizedLinear, stock.QuantizedEmbedding)


@dataclass(frozen=True)
class Taken:
    """A layer that waits to take the place of DeepSpeed's.

    Attributes:
        names: The places.
        module: The layer of this package.
        report: What the report says of it.
    """

    names: tuple[str, ...]
    module: QuantizedModule
    report: LayerReport

    def put_in_place(self, model: nn.Module) -> None:
        """Replace DeepSpeed's layer."""
        for name in self.names:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, self.module)


def reason(module: nn.Module) -> str | None:
    """Why a layer that DeepSpeed quantized is left to it; None for all other layers."""
    if isinstance(module, _KINDS):
        scheme, damage = _scheme(module), _damage(module)
        if damage is not None or scheme is None:
            damage = damage or "with settings unknown here"
            return f"DeepSpeed has quantized it already, {damage}; start from the dense model"
        return (
            f"DeepSpeed has quantized it already ({scheme}) and goes on serving it; ask for just these "
            "settings to have its codes taken over, or start from the dense model for others"
        )
    if any(getattr(parameter, "weight_quantized", False) for parameter in module.parameters(recurse=False)):
        return (
            "DeepSpeed has quantized it already, while it was made (quantized initialization), and goes on "
            "serving it; make the model without that, and quantize it then"
        )
    return None


def take_over(model: nn.Module, schemes: Schemes) -> list[Taken]:
    """Make the layers that take over DeepSpeed's codes, where a config asks for the same settings.

    Nothing is changed yet. Layers that share a weight go on sharing it.

    Args:
        model: The model.
        schemes: What the config says.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _KINDS) and name:
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    taken: list[Taken] = []
    shared: dict[int, Taken] = {}
    for key, module in modules.items():
        matches = [scheme_for(name, schemes) for name in names[key]]
        scheme = _scheme(module)
        if scheme is None or _damage(module) is not None:
            continue
        shape = _shape(module)
        if any(match is None or not _same(match[1], scheme, shape) for match in matches):
            continue
        first = shared.get(id(module.weight))
        try:
            made = _convert(module, tuple(names[key]), scheme, first)
        except ValueError:
            continue  # a step that fp32 cannot hold: DeepSpeed's own values are infinite there
        shared.setdefault(id(module.weight), made)
        taken.append(made)
    return taken


def _scheme(module: Any) -> QuantScheme | None:
    """The settings that DeepSpeed quantized a layer with."""
    known = ("num_bits", "group_size", "group_dim", "symmetric")
    try:
        return QuantScheme(**{name: module.config[name] for name in known})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _shape(module: Any) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.out_features, module.in_features


def _same(asked: QuantScheme | None, done: QuantScheme, shape: tuple[int, int]) -> bool:
    if asked is None:
        return False
    return replace(asked, group_size=min(asked.resolve_group_size(shape), shape[asked.group_dim])) == done


def _damage(module: Any) -> str | None:
    """How a layer's codes were lost, or None; DeepSpeed keeps them in a Parameter that looks like fp16."""
    if module.weight.dtype != torch.float16:
        return f"but a cast to {module.weight.dtype} has destroyed its codes"
    if not hasattr(module.weight, "deconcat"):
        return "but a copy has lost what describes its codes"
    return None


def _convert(module: Any, names: tuple[str, ...], scheme: QuantScheme, first: Taken | None) -> Taken:
    shape = _shape(module)
    if first is None:
        data, scale, minimum = module.weight.deconcat(module.weight.detach())
        # In fp32, as a step is kept by its reciprocal, which fp16 has rounded once.
        qweight = from_deepspeed(data.view(torch.uint8), scale, minimum, scheme, f"layer {names[0]!r}")
    else:
        qweight = first.module.qweight
    dtype = module.weight.dtype
    made: QuantizedModule
    if isinstance(module, nn.Embedding):
        made = QuantizedEmbedding(qweight, module.padding_idx, dtype)
    else:
        made = QuantizedLinear(qweight, module.bias, dtype)
    made.train(module.training)
    report = LayerReport(
        name=names[0],
        kind=f"{type(module).__name__} of DeepSpeed",
        shape=shape,
        scheme=scheme,
        bytes_before=0 if first else module.weight.nbytes,
        bytes_after=0 if first else made.nbytes,
        relative_error=0.0,  # its codes are DeepSpeed's
        implementation=made.implementation,
        tied_to=first.names[0] if first else None,
    )
    return Taken(names, made, report)
