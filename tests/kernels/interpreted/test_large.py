"""Offsets past 2**31 elements: the last program of launches on tensors that are mostly holes in a file."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.kernels.interpreted import inline_asm
from tests.kernels.interpreted.problems import make_problem
from tests.numerics import DENSE_ROUNDING, KERNEL, relative_error
from woq_triton.scheme import QuantScheme
from woq_triton_kernels.decode import decode_launch
from woq_triton_kernels.dequantize import dequantize_launch
from woq_triton_kernels.gemm import gemm_launch
from woq_triton_kernels.launch import Launch
from woq_triton_kernels.tiles import DEQUANTIZE_ROWS, pick_tile

N, K, ROWS, GROUP = (1 << 25) + 128, 256, 256, 4
FP16 = torch.float16
LIMIT = 1 << 31


def sparse(path: Path, *shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written; more than 2**31 elements."""
    size = torch.Size(shape).numel()
    assert size > LIMIT
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def run_program(launch: Launch, program: int) -> None:
    """Interpret one program of a launch; launching would copy the tensors, holes and all."""
    kernel = launch.kernel
    executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, (launch.programs,))
    constants = {name: value for name, value in launch.constants.items() if name in kernel.arg_names}
    scope = interpreter._patch_lang(executor.fn)
    try:
        arguments = (*launch.tensors, launch.rows, *launch.numbers)
        named = inspect.getcallargs(executor.fn, *arguments, **constants)
        for name, value in named.items():
            if name not in executor.constexprs:
                named[name] = interpreter._implicit_cvt(value)
        interpreter.interpreter_builder.set_grid_dim(launch.programs, 1, 1)
        interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
        with inline_asm.interpreted():
            executor.fn(**named)
    finally:
        scope.restore()


def large_weight(folder: Path, M: int):
    """A problem of the weight's last rows, and the tensors of the large weight that end with them."""
    problem = make_problem(M, ROWS, K, QuantScheme(4, GROUP, 0), FP16)
    groups = -(-N // GROUP)
    packed = sparse(folder / "packed", N, problem.packed.shape[1], dtype=torch.int16)
    scale = sparse(folder / "scale", groups, K, dtype=FP16)
    low = sparse(folder / "min", groups, K, dtype=FP16)
    for large, small in ((packed, problem.packed), (scale, problem.scale), (low, problem.min)):
        large[-len(small) :] = small
    return problem, (packed, scale, low)


@pytest.mark.parametrize("M", [3, 96])
def test_a_product_reads_and_writes_where_it_should(tmp_path, M):
    """Decode and gemm: x, packed, scale, min, and out where it is that large."""
    problem, weight = large_weight(tmp_path, M)
    x = sparse(tmp_path / "x", M, LIMIT // (M - 1) + 8, dtype=FP16)[:, :K]
    x.copy_(problem.x)
    out = torch.zeros(M, N, dtype=FP16) if M < 64 else sparse(tmp_path / "out", M, N, dtype=FP16)
    config = pick_tile(M, N, K, 4, GROUP, 0, FP16, "sm_90")
    build = decode_launch if config.kernel == "decode" else gemm_launch
    launch = build(x, *weight, None, out, None, None, 4, GROUP, 0, config)
    assert config.split_k == 1
    run_program(launch, launch.programs - 1)
    rows = (M - 1) // config.block_m * config.block_m
    columns = min(config.block_n, N - (N - 1) // config.block_n * config.block_n)
    written, expected = out[rows:, -columns:], problem.expected[rows:, -columns:]
    assert relative_error(written, expected) < KERNEL[FP16] + 2 * DENSE_ROUNDING[FP16]


def test_dequantizing_reads_and_writes_where_it_should(tmp_path):
    problem, weight = large_weight(tmp_path, 1)
    out = sparse(tmp_path / "out", N, K, dtype=FP16)
    launch = dequantize_launch(None, *weight, out, 4, GROUP, 0)
    blocks = K // 128
    for program in range(launch.programs - blocks, launch.programs):
        run_program(launch, program)
    rows = N - (N - 1) // DEQUANTIZE_ROWS * DEQUANTIZE_ROWS
    assert relative_error(out[-rows:], problem.weight[-rows:]) < DENSE_ROUNDING[FP16]
    ids = torch.tensor([N - 1, N - 2, N - 77])
    gathered = torch.zeros(3, K, dtype=FP16)
    launch = dequantize_launch(ids, *weight, gathered, 4, GROUP, 0)
    for program in range(blocks):
        run_program(launch, program)
    assert relative_error(gathered, problem.weight[ids - N]) < DENSE_ROUNDING[FP16]
