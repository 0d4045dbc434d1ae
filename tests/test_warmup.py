"""`woq_triton.warmup` where there is nothing to do, and what it refuses."""

import pytest
import torch
from torch import nn

import woq_triton
from tests.numerics import make_weight


def quantized_layer():
    layer = nn.Linear(64, 32)
    layer.weight.data = make_weight(32, 64)
    return woq_triton.QuantizedLinear.from_linear(layer, woq_triton.QuantScheme(4, 32))


def test_on_a_cpu_it_returns_at_once_and_says_why():
    report = woq_triton.warmup(nn.Sequential(quantized_layer()))
    assert (report.layers, report.kernels) == (0, 0)
    assert str(report) == "nothing to warm up: no Triton kernel serves cpu"


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.Linear(4, 4), {}, ValueError, "no quantized layer: call woq_triton.quantize_model first"),
        (quantized_layer(), {"max_tokens": 0}, ValueError, "max_tokens is 0"),
        (quantized_layer(), {"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
    ],
)
def test_what_it_cannot_do_is_named(model, options, error, message):
    with pytest.raises(error, match=message):
        woq_triton.warmup(model, **options)
