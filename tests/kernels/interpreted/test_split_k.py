"""Split-K: right for every number of splits, the same bits for every order of arrival."""

import contextlib
import dataclasses
import random
from unittest import mock

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.interpreted import inline_asm
from tests.kernels.interpreted.problems import make_problem
from tests.kernels.interpreted.test_linear import check, forced
from woq_triton.backends import triton as backend
from woq_triton.backends import workspace
from woq_triton.scheme import QuantScheme


@contextlib.contextmanager
def programs_in_order(order):
    """Within this context the interpreter runs the programs of a 1-D grid in another order."""
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def permuted(self, x, y, z):
        set_grid_idx(self, order[x], y, z)

    with mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", permuted):
        yield


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("group_size, group_dim", [(128, 1), (32, 0), (24, 1)])
def test_every_number_of_splits_is_right(split_k, group_size, group_dim):
    """Also more splits than blocks of K, so that some programs have nothing to add."""
    problem = make_problem(5, 80, 900, QuantScheme(4, group_size, group_dim), torch.float16, bias=True)
    check(problem, forced(problem, "sm_90", split_k=split_k))


@pytest.mark.parametrize("split_k", [1, 2, 5])
@pytest.mark.parametrize("group_size, group_dim", [(128, 1), (32, 0)])
def test_larger_m_is_split_over_both_dimensions_of_its_tiles(split_k, group_size, group_dim):
    problem = make_problem(70, 80, 900, QuantScheme(4, group_size, group_dim), torch.float16, bias=True)
    tile = {"block_m": 32, "block_n": 32, "num_warps": 4, "split_k": split_k}
    check(problem, forced(problem, "sm_90", **tile))


@pytest.mark.parametrize("M", [3, 40])
@pytest.mark.parametrize("num_bits, dtype", [(4, torch.float16), (8, torch.bfloat16)], ids=str)
def test_any_order_of_arrival_gives_the_same_bits(num_bits, dtype, M):
    """Of the decode kernel and of the one for larger M, which here has two tiles along M."""
    problem = make_problem(M, 96, 1024, QuantScheme(num_bits, 64), dtype, bias=True)
    config = forced(problem, "sm_90", block_n=32, num_warps=1, split_k=6)
    if M > 16:
        config = dataclasses.replace(config, block_m=32)
    programs = -(-M // 32) * 3 * 6
    generator = random.Random(0)
    orders = [list(range(programs)), list(reversed(range(programs)))]
    orders += [generator.sample(range(programs), programs) for _ in range(4)]
    results = []
    for order in orders:
        out = torch.full((M, 96), float("nan"))
        with inline_asm.interpreted(), programs_in_order(order):
            backend.launch(
                problem.x,
                problem.packed,
                problem.scale,
                problem.min,
                problem.bias,
                out,
                *problem.scheme,
                config,
            )
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("M", [1, 300])
def test_a_tile_that_would_write_past_the_scratch_is_refused_before_it_is_launched(M):
    problem = make_problem(M, 64, 256, QuantScheme(4, 64), torch.float16)
    out = torch.full((M, 64), float("nan"))
    config = forced(problem, "sm_90", split_k=1 << 15)
    with pytest.raises(ValueError, match="choose a smaller split_k"):
        backend.launch(
            problem.x, problem.packed, problem.scale, problem.min, None, out, *problem.scheme, config
        )
    assert out.isnan().all()


def test_counters_are_zero_again_after_a_launch():
    problem = make_problem(1, 64, 512, QuantScheme(4, 64), torch.float32)
    check(problem, forced(problem, "cpu", split_k=4))
    counters = workspace.scratch_for(problem.x.device, 0).counters
    assert not counters.any()
