"""The linear kernels against fp64: every scheme and dtype, every way to unpack and to scale."""

import itertools

import pytest
import torch

from tests.kernels.interpreted import inline_asm
from tests.kernels.interpreted.problems import Problem, make_problem
from tests.numerics import DENSE_ROUNDING, KERNEL, ROUNDED, relative_error
from woq_triton.backends import triton as backend
from woq_triton.scheme import QuantScheme
from woq_triton_kernels.tiles import TileConfig, pick_tile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def check(problem: Problem, config: TileConfig, out_dtype: torch.dtype = FP32) -> None:
    """Launch one configuration and compare it with the exact answer, overall and at the worst element."""
    M, N = problem.x.shape[0], problem.shape[0]
    out = torch.full((M, N), float("nan"), dtype=out_dtype)
    tensors = (problem.packed, problem.scale, problem.min, problem.bias)
    with inline_asm.interpreted():
        backend.launch(problem.x, *tensors, out, *problem.scheme, config)
    table = KERNEL if config.scale_on == "accumulator" else ROUNDED
    limit = table[problem.x.dtype] + (DENSE_ROUNDING[out_dtype] if out_dtype != FP32 else 0.0)
    error = relative_error(out, problem.expected)
    assert error < limit, f"relative error {error:.1e}, limit {limit:.1e}, {config}"
    # No element may be far off behind a good average: errors are spread like a normal distribution.
    worst = ((out.double() - problem.expected).abs().max() / problem.expected.square().mean().sqrt()).item()
    assert worst < 8 * limit, f"worst element {worst:.1e} of the mean, limit {8 * limit:.1e}, {config}"


def forced(problem: Problem, arch: str, **changes) -> TileConfig:
    """The configuration that a device would take, with some fields changed."""
    M, (N, K) = problem.x.shape[0], problem.shape
    picked = pick_tile(M, N, K, *problem.scheme, problem.x.dtype, arch)
    return TileConfig(**{**picked.to_dict(), **changes})


# group_size, symmetric, M, N, K: N and K ragged, groups ragged, groups that cut planes and blocks.
SCHEMES = [
    (128, False, 1, 70, 300),
    (64, True, 3, 33, 384),
    (32, False, 16, 48, 256),
    (32, True, 17, 16, 129),
    (48, False, 9, 17, 200),
    (96, True, 5, 64, 300),
    (-1, False, 8, 130, 257),
    (10, False, 2, 40, 64),
    (256, False, 40, 64, 512),
    (1, True, 2, 3, 5),
]


@pytest.mark.parametrize("group_size, symmetric, M, N, K", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_dim", [1, 0])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_every_scheme_as_each_target_unpacks_it(num_bits, group_dim, dtype, group_size, symmetric, M, N, K):
    scheme = QuantScheme(num_bits, group_size, group_dim, symmetric)
    problem = make_problem(M, N, K, scheme, dtype, bias=M % 2 == 1)
    # Neighbouring cases take turns, so that each target meets each bit width, dtype and group_dim.
    turn = SCHEMES.index((group_size, symmetric, M, N, K)) + DTYPES.index(dtype)
    check(problem, forced(problem, ("sm_90", "gfx942", "gfx90a", "cpu")[turn % 4]))


@pytest.mark.parametrize(
    "dtype, weight_dtype, out_dtype",
    [case for case in itertools.product(DTYPES, DTYPES, DTYPES) if len(set(case)) > 1],
    ids=str,
)
def test_dtypes_of_x_metadata_and_output_mix(dtype, weight_dtype, out_dtype):
    group_dim, num_bits = DTYPES.index(out_dtype) % 2, 8 if weight_dtype == FP32 else 4
    scheme = QuantScheme(num_bits, 64, group_dim, symmetric=dtype == FP16)
    problem = make_problem(4, 66, 160, scheme, dtype, weight_dtype, bias=True)
    check(problem, forced(problem, "sm_80"), out_dtype)


@pytest.mark.parametrize("scale_on", ["accumulator", "weights"])
@pytest.mark.parametrize("block_m, block_n, M, N", [(16, 32, 33, 70), (32, 64, 40, 64), (64, 128, 130, 140)])
@pytest.mark.parametrize("num_bits, dtype", [(4, FP16), (4, BF16), (8, FP16), (8, BF16), (4, FP32)], ids=str)
def test_gemm_tiles_cover_ragged_m_and_n(num_bits, dtype, block_m, block_n, M, N, scale_on):
    problem = make_problem(M, N, 192, QuantScheme(num_bits, 64), dtype, bias=True)
    check(problem, forced(problem, "sm_90", block_m=block_m, block_n=block_n, scale_on=scale_on))


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("group_dim, group_size", [(1, 128), (1, 32), (0, 64)])
@pytest.mark.parametrize(
    "unpack, subnormal", [("ptx", True), ("ptx", False), ("gcn", False), ("plain", True)]
)
def test_unpack_styles_agree_with_fp64(unpack, subnormal, group_dim, group_size, mean):
    for num_bits, dtype in itertools.product((4, 8), (FP16, BF16)):
        problem = make_problem(2, 64, 256, QuantScheme(num_bits, group_size, group_dim), dtype, mean=mean)
        style = {"unpack": unpack, "subnormal": subnormal}
        check(problem, forced(problem, "sm_90", **style))


def test_long_sums_stay_within_tolerance():
    """K of a real layer, where the share of the magic in the accumulator is largest."""
    for dtype, subnormal in ((FP16, False), (FP16, True), (BF16, False)):
        problem = make_problem(1, 16, 4096, QuantScheme(4, -1), dtype)
        check(problem, forced(problem, "sm_90", block_n=16, num_warps=1, subnormal=subnormal))
