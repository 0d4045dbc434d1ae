"""Quantizing whole models: what is converted, what is left alone, and nothing half-done."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.numerics import make_weight, relative_error
from woq_triton import QuantizedEmbedding, QuantizedLinear, quantize_model

SETTINGS = {"num_bits": 4, "group_size": 32, "group_dim": 1, "symmetric": False}
IDS = torch.tensor([[5, 9, 100, 7, 3], [1, 2, 3, 4, 5]])


def config(**keys):
    keys = {"*" if key == "rest" else key: settings for key, settings in keys.items()}
    return {"weight_quantization": {"post_init_quant": keys or {"*": SETTINGS}}}


def make_llama(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, vocab_size=160)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).to(dtype).eval()
    for seed, parameter in enumerate(model.parameters()):
        if parameter.dim() == 2:
            parameter.data = make_weight(*parameter.shape, dtype, seed) * 0.1
    if tied:
        model.tie_weights()
    return model


def fake_quantized(model, quantized):
    """The dense model with the weights that the quantized one stands for."""
    model = copy.deepcopy(model)
    for name, module in quantized.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            model.get_submodule(name).weight.data = module.qweight.dequantize()
    return model


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, state):
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_a_quantized_model_computes_with_the_dequantized_weights(tied, num_bits, group_dim):
    model = make_llama(tied)
    dense = copy.deepcopy(model)
    report = quantize_model(model, config(rest=SETTINGS | {"num_bits": num_bits, "group_dim": group_dim}))
    assert len(report.layers) == 2 * 7 + 2
    assert not report.skipped
    expected = fake_quantized(dense, model)(IDS).logits
    assert relative_error(model(IDS).logits, expected) < 1e-5
    assert relative_error(model(IDS).logits, dense(IDS).logits) > 1e-4
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_hugging_face_generate_runs_on_a_quantized_model():
    model = make_llama()
    dense = copy.deepcopy(model)
    quantize_model(model, config())
    dense = fake_quantized(dense, model)
    text = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(text, dense.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_tied_weights_are_quantized_once_and_stay_shared():
    model = make_llama(tied=True)
    report = quantize_model(model, config())
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert model.lm_head.scale.data_ptr() == model.model.embed_tokens.scale.data_ptr()
    head = next(layer for layer in report.layers if layer.name == "lm_head")
    assert head.tied_to == "model.embed_tokens"
    assert head.bytes_before == head.bytes_after == 0
    assert head.relative_error > 0


def test_tied_weights_with_different_settings_are_an_error_naming_both():
    model = make_llama(tied=True)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"'model.embed_tokens' \(int4.*'lm_head' \(int8.*share one weight"):
        quantize_model(model, config(lm_head=SETTINGS | {"num_bits": 8}, rest=SETTINGS))
    assert_unchanged(model, state)


def test_a_weight_tied_to_a_layer_that_is_left_alone_is_left_alone():
    model = make_llama(tied=True)
    report = quantize_model(model, config(embed=None, rest=SETTINGS))
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert "left alone by the key 'embed'" in reasons["model.embed_tokens"]
    assert "shares its weight with 'model.embed_tokens'" in reasons["lm_head"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_module_used_twice_is_replaced_in_both_places():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(64, 64))})
    report = quantize_model(model, config())
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], QuantizedLinear)
    assert [layer.name for layer in report.layers] == ["a", "b.1"]


def test_keys_choose_settings_and_null_leaves_alone():
    model = make_llama()
    report = quantize_model(
        model, config(self_attn=SETTINGS | {"num_bits": 8}, mlp=SETTINGS, lm_head=None, nothing=SETTINGS)
    )
    assert model.model.layers[0].self_attn.q_proj.scheme.num_bits == 8
    assert model.model.layers[1].mlp.up_proj.scheme.num_bits == 4
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding
    assert report.unmatched_keys == ["nothing"]
    assert "keys that matched no layer: 'nothing'" in str(report)


def test_layers_with_a_forward_of_their_own_are_left_alone_with_those_that_share_their_weight():
    class Shifted(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 2)

    torch.manual_seed(0)
    parts = {"table": Shifted(160, 64), "head": nn.Linear(64, 160, bias=False), "other": nn.Linear(64, 64)}
    model = nn.ModuleDict(parts)
    model.head.weight = model.table.weight
    report = quantize_model(model, config(rest=SETTINGS | {"num_bits": 8}))
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert [layer.name for layer in report.layers] == ["other"]
    assert "Shifted has a forward of its own" in reasons["table"]
    assert "shares its weight with 'table'" in reasons["head"]
    assert report.bytes_skipped == 2 * 160 * 64 * 4


def test_what_cannot_be_converted_is_reported_with_its_reason():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 64, 64))

    model = nn.ModuleDict(
        {
            "good": nn.Linear(64, 64),
            "scaled": Scaled(64, 64),
            "experts": Experts(),
            "attention": nn.MultiheadAttention(64, 4),
            "renormalizing": nn.Embedding(64, 64, max_norm=1.0),
            "small": nn.Linear(1, 64),
            "wide": nn.Linear(64, 64).double(),
            "norm": nn.LayerNorm(64),
        }
    )
    model["patched"] = nn.Linear(64, 64)
    model["patched"].forward = lambda x: x
    model["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model["pruned"] = nn.utils.prune.l1_unstructured(nn.Linear(64, 64), "weight", 0.5)
    report = quantize_model(model, config())
    assert [layer.name for layer in report.layers] == ["good"]
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert "Scaled has a forward of its own" in reasons["scaled"]
    assert "Experts is not a layer that can be quantized" in reasons["experts"]
    assert "reads its weight without calling it" in reasons["attention.out_proj"]
    assert "renormalizes" in reasons["renormalizing"]
    assert "would not shrink (256 bytes, 4608 quantized" in reasons["small"]
    assert "torch.float64" in reasons["wide"]
    assert "replaced on the instance" in reasons["patched"]
    assert "computed from other tensors" in reasons["normed"]
    assert "computed from other tensors" in reasons["pruned"]
    assert model["pruned"](torch.ones(1, 64)).shape == (1, 64)
    assert "norm" not in reasons
    assert next(layer for layer in report.skipped if layer.name == "experts").nbytes == 3 * 64 * 64 * 4


def test_quantizing_twice_is_an_error_but_other_layers_may_follow():
    model = make_llama()
    quantize_model(model, config(mlp=SETTINGS))
    state = state_of(model)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate_proj' is already quantized \(int4 g32"):
        quantize_model(model, config())
    assert_unchanged(model, state)
    report = quantize_model(model, config(mlp=None, rest=SETTINGS))
    assert len(report.layers) == 2 * 4 + 2


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_nan_weight_is_named_before_anything_changed(layer):
    model = make_llama()
    model.get_submodule(layer).weight.data[3, 5] = float("nan")
    with pytest.raises(ValueError, match=f"layer '{layer}' has NaN or infinite values"):
        quantize_model(model, config())
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_a_config_that_matches_nothing_names_keys_and_layers():
    model = make_llama()
    with pytest.raises(ValueError, match=r"no layer's name has any of the keys 'query'.*lm_head"):
        quantize_model(model, config(query=SETTINGS))


def test_a_config_whose_layers_are_all_left_alone_says_why():
    model = nn.ModuleDict({"small": nn.Linear(1, 8)})
    with pytest.raises(ValueError, match=r"all 1 matching layers are left alone.*'small'.*would not shrink"):
        quantize_model(model, config())


def test_overlapping_keys_are_an_error_before_anything_changed():
    model = make_llama()
    state = state_of(model)
    with pytest.raises(ValueError, match=r"'self_attn'.*'q_proj'"):
        quantize_model(model, config(self_attn=SETTINGS, q_proj=SETTINGS | {"num_bits": 8}))
    assert_unchanged(model, state)


def test_dense_weights_are_gone_after_conversion():
    model = make_llama()
    weights = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    quantize_model(model, config())
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


def test_hooks_and_mode_survive_the_replacement():
    model = nn.ModuleDict({"layer": nn.Linear(64, 64)}).eval()
    calls = []
    handle = model["layer"].register_forward_hook(lambda *_: calls.append("after"))
    model["layer"].register_forward_pre_hook(lambda *_: calls.append("before"))
    quantize_model(model, config())
    model["layer"](torch.ones(1, 64))
    assert calls == ["before", "after"]
    assert not model["layer"].training
    handle.remove()
    model["layer"](torch.ones(1, 64))
    assert calls == ["before", "after", "before"]


def test_progress_is_told_layer_by_layer():
    told = []
    quantize_model(make_llama(), config(), on_layer=lambda done, total: told.append((done, total)))
    assert told == [(done, 16) for done in range(1, 17)]


def test_the_report_counts_bytes():
    model = make_llama(dtype=torch.bfloat16)
    report = quantize_model(model, config(lm_head=None, rest=SETTINGS))
    modules = [
        module for module in model.modules() if isinstance(module, (QuantizedLinear, QuantizedEmbedding))
    ]
    assert report.bytes_after == sum(module.nbytes for module in modules)
    assert report.bytes_before == sum(module.weight.numel() * 2 for module in modules)
    assert report.bytes_skipped == model.lm_head.weight.nbytes
    plain = report.to_dict()
    assert plain["layers"][0]["scheme"] == SETTINGS
    assert plain["bytes_before"] == report.bytes_before
    assert "16 layers" not in str(report)
    assert "15 layers quantized" in str(report)


def test_gpt2_is_quantized_in_its_transposed_layers_too():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=160, n_positions=32)).eval()
    for seed, parameter in enumerate(model.transformer.h.parameters()):
        if parameter.dim() == 2:
            parameter.data = make_weight(*parameter.shape, seed=seed) * 0.1
    dense = copy.deepcopy(model)
    report = quantize_model(model, config())
    assert "transformer.h.1.mlp.c_fc" in [layer.name for layer in report.layers]
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and name != "lm_head":
            dense.get_submodule(name).weight.data = module.qweight.dequantize().t()
    dense.transformer.wte.weight.data = model.transformer.wte.qweight.dequantize()
    dense.transformer.wpe.weight.data = model.transformer.wpe.qweight.dequantize()
    assert relative_error(model(IDS).logits, dense(IDS).logits) < 1e-5


def test_a_layer_that_is_the_whole_model_points_to_its_successor():
    with pytest.raises(ValueError, match=r"the model is itself a Linear.*QuantizedLinear.from_linear"):
        quantize_model(nn.Linear(64, 64), config())
