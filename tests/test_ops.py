"""The ops: numbers against fp64, torch's own checks, compilation, and errors before any work."""

import subprocess
import sys

import pytest
import torch

from tests.numerics import DENSE_ROUNDING, KERNEL, make_weight, make_x, relative_error
from woq_triton import QuantScheme, embedding, linear, quantize, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = [
    QuantScheme(4, 128, 1),
    QuantScheme(4, 32, 0, True),
    QuantScheme(8, 64, 1, True),
    QuantScheme(8, 50, 0),
    QuantScheme(4, -1, 1),
    QuantScheme(8, 1000, 1),
]


def dense64(qweight):
    """The weight in fp64, from the codes and the metadata as stored."""
    size = qweight.scheme.resolve_group_size(qweight.shape)
    rows, columns = qweight.shape

    def expand(meta):
        return meta.double().repeat_interleave(size, qweight.scheme.group_dim)[:rows, :columns]

    codes = qweight.codes().double()
    if qweight.min is None:
        return (codes - qweight.scheme.zero_code) * expand(qweight.scale)
    return codes * expand(qweight.scale) + expand(qweight.min)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 130])
def test_linear_matches_fp64(scheme, dtype, mean, tokens):
    qweight = quantize(make_weight(70, 300, dtype), scheme)
    x, bias = make_x(tokens, 300, dtype=dtype, mean=mean), make_x(70, dtype=dtype)
    expected = x.double() @ dense64(qweight).t() + bias.double()
    out = linear(x, qweight, bias, torch.float32)
    assert out.dtype == torch.float32
    assert relative_error(out, expected) < KERNEL[dtype]
    half = linear(x, qweight, bias)
    assert half.dtype == dtype
    assert relative_error(half, expected) < KERNEL[dtype] + DENSE_ROUNDING[dtype]


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_activations_and_metadata_may_differ_in_dtype(weight_dtype, x_dtype):
    qweight = quantize(make_weight(40, 260, weight_dtype), QuantScheme(4, 64))
    x = make_x(5, 260, dtype=x_dtype)
    out = linear(x, qweight, out_dtype=torch.float32)
    assert relative_error(out, x.double() @ dense64(qweight).t()) < KERNEL[x_dtype]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_and_embedding_match_fp64(scheme, dtype):
    qweight = quantize(make_weight(70, 300, dtype), scheme)
    expected = dense64(qweight)
    assert relative_error(qweight.dequantize(torch.float32), expected) < 1e-6
    assert relative_error(qweight.dequantize(), expected) < DENSE_ROUNDING[dtype]
    ids = torch.tensor([[3, 69, 0], [3, 1, 68]])
    rows = embedding(ids, qweight, torch.float32)
    assert rows.shape == (2, 3, 300)
    assert relative_error(rows, expected[ids]) < 1e-6
    assert embedding(ids.int(), qweight).dtype == dtype


def test_any_layout_of_x_is_served():
    qweight = quantize(make_weight(24, 130), QuantScheme(8, 32))
    dense = dense64(qweight)
    strided = make_x(6, 260)[:, ::2]
    transposed = make_x(130, 6).t()
    expanded = make_x(1, 130).expand(5, 130)
    for x in (strided, transposed, expanded, make_x(130), make_x(2, 3, 4, 130), make_x(2, 0, 130)):
        out = linear(x, qweight)
        assert out.shape == (*x.shape[:-1], 24)
        assert relative_error(out, x.double() @ dense.t()) < KERNEL[torch.float32]


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
def test_weights_without_rows_or_columns_are_served(shape, scheme):
    """A rank without KV heads holds such shards."""
    qweight = quantize(torch.empty(shape), scheme)
    bias = make_x(shape[0])
    out = linear(make_x(3, shape[1]), qweight, bias)
    assert torch.equal(out, bias.expand(3, shape[0]))
    assert qweight.dequantize().shape == shape


def op_args(scheme, with_bias=True):
    qweight = quantize(make_weight(24, 130), scheme)
    tensors = (qweight.packed, qweight.scale, qweight.min)
    bias = (make_x(24),) if with_bias else (None,)
    return {
        "linear": (make_x(3, 130), *tensors, *bias, *qweight.op_scheme),
        "embedding": (torch.tensor([1, 5]), *tensors, *qweight.op_scheme),
        "dequantize": (*tensors, *qweight.op_scheme),
    }


@pytest.mark.parametrize("op", ["linear", "embedding", "dequantize"])
@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_torch_accepts_the_op(op, scheme, out_dtype):
    arguments = op_args(scheme, with_bias=out_dtype is None)[op]
    torch.library.opcheck(getattr(torch.ops.woq_triton, op).default, (*arguments, out_dtype))


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_compiled_equals_eager(scheme):
    qweight = quantize(make_weight(24, 130), scheme)

    def block(x, ids):
        return linear(torch.relu(x), qweight).sigmoid() @ embedding(ids, qweight)[:24]

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for tokens in (3, 7):
        x, ids = make_x(tokens, 130), torch.arange(24)
        torch.testing.assert_close(compiled(x, ids), block(x, ids))


def test_an_input_that_requires_grad_is_refused():
    qweight = quantize(make_weight(24, 130), QuantScheme())
    x = make_x(3, 130).requires_grad_()
    with pytest.raises(RuntimeError, match=r"woq_triton.linear has no gradient.*torch.no_grad"):
        linear(x, qweight)
    with torch.no_grad():
        assert not linear(x, qweight).requires_grad


def test_an_input_that_requires_grad_is_refused_when_compiled_as_well():
    qweight = quantize(make_weight(24, 130), QuantScheme())
    compiled = torch.compile(lambda x: linear(x * 2, qweight), fullgraph=True, backend="aot_eager")
    x = make_x(3, 130).requires_grad_()
    with pytest.raises(RuntimeError, match=r"woq_triton\.linear has no gradient"):
        compiled(x)
    with torch.no_grad():
        assert not compiled(x).requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"x": torch.ones(3, 129)},
            ValueError,
            r"x has shape \(3, 129\), but the weight has in_features=130",
        ),
        ({"x": torch.ones(())}, ValueError, "in_features=130"),
        ({"x": torch.ones(3, 130, dtype=torch.int64)}, TypeError, "x has dtype torch.int64"),
        ({"x": torch.ones(3, 130, device="meta")}, Exception, "meta"),
        ({"bias": torch.ones(23)}, ValueError, r"bias is torch.float32 \(23,\), but must be float \(24,\)"),
        ({"packed": torch.zeros(24, 63, dtype=torch.int16)}, ValueError, r"packed is torch.int16 \(24, 63\)"),
        ({"packed": torch.zeros(24, 64, dtype=torch.int32)}, ValueError, "packed is torch.int32"),
        ({"scale": torch.ones(24, 1)}, ValueError, r"scale is torch.float32 \(24, 1\), but must be float"),
        ({"scale": torch.ones(24, 2, dtype=torch.float64)}, ValueError, "scale is torch.float64"),
        (
            {"min": torch.ones(24, 2, dtype=torch.bfloat16)},
            ValueError,
            "min is torch.bfloat16, scale torch.fl",
        ),
        ({"num_bits": 3}, ValueError, "no kernel for num_bits=3"),
        ({"group_size": 0}, ValueError, "group_size=0"),
        ({"group_dim": 2}, ValueError, "group_dim=2"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ],
)
def test_a_bad_request_is_an_error_before_any_work(change, error, message):
    qweight = quantize(make_weight(24, 130), QuantScheme(4, 128))
    names = ("num_bits", "group_size", "group_dim", "out_features", "in_features")
    request = {
        "x": make_x(3, 130),
        "packed": qweight.packed,
        "scale": qweight.scale,
        "min": qweight.min,
        "bias": None,
        **dict(zip(names, qweight.op_scheme, strict=True)),
        "out_dtype": None,
    }
    with pytest.raises(error, match=message):
        torch.ops.woq_triton.linear(*(request | change).values())


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([24]), IndexError, "out of range"),
        (torch.tensor([-1]), IndexError, "out of range"),
        (torch.tensor([0.0]), TypeError, "ids have dtype torch.float32"),
    ],
)
def test_bad_ids_are_refused(ids, error, message):
    qweight = quantize(make_weight(24, 130), QuantScheme())
    with pytest.raises(error, match=message):
        embedding(ids, qweight)


def run_with_implementation(name):
    script = (
        "import torch, woq_triton\n"
        "from woq_triton import backends\n"
        "q = woq_triton.quantize(torch.rand(8, 64), woq_triton.QuantScheme())\n"
        "print(backends.serve('cpu').__name__, woq_triton.linear(torch.ones(2, 64), q).shape)\n"
    )
    path = "import sys; sys.path[:0] = ['.', 'kernels']\n"
    return subprocess.run(
        [sys.executable, "-c", path + script],
        env={"WOQ_TRITON_IMPL": name, "PATH": ""},
        capture_output=True,
        text=True,
    )


def test_an_implementation_can_be_forced():
    done = run_with_implementation("reference")
    assert done.stdout.startswith(reference.__name__), done.stderr


def test_an_unknown_implementation_is_named():
    done = run_with_implementation("fast")
    assert "WOQ_TRITON_IMPL is 'fast', but must be one of reference, cpu, triton" in done.stderr
