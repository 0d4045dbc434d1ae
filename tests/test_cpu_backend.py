"""The CPU: block-wise products on canonical codes, and codes in the arrangement of torch's own kernels."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.numerics import DENSE_ROUNDING, KERNEL, ROUNDED, make_weight, make_x, relative_error
from woq_triton import QuantizedEmbedding, QuantizedLinear, QuantScheme, linear, quantize, quantize_model
from woq_triton.backends import cpu, cpu_int4, cpu_nibbles, cpu_packed
from woq_triton.modules import rearrange_for_cpu
from woq_triton_kernels import layout

FITTING = [
    QuantScheme(4, 128),
    QuantScheme(4, 32, symmetric=True),
    QuantScheme(4, 64),
    QuantScheme(4, -1),
    QuantScheme(8, 128),
    QuantScheme(8, 32, symmetric=True),
    QuantScheme(8, -1),
]
"""Schemes that a kernel serves in bf16, for a weight of 192 x 384."""

needs_int4 = pytest.mark.skipif(cpu_nibbles.block_rows() == 0, reason="torch has no packed int4 kernel here")
needs_int8 = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM here"
)
needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="int8 planes need AVX-512"
)
pytestmark = [needs_int4, needs_int8]


def make_layer(scheme, out_features=192, in_features=384, dtype=torch.bfloat16, seed=0):
    dense = nn.Linear(in_features, out_features, dtype=dtype)
    dense.weight.data = make_weight(out_features, in_features, dtype, seed)
    dense.bias.data = make_x(out_features, dtype=dtype)
    return QuantizedLinear.from_linear(dense, scheme)


def expected(x, layer):
    """In fp64 from the codes and the stored metadata."""
    return x.double() @ layer.qweight.dequantize(torch.float32).double().t() + layer.bias.double()


@pytest.mark.parametrize("scheme", FITTING, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9, 17, 64, 65, 130])
def test_a_rearranged_layer_matches_fp64(scheme, dtype, mean, tokens):
    layer = make_layer(scheme)
    assert layer.rearrange()
    x = make_x(tokens, 384, dtype=dtype, mean=mean)
    out = layer(x)
    assert out.dtype == dtype
    assert relative_error(out, expected(x, layer)) < ROUNDED[dtype] + DENSE_ROUNDING[dtype]


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rearranged", [True, False])
@pytest.mark.parametrize("tokens", [3, 130])
def test_a_forward_changes_nothing_in_its_layer(num_bits, dtype, rearranged, tokens):
    layer = make_layer(QuantScheme(num_bits, 32), dtype=dtype)
    if rearranged:
        layer.rearrange()
    x = make_x(tokens, 384, dtype=dtype)
    before, first = copy.deepcopy(layer.state_dict()), layer(x)
    assert torch.equal(layer(x), first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_int8_bags_sum_in_fp32(group_size, mean):
    layer = make_layer(QuantScheme(8, group_size), dtype=torch.float32)
    layer.rearrange()
    assert layer.implementation == cpu_packed.BAGS
    x = make_x(3, 384, mean=mean)
    assert relative_error(layer(x), expected(x, layer)) < KERNEL[torch.float32]


@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_groups_beyond_the_kernels_largest_are_exact(symmetric):
    layer = make_layer(QuantScheme(4, 512, symmetric=symmetric), 64, 1024)
    assert layer.rearrange()
    x = make_x(2, 1024, dtype=torch.bfloat16)
    assert relative_error(layer(x), expected(x, layer)) < ROUNDED[x.dtype] + DENSE_ROUNDING[x.dtype]


def skewed_layer(num_bits, in_features, group_size):
    """An outlier in each group puts the zero point far above the other weights; its size differs by group."""
    weight = 0.1 * make_x(64, in_features, seed=2) + 0.3
    outliers = 10 ** (1 + make_x(64, in_features // group_size, seed=3).abs().clamp(max=1))
    weight.unflatten(1, (-1, group_size))[:, :, 5] = outliers
    dense = nn.Linear(in_features, 64, dtype=torch.bfloat16)
    dense.weight.data = weight.bfloat16()
    return QuantizedLinear.from_linear(dense, QuantScheme(num_bits, group_size))


@pytest.mark.parametrize("num_bits", [4, pytest.param(8, marks=needs_avx512)])
@pytest.mark.parametrize("in_features", [512, 2048, 4096])
@pytest.mark.parametrize("group_size", [32, 128, 256])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_zero_points_that_bf16_cannot_hold_are_multiplied_exactly(num_bits, in_features, group_size, mean):
    layer = skewed_layer(num_bits, in_features, group_size)
    x = make_x(3, in_features, dtype=torch.bfloat16, mean=mean)
    x.unflatten(1, (-1, group_size))[:, :, 5] = 0  # the outliers would hide everything else
    exact = expected(x, layer)
    assert layer.rearrange()
    bound = ROUNDED[x.dtype] + DENSE_ROUNDING[x.dtype]
    assert relative_error(layer(x), exact) < bound
    if num_bits == 4:
        scale_and_zero, _ = cpu_int4.metadata(layer.scale, layer.min, group_size)
        codes = cpu_nibbles.arrange(layer.qweight.codes())
        without = cpu_nibbles.multiply(x, codes, group_size, scale_and_zero) + layer.bias
    else:
        layer.scale_and_zero.chunk(2)[1][..., 1] = 0
        without = layer(x)
    assert relative_error(without, exact) > bound


@pytest.mark.parametrize("scheme", FITTING, ids=str)
def test_any_layout_of_x_is_served(scheme):
    layer = make_layer(scheme)
    layer.rearrange()
    strided, transposed = make_x(6, 768)[:, ::2], make_x(384, 6).t()
    for x in (strided, transposed, make_x(1, 384).expand(5, 384), make_x(384), make_x(2, 3, 384)):
        x = x.bfloat16()
        out = layer(x)
        assert out.shape == (*x.shape[:-1], 192)
        assert relative_error(out, expected(x, layer)) < ROUNDED[x.dtype] + DENSE_ROUNDING[x.dtype]


@pytest.mark.parametrize("shape", [(192, 384), (640, 4096), (640, 2048), (1376, 1024)])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_rearranging_loses_no_bit_and_keeps_no_second_copy(shape, num_bits):
    if num_bits == 4 and shape[0] % cpu_nibbles.block_rows():
        pytest.skip("rows are not whole blocks")
    layer = make_layer(QuantScheme(num_bits, 128), *shape)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    nbytes = layer.nbytes
    assert layer.rearrange()
    assert layer.packed.dtype == torch.uint8
    assert held_bytes(layer) == layer.nbytes + layer.bias.nbytes
    # Of 68 bytes a group, a zero point takes 2, its rest 2 or a sixteenth of the codes and their scale, 2.25.
    # int8: 6 of 132 bytes a group, or 8 bytes a row of at least 64 codes.
    most = {cpu_packed.INT4: 1.1, cpu_packed.PLANES: 1.05, cpu_packed.BAGS: 1.13}
    assert layer.nbytes <= nbytes * most[layer.implementation]
    after = layer.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor)
        assert after[name].is_contiguous()


def held_bytes(module):
    """Bytes of all memory that a module holds, each counted once."""
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("scheme", [QuantScheme(4, 64), QuantScheme(8, 64, symmetric=True)], ids=str)
def test_copies_pickles_and_state_carry_the_canonical_weight(scheme):
    layer, x = make_layer(scheme), make_x(2, 384).bfloat16()
    canonical = layer.qweight
    layer.rearrange()
    state = io.BytesIO()
    torch.save(layer.state_dict(), state)
    state.seek(0)
    loaded = make_layer(scheme, seed=5)
    loaded.rearrange()
    loaded.load_state_dict(torch.load(state))
    pickled = pickle.dumps(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickled), loaded):
        assert other.rearranged
        assert torch.equal(other(x), layer(x))
        assert torch.equal(other.qweight.packed, canonical.packed)
        assert other.packed.data_ptr() != layer.packed.data_ptr()
    # Bytes of one CPU's arrangement would be wrong on another.
    tensors = [
        t for t in torch.utils._pytree.tree_leaves(layer.__getstate__()) if isinstance(t, torch.Tensor)
    ]
    assert all(tensor.dtype != torch.uint8 for tensor in tensors)


def test_casts_and_moves_keep_the_weight_and_rearrange_where_it_pays():
    layer = make_layer(QuantScheme(4, 64))
    packed = layer.packed.clone()
    layer.rearrange()
    codes = layer.packed.data_ptr()
    layer.to("cpu")
    assert layer.packed.data_ptr() == codes
    layer.float()
    assert not layer.rearranged
    assert torch.equal(layer.packed, packed)
    layer.bfloat16()
    assert layer.rearranged
    layer.to("meta")
    assert layer.packed.dtype == torch.int16
    assert layer.packed.shape == packed.shape


@needs_avx512
def test_a_cast_changes_the_kernel_that_serves_int8():
    layer, x = make_layer(QuantScheme(8, 64)), make_x(2, 384)
    packed = layer.packed.clone()
    layer.rearrange()
    exact = expected(x, layer)
    for dtype, kernel in ((torch.bfloat16, "PLANES"), (torch.float32, "BAGS"), (torch.bfloat16, "PLANES")):
        layer.to(dtype)
        assert layer.implementation == getattr(cpu_packed, kernel)
        bound = ROUNDED[dtype] + DENSE_ROUNDING[dtype] + ROUNDED[torch.bfloat16]  # the bias was bf16 once
        assert relative_error(layer(x.to(dtype)), exact) < bound
        assert torch.equal(layer.qweight.packed, packed)


def test_the_weight_reads_at_no_cost(monkeypatch):
    layer = make_layer(QuantScheme(4, 64))
    dense = layer.qweight.dequantize()
    layer.rearrange()
    assert torch.equal(layer.weight + 0, dense)
    monkeypatch.setattr(cpu_packed, "restore", None)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.shape == (192, 384)
    assert "int4 g64" in repr(layer.weight)


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype"),
    [
        (QuantScheme(4, 64), (192, 384), torch.float32),  # torch's int4 kernel is quick in bf16 alone
        (QuantScheme(4, 48), (192, 384), torch.bfloat16),  # no group size of the kernel divides 48
        (QuantScheme(4, 64), (192, 416), torch.bfloat16),  # a ragged last group
        (QuantScheme(4, 64), (200, 384), torch.bfloat16),  # rows are not whole blocks
        (QuantScheme(4, 64, 0), (192, 384), torch.bfloat16),  # groups along out_features
        (QuantScheme(4, 64), (0, 384), torch.bfloat16),
        (QuantScheme(4, 64), (192, 0), torch.bfloat16),
        (QuantScheme(8, 64), (192, 416), torch.bfloat16),
        (QuantScheme(8, 64), (257, 384), torch.bfloat16),  # a prime number of rows has no chunks
        (QuantScheme(8, 16), (192, 384), torch.bfloat16),
        (QuantScheme(8, 64, 0), (192, 384), torch.bfloat16),
        (QuantScheme(8, 64), (0, 384), torch.bfloat16),
        (QuantScheme(8, 64), (192, 0), torch.bfloat16),
    ],
    ids=str,
)
def test_what_no_kernel_serves_stays_canonical_and_right(scheme, shape, dtype):
    layer = make_layer(scheme, *shape, dtype=dtype)
    assert not layer.rearrange()
    x = make_x(3, shape[1], dtype=dtype)
    assert relative_error(layer(x), expected(x, layer)) < ROUNDED[dtype] + DENSE_ROUNDING[dtype]


def test_a_model_is_rearranged_but_for_tied_weights():
    table = nn.Embedding(128, 384, dtype=torch.bfloat16)
    head = nn.Linear(384, 128, bias=False, dtype=torch.bfloat16)
    table.weight.data = make_weight(128, 384, torch.bfloat16)
    head.weight = table.weight
    inner = nn.Linear(384, 384, dtype=torch.bfloat16)
    model = nn.Sequential(table, inner, head)
    report = quantize_model(model, {"weight_quantization": {"post_init_quant": {"*": {"group_size": 64}}}})
    assert isinstance(model[0], QuantizedEmbedding)
    assert model[1].rearranged
    assert not model[2].rearranged
    assert model[2].packed is model[0].packed
    served_by = {layer.name: layer.implementation for layer in report.layers}
    assert served_by == {"0": "cpu", "1": "cpu (torch int4)", "2": "cpu"}
    assert report.bytes_after == held_bytes(model) - inner.bias.nbytes


def test_a_forced_implementation_keeps_the_canonical_codes():
    script = (
        "import sys; sys.path[:0] = ['.', 'kernels']\n"
        "import torch, woq_triton\n"
        "dense = torch.nn.Linear(128, 128).bfloat16()\n"
        "layer = woq_triton.QuantizedLinear.from_linear(dense, woq_triton.QuantScheme(8, 64))\n"
        "print(layer.rearrange(), layer.implementation)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"WOQ_TRITON_IMPL": "reference", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "reference"], done.stderr


@pytest.mark.parametrize("scheme", FITTING[::4], ids=str)
def test_torch_accepts_the_private_op_and_compiles_the_layer(scheme):
    layer = make_layer(scheme)
    layer.rearrange()
    x = make_x(3, 384).bfloat16()
    extra = (layer._buffers.get("scale_and_zero"), layer._buffers.get("zero_rest"))
    weight = (layer.packed, layer.scale, layer.min, *extra, layer.bias)
    torch.library.opcheck(
        torch.ops.woq_triton.linear_rearranged.default, (x, *weight, *layer._op_scheme[:2], 384)
    )
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(3, 383).bfloat16(), ValueError, "but the weight has in_features=384"),
        (torch.ones(3, 384, dtype=torch.int64), TypeError, "x has dtype torch.int64"),
        (torch.ones(3, 384).requires_grad_(), RuntimeError, "linear_rearranged has no gradient"),
    ],
)
def test_a_bad_input_is_refused(x, error, message):
    layer = make_layer(QuantScheme(4, 64))
    layer.rearrange()
    with pytest.raises(error, match=message):
        layer(x)


@pytest.mark.parametrize("kernel", [cpu_packed.INT4, cpu_packed.PLANES, cpu_packed.BAGS])
@pytest.mark.parametrize("in_features", [640, 4096])
def test_restoring_undoes_arranging_for_any_codes(kernel, in_features):
    scheme, shape = QuantScheme(4 if kernel == cpu_packed.INT4 else 8, 64), (192, in_features)
    codes = torch.randint(0, 2**scheme.num_bits, shape, dtype=torch.uint8)
    packed = layout.pack(codes, scheme.num_bits)
    scale, minimum = torch.rand(2, 192, in_features // 64).bfloat16()
    rearranged = cpu_packed.rearrange(kernel, packed, scale, minimum, scheme, shape)
    assert torch.equal(cpu_packed.restore(kernel, rearranged.codes, scheme, shape), packed)
    assert torch.equal(rearranged.scale, scale)
    assert torch.equal(rearranged.min, minimum)


@pytest.mark.parametrize("fast_bf16", [True, False])
@pytest.mark.parametrize("tokens", [4, 9, 130])
@pytest.mark.parametrize("rearranged", [True, False])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_processors_with_and_without_bf16_products_agree(
    monkeypatch, fast_bf16, tokens, rearranged, num_bits
):
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: fast_bf16)
    layer = make_layer(QuantScheme(num_bits, 64))
    if rearranged:
        layer.rearrange()
    x = make_x(tokens, 384, dtype=torch.bfloat16, mean=1.0)
    bound = ROUNDED[x.dtype] + DENSE_ROUNDING[x.dtype]
    assert relative_error(layer(x), expected(x, layer)) < bound


def test_an_fp32_result_of_bf16_activations_is_not_rounded_on_the_way():
    qweight = quantize(make_weight(192, 384, torch.bfloat16), QuantScheme(4, 64))
    x = make_x(40, 384, dtype=torch.bfloat16)
    reference = x.double() @ qweight.dequantize(torch.float32).double().t()
    assert relative_error(linear(x, qweight, out_dtype=torch.float32), reference) < KERNEL[torch.bfloat16]


def test_rearranging_a_model_by_hand_reaches_all_its_layers():
    model = nn.Sequential(make_layer(QuantScheme(4, 64)), nn.ReLU(), make_layer(QuantScheme(8, 64), 64, 192))
    rearrange_for_cpu(model)
    assert model[0].rearranged
    assert model[2].rearranged
