"""Layers of transformers with a forward of their own that quantization keeps, and one it must not touch."""

import copy

import pytest
import torch
from torch import nn

import woq_triton
from tests.autotp import families
from tests.autotp.cases import config, logits, put_dequantized, relative
from woq_triton.modules import QuantizedScaledEmbedding


@pytest.mark.parametrize("family", ["gemma", "gemma3", "falcon-mha", "falcon-40b"])
def test_scaled_embeddings_and_falcons_linear_layers_are_quantized(family: str) -> None:
    model, batch = families.build(family), families.inputs(family)
    dense = copy.deepcopy(model)
    before = logits(model, batch)
    report = woq_triton.quantize_model(model, config())
    assert report.skipped == []
    put_dequantized(model, dense, report)
    assert relative(logits(model, batch), logits(dense, batch)) < 1e-5
    assert relative(logits(model, batch), before) > 1e-3


def test_a_scaled_embedding_stays_tied_and_follows_casts() -> None:
    model, batch = families.build("gemma", tie_word_embeddings=True), families.inputs("gemma")
    woq_triton.quantize_model(model, config())
    table = model.model.embed_tokens
    assert isinstance(table, QuantizedScaledEmbedding)
    assert model.lm_head.packed is table.packed
    want = logits(model, batch)
    rounded = model.bfloat16()
    assert table(batch["input_ids"]).dtype == torch.bfloat16
    assert relative(logits(rounded, batch), want) < 3e-2  # bf16 activations through two layers


def test_an_embedding_that_does_more_than_scale_is_left_alone() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    def forward(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        return nn.Embedding.forward(self, ids) * self.embed_scale + 1

    # As a later version of transformers may have it: the name is known, what it computes is not.
    name, module = Gemma3TextScaledWordEmbedding.__name__, Gemma3TextScaledWordEmbedding.__module__
    changed = type(name, (Gemma3TextScaledWordEmbedding,), {"forward": forward, "__module__": module})
    model = nn.ModuleDict({"table": changed(300, 256, 0, 16.0), "head": nn.Linear(256, 300)})
    report = woq_triton.quantize_model(model, config())
    assert [layer.name for layer in report.layers] == ["head"]
    assert "has a forward of its own" in report.skipped[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_bits", [4, 8])
def test_forwards_leave_weights_as_they_are(num_bits: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(256, 384)).to(dtype)
    woq_triton.quantize_model(model, config(num_bits=num_bits))
    before = model[0].qweight.dequantize(torch.float32)
    for tokens in (1, 3, 20, 3):
        with torch.no_grad():
            model(torch.randn(tokens, 256, dtype=dtype))
    assert torch.equal(model[0].qweight.dequantize(torch.float32), before)
