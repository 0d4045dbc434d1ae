"""DeepSpeed's own entry point quantizes through this package after `install`, and only then."""

import copy
from typing import Any

import pytest
import torch
from deepspeed.inference.quantization import quantization
from torch import nn

import woq_triton.autotp
from tests.autotp import families, ranks
from tests.autotp.cases import logits, relative

INT4 = {"num_bits": 4, "group_size": 32, "group_dim": 1, "symmetric": False}
INT8 = {"num_bits": 8, "group_size": 64, "group_dim": 0, "symmetric": False}


@pytest.fixture
def _installed() -> Any:
    woq_triton.autotp.install()
    yield
    woq_triton.autotp.uninstall()


def ds_config(**keys: Any) -> dict[str, Any]:
    return {"weight_quantization": {"post_init_quant": keys}}


@pytest.mark.parametrize(
    ("dtype", "settings", "options", "layers_quantized"),
    [
        ("bfloat16", {"*": INT4}, {"tensor_parallel": {"tp_size": 2}}, 16),
        ("float32", {"*": INT8}, {"mp_size": 2}, 16),
        ("float32", {"self_attn": INT4, "mlp": INT8}, {"tensor_parallel": {"tp_size": 2}}, 14),
        ("float16", {"q_proj": INT8, "*": INT4}, {"tensor_parallel": {"tp_size": 2}}, 16),
    ],
    ids=["bf16-star", "fp32-mp_size", "fp32-keys", "fp16-key-and-star"],
)
def test_the_sample_works_on_two_ranks(
    dtype: str, settings: dict[str, Any], options: dict[str, Any], layers_quantized: int
) -> None:
    # fp16 rounds dequantized weights and activations to 2**-11, bf16 to 2**-9, fp32 only reorders sums.
    tolerance = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}[dtype]
    for result in ranks.run(2, "tests.autotp.state:sample", dtype, settings, **options):
        assert result["returned the model"]
        assert result["quantized"] == layers_quantized
        assert result["kernel"] < tolerance < result["quantization"]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sample_works_without_tensor_parallelism(dtype: torch.dtype) -> None:
    model, batch = families.build("llama", dtype), families.inputs("llama")
    before = logits(model, batch)
    assert quantization._init_group_wise_weight_quantization(model, ds_config(**{"*": INT8})) is model
    assert isinstance(model.lm_head, woq_triton.QuantizedLinear)
    # 8 bits over groups of 64 of normal weights: half a step is about 1% of their spread.
    assert 0 < relative(logits(model, batch), before) < 0.05


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("bits", [4, 8])
def test_opt_with_a_key_for_each_kind_of_layer_stays_close(bits: int) -> None:
    """The situation of DeepSpeed's own test of post-initialization quantization."""
    model, batch = families.build("opt", torch.float16), families.inputs("opt")
    before = logits(model, batch)
    settings = {"num_bits": bits, "group_size": 64, "symmetric": False}
    keys = {
        "fc": {**settings, "group_dim": 0},
        "self_attn.q_proj": {**settings, "group_dim": 1},
        "self_attn.out_proj": {**settings, "group_dim": 0},
        "embed_tokens": {**settings, "group_dim": 1},
        "lm_head": {**settings, "group_dim": 1},
    }
    quantization._init_group_wise_weight_quantization(model, ds_config(**keys))
    decoder = model.model.decoder
    assert isinstance(decoder.layers[1].fc1, woq_triton.QuantizedLinear)
    assert type(decoder.layers[1].self_attn.v_proj) is nn.Linear
    assert decoder.embed_tokens.packed is model.lm_head.packed
    assert relative(logits(model, batch), before) < (0.02 if bits == 8 else 0.3)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_one_linear_layer_stays_within_half_a_step(bits: int, group_dim: int) -> None:
    """The situation of DeepSpeed's own test of its quantized linear layer, in fp16."""
    model = nn.Sequential(nn.Linear(128, 64)).half()
    dense = copy.deepcopy(model[0])
    scheme = {"num_bits": bits, "group_size": 64, "group_dim": group_dim, "symmetric": False}
    quantization._init_group_wise_weight_quantization(model, ds_config(**{"0": scheme}))
    steps = model[0].scale.float().repeat_interleave(64, group_dim)
    error = (model[0].qweight.dequantize(torch.float32) - dense.weight.float()).abs()
    assert bool((error <= 0.5 * steps + 1e-6).all())
    x = torch.randn(5, 128, dtype=torch.float16)
    want = nn.functional.linear(x.float(), model[0].qweight.dequantize(torch.float32), dense.bias.float())
    with torch.no_grad():
        assert relative(model(x), want) < 1e-3


@pytest.mark.usefixtures("_installed")
def test_stage_3_configurations_still_go_to_deepspeed() -> None:
    # Without a section to quantize by, DeepSpeed's function asserts and ours raises a ValueError.
    with pytest.raises(AssertionError, match="Please provide quantization config"):
        quantization._init_group_wise_weight_quantization(
            nn.Linear(2, 2), {"zero_optimization": {"stage": 3}}
        )
    with pytest.raises(ValueError, match="weight_quantization"):
        quantization._init_group_wise_weight_quantization(
            nn.Linear(2, 2), {"zero_optimization": {"stage": 2}}
        )


def test_uninstall_restores_deepspeed_exactly_however_often_installed() -> None:
    original = quantization._init_group_wise_weight_quantization
    before = dict(vars(quantization))
    woq_triton.autotp.uninstall()
    assert dict(vars(quantization)) == before
    woq_triton.autotp.install()
    woq_triton.autotp.install()
    assert quantization._init_group_wise_weight_quantization is not original
    assert quantization._init_group_wise_weight_quantization.__wrapped__ is original
    woq_triton.autotp.uninstall()
    assert dict(vars(quantization)) == before
