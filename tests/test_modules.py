"""Quantized layers: casts, copies, state and a weight that can be read."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.numerics import make_weight, make_x, relative_error
from woq_triton import QuantizedEmbedding, QuantizedLinear, QuantScheme


def make_linear(dtype=torch.float32, symmetric=False):
    linear = nn.Linear(130, 24, dtype=dtype)
    linear.weight.data = make_weight(24, 130, dtype)
    return QuantizedLinear.from_linear(linear, QuantScheme(4, 32, 1, symmetric))


def make_embedding(dtype=torch.float32):
    table = nn.Embedding(50, 130, padding_idx=3, dtype=dtype)
    table.weight.data = make_weight(50, 130, dtype)
    return QuantizedEmbedding.from_embedding(table, QuantScheme(8, 64, 0))


def test_the_layers_compute_with_the_dequantized_weight():
    layer, table = make_linear(), make_embedding()
    x, ids = make_x(2, 5, 130), torch.tensor([[1, 49], [3, 3]])
    expected = nn.functional.linear(x, layer.qweight.dequantize(), layer.bias)
    assert relative_error(layer(x), expected) < 1e-6
    assert torch.equal(table(ids), table.qweight.dequantize()[ids])
    assert table.padding_idx == 3


def test_nothing_in_a_layer_requires_grad():
    assert not any(parameter.requires_grad for parameter in make_linear().parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_cast_changes_activations_and_bias_and_loses_nothing(dtype, symmetric):
    layer = make_linear(symmetric=symmetric)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.to(dtype)
    assert layer.weight.dtype == layer.bias.dtype == dtype
    assert layer(make_x(2, 130, dtype=dtype)).dtype == dtype
    layer.float()
    assert layer.weight.dtype == torch.float32
    after = layer.state_dict()
    for name in set(before) - {"bias"}:
        assert torch.equal(before[name], after[name])


def test_an_embedding_answers_in_the_dtype_it_was_cast_to():
    table = make_embedding().bfloat16()
    assert table(torch.tensor([1])).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [make_linear, make_embedding, lambda: make_linear(symmetric=True)])
def test_copies_pickles_and_state_round_trip_bit_for_bit(make):
    module = make().bfloat16()
    argument = torch.tensor([1, 2]) if isinstance(module, QuantizedEmbedding) else make_x(2, 130).bfloat16()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = make().bfloat16()
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    fresh.load_state_dict(torch.load(file))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(copied(argument), module(argument))
        assert copied.scheme == module.scheme
        assert copied.packed.data_ptr() != module.packed.data_ptr()


def test_a_layer_moves_to_meta_and_back():
    layer = make_linear()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = make_x(2, 130)
    expected = layer(x)
    layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict(state)
    assert torch.equal(layer(x), expected)


def test_tied_modules_stay_tied_when_cast_and_moved():
    table = make_embedding()
    head = QuantizedLinear(table.qweight)
    nn.ModuleList([table, head]).half()
    assert head.packed is table.packed
    assert head.scale.data_ptr() == table.scale.data_ptr()
    assert head.min.data_ptr() == table.min.data_ptr()


def test_the_weight_can_be_read_and_computed_with():
    layer = make_linear(torch.bfloat16)
    weight = layer.weight
    assert weight.shape == (24, 130)
    assert weight.dtype == torch.bfloat16
    assert weight.device.type == "cpu"
    dense = layer.qweight.dequantize()
    assert torch.equal(weight.t(), dense.t())
    assert torch.equal(weight + 1, dense + 1)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([dense, dense]))
    assert torch.equal(copy.deepcopy(weight), dense)
    assert torch.equal(pickle.loads(pickle.dumps(weight)), dense)
    assert "int4 g32" in repr(weight)


def test_the_weight_cannot_be_written():
    layer = make_linear()
    before = layer.packed.clone()
    with pytest.raises(RuntimeError, match="read-only"):
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="read-only"):
        layer.weight.data.copy_(torch.ones(24, 130))
    assert torch.equal(before, layer.packed)


def test_a_layer_without_a_weight_and_a_renormalizing_table_are_refused():
    with pytest.raises(TypeError, match=r"norm \(Identity\) has no tensor called weight"):
        QuantizedLinear.from_linear(nn.Identity(), QuantScheme(), "norm")
    with pytest.raises(ValueError, match=r"tokens has max_norm=1.0"):
        QuantizedEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), QuantScheme(), "tokens")


def test_printing_a_layer_shows_its_scheme():
    text = repr(make_linear())
    assert "24, 130" in text
    assert "int4 g32 dim1 asymmetric" in text


def test_loading_state_of_another_dtype_rounds_nothing():
    wide, narrow = make_linear(torch.float32), make_linear(torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.scale.dtype == torch.float32
    assert torch.equal(narrow.scale, wide.scale)
    assert torch.equal(narrow.qweight.dequantize(), wide.qweight.dequantize())


def test_a_cast_that_would_touch_packed_codes_is_refused():
    layer = make_linear()
    with pytest.raises(TypeError, match=r"use .to\(dtype\)"):
        layer.type(torch.float16)
    assert layer.packed.dtype == torch.int16


def test_a_transposed_layer_is_refused():
    with pytest.raises(TypeError, match=r"c_attn is a Conv1D, whose weight is \[in_features, out_features\]"):
        QuantizedLinear.from_linear(Conv1D(64, 64), QuantScheme(), "c_attn")
