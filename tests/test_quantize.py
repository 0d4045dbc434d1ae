"""The quantization rule: half a stored step, exact constants, shards that equal the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics import HALF_STEP, make_weight
from woq_triton import QuantScheme, quantize

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = st.builds(
    QuantScheme,
    num_bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([-1, 1, 3, 16, 32, 50, 128, 1000]),
    group_dim=st.sampled_from([0, 1]),
    symmetric=st.booleans(),
)


def steps_of_error(weight, qweight):
    """Largest error in units of the stored step, in fp64; a zero step counts as 1."""
    size = qweight.scheme.resolve_group_size(qweight.shape)
    rows, columns = weight.shape

    def expand(meta):
        return meta.double().repeat_interleave(size, qweight.scheme.group_dim)[:rows, :columns]

    scale, codes = expand(qweight.scale), qweight.codes().double()
    if qweight.min is None:
        dense = (codes - qweight.scheme.zero_code) * scale
    else:
        dense = codes * scale + expand(qweight.min)
    error = (dense - weight.double()).abs() / torch.where(scale == 0, 1.0, scale)
    return float(error.max()) if error.numel() else 0.0


@given(
    scheme=SCHEMES,
    rows=st.integers(0, 70),
    columns=st.integers(0, 260),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_every_weight_is_within_half_a_stored_step(scheme, rows, columns, dtype, seed):
    weight = make_weight(rows, columns, dtype, seed)
    qweight = quantize(weight, scheme)
    assert qweight.shape == (rows, columns)
    assert qweight.scale.shape == scheme.metadata_shape((rows, columns))
    assert qweight.scale.dtype == dtype
    assert (qweight.min is None) == scheme.symmetric
    assert steps_of_error(weight, qweight) <= HALF_STEP


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_bits", "width", "offset"),
    [(8, 1e-3, 0.0), (4, 1e-4, 0.0), (8, 0.05, 10.0), (4, 0.05, 10.0), (8, 1e-6, 0.0), (4, 0.05, -10.0)],
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_narrow_and_distant_groups_are_finite_and_within_half_a_step(
    dtype, num_bits, width, offset, symmetric, group_dim
):
    weight = (torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) * width + offset).to(dtype)
    qweight = quantize(weight, QuantScheme(num_bits, 32, group_dim, symmetric))
    assert torch.isfinite(qweight.dequantize(torch.float32)).all()
    assert steps_of_error(weight, qweight) <= HALF_STEP


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.7, 1e-7, -6e4])
def test_a_constant_group_is_exact(dtype, symmetric, num_bits, constant):
    weight = make_weight(4, 96, dtype)
    weight[:, 32:64] = constant
    dense = quantize(weight, QuantScheme(num_bits, 32, 1, symmetric)).dequantize()
    assert torch.equal(dense[:, 32:64], weight[:, 32:64])


@given(
    scheme=SCHEMES,
    tp=st.sampled_from([2, 3, 4]),
    dim=st.sampled_from([0, 1]),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 3),
)
def test_a_quantized_shard_is_the_shard_of_the_quantized_weight(scheme, tp, dim, dtype, blocks):
    """Shard boundaries fall on group boundaries; the last shard is shorter, with a ragged last group."""
    along = scheme.group_dim == dim
    if along and scheme.group_size == -1:
        scheme = QuantScheme(scheme.num_bits, 16, scheme.group_dim, scheme.symmetric)
    width = blocks * (scheme.group_size if along and scheme.group_size < 100 else 16)
    if along and scheme.group_size >= 100:
        width = scheme.group_size
    shape = [24, 40]
    shape[dim] = tp * width - min(5, width - 1)
    weight = make_weight(*shape, dtype)
    whole = quantize(weight, scheme)
    for rank in range(tp):
        start, stop = rank * width, min((rank + 1) * width, shape[dim])
        part = quantize(weight.narrow(dim, start, stop - start), scheme)
        sliced = whole.shard(dim, start, stop)
        assert part.shape == sliced.shape
        assert torch.equal(part.packed, sliced.packed)
        assert torch.equal(part.scale, sliced.scale)
        assert part.min is None or torch.equal(part.min, sliced.min)


def test_a_shard_that_cuts_a_group_is_refused():
    qweight = quantize(make_weight(8, 256), QuantScheme(4, 64, 1))
    with pytest.raises(ValueError, match="shard 0:100 cuts a group of 64 in two"):
        qweight.shard(1, 0, 100)
    with pytest.raises(ValueError, match="not inside"):
        qweight.shard(0, 4, 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_up_to_the_largest_number_stay_finite_and_within_a_step(dtype, num_bits, symmetric):
    largest = torch.finfo(dtype).max
    weight = make_weight(16, 64) / make_weight(16, 64).abs().max()
    weight[:, ::7] = 1.0
    weight = (weight * (0.49 * largest if not symmetric else largest)).to(dtype)
    weight[0, 0] = largest
    if symmetric:
        weight[1, 1] = -largest
    qweight = quantize(weight, QuantScheme(num_bits, 32, 1, symmetric))
    assert torch.isfinite(qweight.dequantize()).all()
    assert torch.isfinite(qweight.dequantize(torch.float32)).all()
    # Half a step, and what rounding the scale down by 2**-8 (bf16) takes from 255 steps.
    assert steps_of_error(weight, qweight) <= HALF_STEP + num_bits / 8
    assert 0 < qweight.relative_error(weight) < 0.1


@pytest.mark.parametrize("magnitude", [1e-25, 1e30])
def test_the_relative_error_does_not_depend_on_the_magnitude(magnitude):
    weight = make_weight(8, 64)
    expected = quantize(weight, QuantScheme(4, 32)).relative_error(weight)
    scaled = weight * magnitude
    assert quantize(scaled, QuantScheme(4, 32)).relative_error(scaled) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_nan_and_infinite_weights_are_refused_by_name(value, group_dim):
    weight = make_weight(8, 70)
    weight[5, 69] = value
    with pytest.raises(ValueError, match=r"layer 'up_proj' has NaN or infinite values"):
        quantize(weight, QuantScheme(4, 32, group_dim), "layer 'up_proj'")


def test_a_range_beyond_float32_is_refused():
    weight = torch.tensor([[-3e38, 3e38]])
    with pytest.raises(ValueError, match="range exceeds float32"):
        quantize(weight, QuantScheme())


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.ones(4, 4, dtype=torch.int8), TypeError, "weight has dtype torch.int8"),
        (torch.ones(4, dtype=torch.float32), ValueError, r"shape \(4,\); quantize a 2-D"),
        (torch.ones(2, 4, 4), ValueError, "quantize a 2-D"),
        (torch.ones(4, 4, device="meta"), TypeError, "weight is on the meta device"),
        (torch.ones(4, 4).to_sparse(), TypeError, "weight is torch.sparse_coo"),
        (None, TypeError, "weight is a NoneType"),
    ],
)
def test_what_is_no_weight_is_refused(weight, error, message):
    with pytest.raises(error, match=message):
        quantize(weight, QuantScheme())


@pytest.mark.parametrize("group_dim", [0, 1])
def test_strided_and_transposed_weights_quantize_like_contiguous_ones(group_dim):
    weight = make_weight(96, 200)
    scheme = QuantScheme(4, 32, group_dim)
    expected = quantize(weight, scheme)
    wide = torch.zeros(96, 400)
    wide[:, ::2] = weight
    for view in (wide[:, ::2], weight.t().contiguous().t()):
        assert torch.equal(quantize(view, scheme).packed, expected.packed)


@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("group_size", [32, 100, -1])
def test_blocks_of_a_large_weight_agree_with_a_small_one(group_dim, group_size):
    """A weight of several row blocks gives the codes that its columns, in one block, give."""
    weight = make_weight(600, 4096, torch.bfloat16)
    scheme = QuantScheme(4, group_size, group_dim)
    qweight = quantize(weight, scheme)
    assert steps_of_error(weight, qweight) <= HALF_STEP
    if group_dim == 0 or group_size > 0:
        start, stop = (64, 96) if group_dim == 0 else (32 * group_size, 33 * group_size)
        part = quantize(weight[:, start:stop], scheme)
        assert torch.equal(part.codes(), qweight.codes()[:, start:stop])


@pytest.mark.parametrize(("group_size", "group_dim"), [(128, 1), (16, 1), (128, 0), (-1, 0)])
def test_scratch_memory_is_at_most_half_a_dense_layer(group_size, group_dim):
    from torch.profiler import ProfilerActivity, profile

    weight = make_weight(2048, 4096, torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        qweight = quantize(weight, QuantScheme(4, group_size, group_dim))
    current = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    assert current >= qweight.packed.nbytes
    assert peak - qweight.nbytes <= weight.nbytes / 2
