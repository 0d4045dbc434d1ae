"""What is measured: layers of well-known models, and how their weights are quantized."""

from dataclasses import dataclass

import torch
from torch import Tensor

from woq_triton.audit.problems import MODELS as AUDITED
from woq_triton.audit.problems import Model
from woq_triton.scheme import QuantScheme

MODELS = {**AUDITED, "llama-2-7b": Model(4096, 11008, 32, 32, 128, 32000)}
"""Sizes from the models' published configurations."""

TOKENS = (1, 4, 16, 64, 128, 512)
"""Rows of x that are measured unless others are asked for."""


@dataclass(frozen=True)
class Problem:
    """A linear layer to quantize and multiply with.

    Attributes:
        name: Model and layer.
        out_features: Rows of the weight.
        in_features: Its columns.
        scheme: How this package quantizes it; peers use the setting of theirs that is nearest.
    """

    name: str
    out_features: int
    in_features: int
    scheme: QuantScheme

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``."""
        return self.out_features, self.in_features

    def weight(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """A random weight as trained ones look: normal, its rows of different size."""
        generator = torch.Generator().manual_seed(0)
        rows = 0.5 + torch.rand(self.out_features, 1, generator=generator)
        weight = torch.randn(self.out_features, self.in_features, generator=generator)
        return weight.mul_(rows * self.in_features**-0.5).to(dtype)

    def tokens(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Activations ``[rows, in_features]``, their mean not zero."""
        generator = torch.Generator().manual_seed(rows)
        return (torch.randn(rows, self.in_features, generator=generator) + 0.5).to(dtype)


def problems_of(
    model: str, layers: list[str], num_bits: int, group_size: int = 128, tp: int = 1
) -> list[Problem]:
    """Layers of a model as one of `tp` ranks holds them.

    Args:
        model: A key of `MODELS`.
        layers: Names such as ``"o_proj"``; none means all.
        num_bits: 4 or 8.
        group_size: Weights that share a scale, along in_features.
        tp: Ranks.

    Raises:
        ValueError: The model, a layer or the scheme does not exist, or a rank would hold nothing.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; the models are {', '.join(MODELS)}")
    if tp < 1:
        raise ValueError(f"tp is {tp}, but must be at least 1")
    shapes = MODELS[model].shapes(tp)
    unknown = [layer for layer in layers if layer not in shapes]
    if unknown:
        raise ValueError(f"{model} has no layer {unknown[0]!r}; its layers are {', '.join(shapes)}")
    scheme = QuantScheme(num_bits, group_size)
    problems = []
    for layer in layers or shapes:
        shape = shapes[layer]
        if min(shape) < 1:
            raise ValueError(f"{model} {layer} has shape {shape} at tp {tp}; use fewer ranks")
        name = f"{model} {layer}" if tp == 1 else f"{model} tp{tp} {layer}"
        problems.append(Problem(name, *shape, scheme))
    return problems
