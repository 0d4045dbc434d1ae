"""`quantize_model` for models with layers that DeepSpeed made."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from woq_triton import model as _model
from woq_triton.autotp.convert import convert_autotp
from woq_triton.autotp.injected import convert_injected, injected_weights_as_modules
from woq_triton.autotp.ranks import Ranks
from woq_triton.autotp.stock import Taken, take_over
from woq_triton.config import parse_config
from woq_triton.report import QuantizationReport

CONVERTERS = (convert_autotp, convert_injected, _model.convert_plain)
"""Who is asked about a layer, in this order."""


def quantize_model(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    *,
    on_layer: Callable[[int, int], None] | None = None,
    report: QuantizationReport | None = None,
) -> QuantizationReport:
    """Quantize a model's weights in place, on all ranks alike.

    Does what `woq_triton.quantize_model` documents, which calls this where DeepSpeed is in use.

    Args:
        model: ``engine.module`` of an engine with AutoTP or kernel injection, or a plain model.
        ds_config: A DeepSpeed config.
        on_layer: Called with (layers done, layers in all) after each layer.
        report: What `ReplacePolicy` quantized before; the rest is added to it.

    Returns:
        What was done, on this rank.

    Raises:
        TypeError: A weight cannot be quantized, here or on another rank.
        ValueError: As documented there, here or on another rank.
    """
    ranks = Ranks.of(model)
    told = settled = False
    error: Exception | None = None
    done = report or QuantizationReport()
    taken: list[Taken] = []

    def agree(plan: _model.Plan | None, failure: Exception | None) -> _model.Plan:
        nonlocal told, settled
        told = True
        agreed = ranks.settle(plan, failure)
        settled = True
        for layer in taken:
            layer.put_in_place(model)
        return agreed

    try:
        taken += _take_over(model, ds_config)
        done.layers += [layer.report for layer in taken]
        with injected_weights_as_modules(model):
            _model.quantize_model(
                model,
                ds_config,
                converters=CONVERTERS,
                agree=agree,
                on_layer=on_layer,
                report=done,
            )
    except Exception as caught:  # every kind: the other ranks wait to hear of it
        if not told:
            ranks.settle(None, caught)
        if not settled:
            raise
        error = caught
    ranks.confirm(error)
    # AutoTP's layers sit in reference cycles; what is left of them goes now, not some time later.
    gc.collect()
    return done


def _take_over(model: nn.Module, ds_config: Mapping[str, Any]) -> list[Taken]:
    """Layers for DeepSpeed's quantized ones; none where the config is wrong, which is reported later."""
    try:
        return take_over(model, parse_config(ds_config))
    except ValueError:
        return []
