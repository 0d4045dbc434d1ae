"""Weights go to DeepSpeed's layout and come back, checked against the installed DeepSpeed."""

import itertools

import pytest
import torch

from woq_triton import QuantizedWeight, QuantScheme, quantize
from woq_triton.deepspeed_format import from_deepspeed, to_deepspeed

utils = pytest.importorskip("deepspeed.inference.quantization.utils")

# Sizes that 8 does not divide: for others DeepSpeed calls its CUDA extension.
SCHEMES = [
    QuantScheme(bits, size, dim) for bits, size, dim in itertools.product((4, 8), (12, 20, 60), (0, 1))
]


def skewed(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(rows, 1, generator=generator) + 0.5
    return (torch.randn(rows, columns, generator=generator) * spread + 0.2).to(dtype)


def steps_apart(a: torch.Tensor, b: torch.Tensor, qweight: QuantizedWeight) -> float:
    """Largest difference of two dense weights in quantization steps."""
    size, dim = qweight.scheme.group_size, qweight.scheme.group_dim
    step = qweight.scale.float().repeat_interleave(size, dim)
    return float(((a.float() - b.float()).abs() / step).max())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_quantized_by_deepspeed_come_over_with_equal_codes(scheme: QuantScheme) -> None:
    weight = skewed(120, 240, torch.float16)
    data, scale, minimum = utils.Quantizer(scheme.to_dict()).quantize(weight)
    ours = from_deepspeed(data, scale, minimum, scheme)
    theirs = data if scheme.num_bits == 8 else utils.DeQuantizer._decompress_uint4_to_uint8(None, data)
    assert torch.equal(ours.codes(), theirs)
    dense = utils.DeQuantizer(scheme.to_dict(), torch.float16).dequantize(data, scale, minimum)
    assert steps_apart(ours.dequantize(torch.float32), dense, ours) < 0.25


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_deepspeed_dequantizes_our_weights(scheme: QuantScheme, symmetric: bool) -> None:
    scheme = QuantScheme(scheme.num_bits, scheme.group_size, scheme.group_dim, symmetric)
    ours = quantize(skewed(120, 240, torch.float16), scheme)
    data, scale, minimum = to_deepspeed(ours)
    settings = {**scheme.to_dict(), "symmetric": False}
    dense = utils.DeQuantizer(settings, torch.float16).dequantize(data, scale, minimum)
    # int8 with min far from 0 loses up to an eighth of a step in each of three fp16 roundings.
    assert steps_apart(ours.dequantize(torch.float32), dense, ours) < (
        0.25 if scheme.num_bits == 4 else 0.375
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_and_min_survive_the_round_trip(scheme: QuantScheme, dtype: torch.dtype) -> None:
    ours = quantize(skewed(120, 240, dtype), scheme)
    back = from_deepspeed(*to_deepspeed(ours), scheme, dtype=dtype)
    assert torch.equal(back.packed, ours.packed)
    assert back.min is not None and ours.min is not None
    assert torch.equal(back.min, ours.min)
    torch.testing.assert_close(back.scale, ours.scale, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_constant_groups_are_infinite_scales_in_deepspeed_and_exact_in_both() -> None:
    weight = torch.full((4, 20), 0.3, dtype=torch.float16)
    ours = quantize(weight, QuantScheme(4, 20, 1))
    data, scale, minimum = to_deepspeed(ours)
    assert scale.isinf().all()
    dense = utils.DeQuantizer(ours.scheme.to_dict(), torch.float16).dequantize(data, scale, minimum)
    assert torch.equal(dense, weight)
    assert torch.equal(from_deepspeed(data, scale, minimum, ours.scheme).dequantize(torch.float16), weight)


def test_narrow_groups_whose_reciprocal_overflows_are_refused() -> None:
    weight = torch.linspace(0, 1e-3, 20).to(torch.float16).expand(4, 20)
    with pytest.raises(ValueError, match=r"up_proj: its reciprocal scale .* is beyond torch.float16"):
        to_deepspeed(quantize(weight, QuantScheme(8, 20, 1)), "up_proj")
    to_deepspeed(quantize(weight.bfloat16(), QuantScheme(8, 20, 1)))


def test_what_the_layout_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="whole groups only, but 32 does not divide 240"):
        to_deepspeed(quantize(skewed(8, 240, torch.float16), QuantScheme(4, 32, 1)))
    with pytest.raises(ValueError, match="even number of columns, not 15"):
        to_deepspeed(quantize(skewed(8, 15, torch.float16), QuantScheme(4, 15, 1)))
    data, scale, minimum = to_deepspeed(quantize(skewed(8, 40, torch.float16), QuantScheme(4, 20, 1)))
    with pytest.raises(ValueError, match="scale has shape"):
        from_deepspeed(data, scale, minimum, QuantScheme(4, 10, 1))
    with pytest.raises(ValueError, match="symmetric=False"):
        from_deepspeed(data, scale, minimum, QuantScheme(4, 20, 1, symmetric=True))
    with pytest.raises(ValueError, match="must be 2-D"):
        from_deepspeed(data.int(), scale, minimum, QuantScheme(4, 20, 1))
