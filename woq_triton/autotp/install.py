"""Let DeepSpeed's own entry point quantize through this package."""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from deepspeed.inference.quantization import quantization
from torch import nn

from woq_triton.autotp.quantize import quantize_model

_NAME = "_init_group_wise_weight_quantization"
_replaced: list[tuple[ModuleType, Callable[..., nn.Module]]] = []


def install() -> None:
    """Make DeepSpeed's ``_init_group_wise_weight_quantization`` do what `quantize_model` does.

    Call it before ``from deepspeed.inference.quantization.quantization import ...``: a function that
    was imported earlier is the old one and stays it. Configurations with ZeRO stage 3 still go to
    DeepSpeed's function. Calling it twice is harmless.
    """
    if _replaced:
        return
    original: Callable[..., nn.Module] = getattr(quantization, _NAME)

    @functools.wraps(original)
    def quantize_in_place(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
        zero = ds_config.get("zero_optimization") or {}
        if zero.get("stage") == 3:
            return original(model, ds_config)
        quantize_model(model, ds_config)
        return model

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "deepspeed" and vars(module).get(_NAME) is original:
            _replaced.append((module, original))
            setattr(module, _NAME, quantize_in_place)


def uninstall() -> None:
    """Give DeepSpeed its own function back; without `install` before, nothing happens."""
    while _replaced:
        module, original = _replaced.pop()
        setattr(module, _NAME, original)
