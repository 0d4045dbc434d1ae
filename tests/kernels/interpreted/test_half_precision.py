"""Weights made in half precision before the product, and the ranges that this leaves."""

import itertools

import pytest
import torch

from tests.kernels.interpreted import inline_asm
from tests.kernels.interpreted.problems import Problem, dense_weight, make_problem
from tests.kernels.interpreted.test_linear import check, forced
from tests.numerics import KERNEL, ROUNDED, make_weight, make_x, relative_error
from woq_triton.backends import triton as backend
from woq_triton.quantize import quantize_tensors
from woq_triton.scheme import QuantScheme

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run(problem: Problem, config) -> torch.Tensor:
    out = torch.full((problem.x.shape[0], problem.shape[0]), float("nan"))
    tensors = (problem.packed, problem.scale, problem.min, problem.bias)
    with inline_asm.interpreted():
        backend.launch(problem.x, *tensors, out, *problem.scheme, config)
    return out


@pytest.mark.parametrize("group_dim, group_size", [(1, 32), (1, 128), (1, -1), (0, 32), (0, 128), (0, -1)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_weights_made_in_half_precision(dtype, symmetric, group_dim, group_size):
    for num_bits, M in itertools.product((4, 8), (3, 16)):
        scheme = QuantScheme(num_bits, group_size, group_dim, symmetric)
        problem = make_problem(M, 70, 300, scheme, dtype, bias=True)
        check(problem, forced(problem, "sm_90", scale_on="weights"))


@pytest.mark.parametrize("factor", [1e-9, 1e-4, 1e4, 1e9])
@pytest.mark.parametrize("scale_on", ["accumulator", "weights"])
def test_the_size_of_bf16_activations_and_weights_does_not_matter(scale_on, factor):
    """Smaller and larger sizes than a model has are as exact."""
    problem = make_problem(4, 64, 256, QuantScheme(8, 64), BF16)
    config = forced(problem, "sm_90", scale_on=scale_on)
    limit = (KERNEL if scale_on == "accumulator" else ROUNDED)[BF16]
    larger_x = Problem(**{**vars(problem), "x": (problem.x * factor)})
    expected = larger_x.x.double() @ problem.weight.T
    assert relative_error(run(larger_x, config), expected) < limit
    scale, minimum = problem.scale * factor, problem.min * factor
    scheme = QuantScheme(8, 64)
    weight = dense_weight(problem.packed, scale, minimum, scheme, problem.shape)
    larger_w = Problem(**{**vars(problem), "scale": scale, "min": minimum})
    assert relative_error(run(larger_w, config), problem.x.double() @ weight.T) < limit


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("M", [1, 8, 16, 40])
def test_fp16_activations_and_weights_as_small_as_a_models_lose_nothing(M, group_dim, arch):
    """A scale of 1e-4 times activations of 0.01 is below fp16's normal numbers."""
    scheme = QuantScheme(8, 128, group_dim)
    problem = make_problem(M, 128, 512, scheme, FP16)
    steps = 1 + torch.arange(problem.scale.numel()).view_as(problem.scale) % 7
    scale = (steps * 3e-5).to(FP16)
    small = {"x": make_x(M, 512, dtype=FP16, mean=0.0) * 0.01, "scale": scale, "min": scale * -124}
    weight = dense_weight(problem.packed, scale, small["min"], scheme, problem.shape)
    expected = small["x"].double() @ weight.T
    out = run(Problem(**{**vars(problem), **small}), forced(problem, arch))
    assert relative_error(out, expected) < ROUNDED[FP16]


@pytest.mark.parametrize("scale_on", ["accumulator", "weights"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype, scale_on):
    problem = make_problem(3, 64, 256, QuantScheme(8, 64), dtype)
    problem.x[1, 5] = float("inf")
    problem.x[2, 7] = float("nan")
    out = run(problem, forced(problem, "sm_90", scale_on=scale_on))
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).any()
    assert torch.isnan(out[2]).all()


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("M", [1, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_rows_of_very_different_size_may_share_a_group(arch, dtype, M, mean):
    """group_dim 0, rows of a group a hundredfold apart: most codes then lie far from the middle."""
    for num_bits, size in itertools.product((4, 8), (32, 128)):
        scheme = QuantScheme(num_bits, size, 0)
        packed, scale, minimum = quantize_tensors(make_weight(128, 256, dtype), scheme)
        weight = dense_weight(packed, scale, minimum, scheme, (128, 256))
        x = make_x(M, 256, dtype=dtype, mean=mean)
        settings = (num_bits, size, 0)
        problem = Problem(x, packed, scale, minimum, None, weight, x.double() @ weight.T, settings)
        config = forced(problem, arch)
        if config.scale_on != "x":
            check(problem, config)
            continue
        # Each product of x with a code's distance from the middle is off by a rounding of x * scale, at most
        # half a unit in the last place; the errors add up as their squares, for M = 1 as few at random.
        middle = (minimum.double() + 2 ** (num_bits - 1) * scale.double()).repeat_interleave(size, dim=0)
        products = (x.double().square() @ (weight - middle).square().T).sum().sqrt()
        rounding = 2**-8 if dtype == BF16 else 2**-11
        assert (run(problem, config).double() - problem.expected).norm() < rounding * products
