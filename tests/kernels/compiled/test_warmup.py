"""`woq_triton.warmup` makes ready what a model's calls need, and nothing that they do not."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import triton
from torch import nn

import woq_triton
from tests import stub_cuda
from woq_triton.backends import serve, workspace
from woq_triton.backends import triton as backend
from woq_triton_kernels.tiles import FUSED_MAX_M

pytestmark = pytest.mark.skipif(bool(stub_cuda.unusable()), reason=stub_cuda.unusable() or "usable")

SCHEME = woq_triton.QuantScheme(4, 64)
VOCABULARY = 500


def make_model(dtype=torch.bfloat16):
    """Layers with and without a bias, one of them twice, one of odd sizes, and an embedding."""

    def linear(in_features, out_features, bias):
        return woq_triton.QuantizedLinear.from_linear(
            nn.Linear(in_features, out_features, bias, dtype=dtype), SCHEME
        )

    torch.manual_seed(0)
    table = nn.Embedding(VOCABULARY, 256, dtype=dtype)
    return nn.Sequential(
        woq_triton.QuantizedEmbedding.from_embedding(table, SCHEME),
        linear(256, 2048, False),
        linear(2048, 256, True),
        linear(256, 2048, False),
        linear(2048, 99, True),
        linear(99, VOCABULARY, False),
    )


def run(model, tokens):
    """The model's ops as its layers call them, past the dispatcher, whose CPU key serves another."""
    x = torch.randint(0, VOCABULARY, (1, tokens))
    for layer in model:
        weight = (layer.packed, layer.scale, layer.min)
        if isinstance(layer, woq_triton.QuantizedEmbedding):
            x = backend.embedding(x, *weight, *layer.op_scheme, layer.weight_dtype)
        else:
            x = backend.linear(x, *weight, layer.op_bias, *layer.op_scheme)


@contextlib.contextmanager
def triton_serves_the_cpu() -> Iterator[stub_cuda.Stub]:
    """As it serves a GPU."""
    with pytest.MonkeyPatch.context() as patch, stub_cuda.active() as stub:
        patch.setenv("WOQ_TRITON_IMPL", "triton")
        serve.cache_clear()
        try:
            yield stub
        finally:
            serve.cache_clear()


def warm_and_run(max_tokens, sizes, model=None):
    """Warm a model up and call it: the report, names compiled, handles prepared, and what calls used."""
    model, names = model or make_model(), []
    with triton_serves_the_cpu() as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
        report = woq_triton.warmup(model, max_tokens, progress=False)
        compiled, modules, launches = len(names), stub.record.modules, stub.record.launches
        prepared, used = dict(backend._handles), set()
        for tokens in sizes:
            run(model, tokens)
            used |= {request.send for request in backend._requests.values()}
        assert stub.record.modules == modules and len(names) == compiled
        assert backend._handles == prepared
        assert stub.record.launches > launches
        return report, compiled, prepared, used


def test_after_it_no_number_of_tokens_compiles_or_loads_anything():
    report, compiled, prepared, used = warm_and_run(FUSED_MAX_M + 40, range(1, FUSED_MAX_M + 41))
    assert report.layers == 6 and report.kinds == 5
    assert report.kernels == compiled == len({id(handle.compiled) for handle in prepared.values()})
    assert report.reason == "" and "kernels for 6 layers of 5 kinds ready" in str(report)
    # Nothing is prepared in vain: what no linear request used dequantizes.
    unused = [handle for handle in prepared.values() if handle.send not in used]
    assert {handle.compiled.src.fn.__name__ for handle in unused} == {"_dequantize_kernel"}


def test_it_prepares_no_more_than_max_tokens_need():
    few, *_ = warm_and_run(4, range(1, 5))
    many, *_ = warm_and_run(64, (1, 9, 33, 64))
    assert few.kernels < many.kernels


def test_every_block_of_a_dense_product_is_prepared():
    """Last blocks of another height, groups within and across blocks, metadata rows off alignment."""
    shapes = [(200, 64, 0, 96), (203, 99, 0, 16)]
    layers = [
        woq_triton.QuantizedLinear.from_linear(
            nn.Linear(K, N, dtype=torch.bfloat16), woq_triton.QuantScheme(4, size, dim)
        )
        for N, K, dim, size in shapes
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "DENSE_BYTES", 64 * 64 * 2)
        for layer in layers:
            ids = woq_triton.QuantizedEmbedding.from_embedding(
                nn.Embedding(VOCABULARY, layer.in_features, dtype=torch.bfloat16), SCHEME
            )
            many = FUSED_MAX_M + 3
            warm_and_run(many, (many,), nn.Sequential(ids, layer))


def test_it_launches_nothing_and_makes_scratch():
    model = make_model()
    with triton_serves_the_cpu() as stub:
        before = stub.record.launches
        woq_triton.warmup(model, 8, progress=False)
        assert stub.record.launches == before
        assert list(workspace.table(torch.device("cpu"))) == [stub.stream]
