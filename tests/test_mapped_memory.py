"""Pages of a mapped checkpoint: dropped once their weights are quantized, unless they were written to."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.numerics import make_weight
from woq_triton import quantize_model
from woq_triton.mapped_memory import drop_files, drop_pages

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.access("/proc/self/pagemap", os.R_OK),
    reason="pages can be told apart on Linux alone",
)

MIB = 1 << 20
CONFIG = {"weight_quantization": {"post_init_quant": {"*": {"num_bits": 4, "group_size": 64}}}}


def resident(path):
    """Bytes of a file that are in this process's memory."""
    found, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            if "-" in line.split(maxsplit=1)[0]:
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
    return found


def saved(path, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return load_file(path)


@pytest.fixture
def weights(tmp_path):
    """A file of two 8 MiB weights as they are loaded, all its pages in memory."""
    originals = {name: make_weight(2048, 2048, torch.bfloat16, seed) for seed, name in enumerate("ab")}
    loaded = saved(tmp_path / "model.safetensors", originals)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in originals.items())
    assert resident(tmp_path / "model.safetensors") >= 16 * MIB
    return tmp_path / "model.safetensors", loaded, originals


@pytest.mark.parametrize("transposed", [False, True])
def test_a_dropped_weight_is_read_again(weights, transposed):
    path, loaded, originals = weights
    drop_pages(loaded["a"].t() if transposed else loaded["a"])
    assert 8 * MIB <= resident(path) < 9 * MIB
    assert all(torch.equal(loaded[name], tensor) for name, tensor in originals.items())


def test_what_was_written_to_a_weight_is_not_lost(weights):
    path, loaded, originals = weights
    loaded["a"][1000, 1000] = originals["a"][1000, 1000] = 7.0
    drop_pages(loaded["a"])
    drop_files(loaded.values())
    assert resident(path) <= 4 * MIB  # the pages beside the written one, in a chunk of 2 MiB
    assert all(torch.equal(loaded[name], tensor) for name, tensor in originals.items())


def test_memory_that_is_no_files_keeps_its_values():
    weight = make_weight(2048, 2048, torch.float32)
    copy = weight.clone()
    drop_pages(weight)
    drop_files([weight])
    drop_pages(weight[:, ::2])
    drop_pages(weight.to("meta"))
    drop_files([weight.to("meta")])
    assert torch.equal(weight, copy)


def test_where_pages_cannot_be_told_apart_they_stay(weights, monkeypatch):
    path, loaded, originals = weights
    loaded["a"][1000, 1000] = originals["a"][1000, 1000] = 7.0

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "pread", refuse)
    drop_pages(loaded["a"])
    drop_files(loaded.values())
    assert resident(path) > 12 * MIB  # writing to a huge page unmaps the rest of it
    assert torch.equal(loaded["a"], originals["a"])


def test_a_file_goes_as_a_whole_also_what_no_tensor_holds_any_more(weights):
    path, loaded, originals = weights
    del loaded["a"]
    assert resident(path) >= 16 * MIB
    drop_files([loaded["b"][0, :1]])
    assert resident(path) < MIB
    assert torch.equal(loaded["b"], originals["b"])


@pytest.mark.parametrize("conv1d", [False, True])
def test_quantizing_a_mapped_model_keeps_one_layer_of_the_file_in_memory(tmp_path, conv1d):
    transformers = pytest.importorskip("transformers.pytorch_utils")
    layer = (lambda: transformers.Conv1D(1024, 1024)) if conv1d else (lambda: nn.Linear(1024, 1024))
    model = nn.Sequential(*(nn.Sequential(layer(), nn.LayerNorm(1024)) for _ in range(12)))
    path = tmp_path / "model.safetensors"
    tensors = saved(path, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    model.load_state_dict(tensors, assign=True)
    del tensors
    x = torch.randn(2, 1024)
    with torch.no_grad():
        before = model(x)  # reads all of it
    assert resident(path) >= 48 * MIB
    seen = []
    quantize_model(model, CONFIG, on_layer=lambda done, total: seen.append(resident(path)))
    assert len(seen) == 12
    assert max(seen) < 3 * MIB  # the norms and the borders of weights; a weight is 4 MiB
    assert float((model(x) - before).norm() / before.norm()) < 0.5
