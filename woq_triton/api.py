"""`quantize_model` for any model: plain, or sharded by DeepSpeed AutoTP."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from woq_triton import model as _model
from woq_triton.report import QuantizationReport


def quantize_model(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    *,
    on_layer: Callable[[int, int], None] | None = None,
) -> QuantizationReport:
    """Quantize a model's weights in place, and freeze the model.

    Serves plain models and those that `deepspeed.init_inference` sharded (pass ``engine.module``; every
    rank has to call it). Linear layers, embeddings and heads are converted; layers with a forward of
    their own, and those that would not shrink, are left alone and reported with the reason. All layers
    are checked, on all ranks, before the first one changes.

    Args:
        model: The model; its layers are replaced.
        ds_config: A DeepSpeed config. ``["weight_quantization"]["post_init_quant"]`` maps keys to
            settings ``{"num_bits", "group_size", "group_dim", "symmetric"}`` (`QuantScheme`), or to
            None for layers to leave alone. A key matches the modules whose name contains it; ``"*"``
            matches those that no other key does.
        on_layer: Called with (layers done, layers in all) after each layer, for a progress bar.

    Returns:
        What was done, on this rank.

    Raises:
        TypeError: A weight cannot be quantized.
        ValueError: The config is wrong or matches nothing, keys with different settings overlap, a
            weight has NaN or infinite values, or a layer is quantized already. Nothing was changed.
    """
    if "deepspeed" in sys.modules:
        from woq_triton import autotp

        return autotp.quantize_model(model, ds_config, on_layer=on_layer)
    return _model.quantize_model(model, ds_config, on_layer=on_layer)
