"""Models whose weights DeepSpeed's own quantizer has quantized: taken over, or left to it with the reason."""

import copy
from typing import Any

import pytest
import torch
from deepspeed.inference.quantization import layers, quantization
from torch import Tensor, nn

import woq_triton
from tests.autotp import families
from tests.autotp.cases import config, logits, relative

# DeepSpeed's forward in fp16 with groups along in_features wants a CUDA op; along out_features it runs here.
DIM0 = {"num_bits": 4, "group_size": 32, "group_dim": 0, "symmetric": False}
DIM1 = {**DIM0, "group_dim": 1}


def keys(**settings: Any) -> dict[str, Any]:
    return {"weight_quantization": {"post_init_quant": settings}}


def skewed(*modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*modules)
    families.skew(model)
    return model.half()


def deepspeeds_weight(layer: nn.Module) -> Tensor:
    """What DeepSpeed's codes stand for, in fp64."""
    data, scale, minimum = layer.weight.deconcat(layer.weight)
    codes = data.view(torch.uint8)
    if layer.config["num_bits"] == 4:
        codes = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
    dim, size = layer.config["group_dim"], layer.config["group_size"]
    scale, minimum = (t.squeeze(dim + 1).double().repeat_interleave(size, dim) for t in (scale, minimum))
    return codes.double() / scale + minimum


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_the_same_settings_take_over_its_codes(num_bits: int, group_dim: int) -> None:
    model = skewed(nn.Embedding(64, 128), nn.Linear(128, 96))
    settings = {**DIM0, "num_bits": num_bits, "group_dim": group_dim}
    quantization._init_group_wise_weight_quantization(model, keys(**{"0": settings, "1": settings}))
    assert type(model[1]) is layers.QuantizedLinear
    want = [deepspeeds_weight(layer) for layer in model]
    report = woq_triton.quantize_model(model, config(**settings))
    assert [layer.name for layer in report.layers] == ["0", "1"]
    assert [layer.kind for layer in report.layers] == [
        "QuantizedEmbedding of DeepSpeed",
        "QuantizedLinear of DeepSpeed",
    ]
    assert report.skipped == []
    assert isinstance(model[0], woq_triton.QuantizedEmbedding)
    for layer, weight in zip(model, want, strict=True):
        # fp32 keeps a step to 2**-24; DeepSpeed's own arithmetic in fp16 would be off by 2**-11.
        assert relative(layer.qweight.dequantize(torch.float32), weight) < 1e-6
    x = torch.randn(3, 128).half()
    assert model[1](x).dtype == model[0](torch.arange(3)).dtype == torch.float16
    assert relative(model[1](x), nn.functional.linear(x.double(), want[1], model[1].bias.double())) < 2e-3


def test_a_whole_model_computes_what_it_did_under_deepspeed() -> None:
    model, batch = families.build("opt", torch.float16), families.inputs("opt")
    dense = logits(model, batch)
    quantization._init_group_wise_weight_quantization(model, keys(self_attn=DIM0, fc2=DIM0))
    before = logits(model, batch)
    report = woq_triton.quantize_model(model, keys(self_attn=DIM0, fc2=DIM0))
    assert len(report.layers) == 10 and not report.skipped
    assert not any(isinstance(module, layers.QuantizedLinear) for module in model.modules())
    # Two layers in fp16, in which DeepSpeed rounds its weights, and activations are rounded on both sides.
    assert relative(logits(model, batch), before) < 1e-2 < relative(before, dense)


def test_shared_weights_stay_shared() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(64, 128), "head": nn.Linear(128, 64, bias=False)}).half()
    families.skew(model)
    model["head"].weight = model["table"].weight
    quantization._init_group_wise_weight_quantization(model, keys(table=DIM1, head=DIM1))
    report = woq_triton.quantize_model(model, config(**DIM1))
    assert model["head"].packed is model["table"].packed
    assert [layer.tied_to for layer in report.layers] == [None, "table"]
    assert report.layers[1].bytes_after == 0


def test_other_settings_leave_it_to_deepspeed_and_name_the_way_out() -> None:
    model = skewed(nn.Linear(128, 96), nn.Linear(512, 64))
    quantization._init_group_wise_weight_quantization(model, keys(**{"0": DIM0}))
    report = woq_triton.quantize_model(model, config(**DIM1))
    assert [layer.name for layer in report.layers] == ["1"]
    (left,) = report.skipped
    assert left.reason.startswith("DeepSpeed has quantized it already (int4 g32 dim0 asymmetric)")
    assert "ask for just these settings" in left.reason and "start from the dense model" in left.reason
    assert type(model[0]) is layers.QuantizedLinear
    with pytest.raises(ValueError, match=r"nothing to quantize.*DeepSpeed has quantized it already"):
        woq_triton.quantize_model(model, keys(**{"0": DIM1}))


@pytest.mark.parametrize(
    ("hurt", "said"),
    [(lambda model: model.float(), "a cast to torch.float32"), (copy.deepcopy, "a copy has lost")],
    ids=["cast", "deepcopy"],
)
def test_codes_that_were_lost_are_not_taken_over(hurt: Any, said: str) -> None:
    model = skewed(nn.Linear(128, 96), nn.Linear(512, 64))
    quantization._init_group_wise_weight_quantization(model, keys(**{"0": DIM0}))
    model = hurt(model)
    report = woq_triton.quantize_model(model, config(**DIM0))
    assert [layer.name for layer in report.layers] == ["1"]
    assert said in report.skipped[0].reason


def test_a_layer_quantized_while_it_was_made_is_left_alone() -> None:
    from deepspeed.inference.quantization.utils import _quantize_param

    model = skewed(nn.Linear(128, 96), nn.Linear(512, 64))
    _quantize_param(model[0].weight, DIM0)
    report = woq_triton.quantize_model(model, config(**DIM0))
    assert [layer.name for layer in report.layers] == ["1"]
    assert "quantized initialization" in report.skipped[0].reason
