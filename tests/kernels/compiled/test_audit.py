"""The audit on kernels compiled for GPUs that are not there, some with known instruction counts."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

from woq_triton.audit import sass
from woq_triton.audit.compilation import AuditError, compile_launch, record_launches
from woq_triton.audit.kernels import audit, plan, use_of
from woq_triton.audit.mainloop import find_main_loop
from woq_triton.audit.problems import Problem, expand
from woq_triton.audit.record import Record, measure


@triton.jit
def _masked_dot_kernel(words_ptr, x_ptr, out_ptr, steps, ON_THE_LEFT: tl.constexpr):
    """``(words & 15) @ x``, words ``[64, 32]`` a step, or its transpose."""
    rows, columns, tokens = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, 16)
    acc = tl.zeros((64, 16), tl.float32) if ON_THE_LEFT else tl.zeros((64, 64), tl.float32)
    for step in range(steps):
        words = tl.load(words_ptr + step * 2048 + rows[:, None] * 32 + columns[None, :])
        masked = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x000f000f;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
        )
        weights = masked.to(tl.float16, bitcast=True)
        if ON_THE_LEFT:
            acc += tl.dot(weights, tl.load(x_ptr + step * 512 + columns[:, None] * 16 + tokens[None, :]))
        else:
            x = tl.load(x_ptr + step * 2048 + rows[:, None] * 32 + columns[None, :])
            acc += tl.dot(x, tl.trans(weights))
    if ON_THE_LEFT:
        tl.store(out_ptr + rows[:, None] * 16 + tokens[None, :], acc)
    else:
        tl.store(out_ptr + rows[:, None] * 64 + rows[None, :], acc)


def masked_dot(arch: str, on_the_left: bool = True, num_warps: int = 4) -> Record:
    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1 << 20, dtype=dtype, device="meta")

    def run() -> None:
        _masked_dot_kernel[(1,)](
            empty(torch.int16),
            empty(torch.float16),
            empty(torch.float32),
            100,
            ON_THE_LEFT=on_the_left,
            num_warps=num_warps,
        )

    (launch,) = record_launches(run, arch)
    return measure(
        compile_launch(launch, arch),
        num_bits=16,  # a weight a word
        bytes_per_weight=2,
        block_m=16,
        programs=1,
        config={},
        problem={},
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_of_known_instructions_is_counted_exactly(arch):
    record = masked_dot(arch, num_warps=2)
    # Each of 2 warps has 32 of the 64 rows: 2 tiles of 16 rows, 2 of 8 columns, 2 steps of 16 deep.
    assert sum(record.matrix.values()) == 8 * record.unrolled
    assert record.weight_operand == "registers"
    # 64 * 32 weights for 64 lanes; two are masked by one instruction, and nothing else is done to them.
    assert record.weights_per_thread_per_iteration == 32 * record.unrolled
    assert record.classes["unpack"] == pytest.approx(16 / 32)
    assert record.classes["matrix"] == pytest.approx(8 / 32)
    assert record.lane_instructions_per_weight == pytest.approx(
        record.loop_instructions / record.weights_per_thread_per_iteration, abs=1e-4
    )
    assert sum(record.classes.values()) == pytest.approx(record.lane_instructions_per_weight, abs=1e-3)
    assert record.spills == 0 and record.weight_stores == 0


def test_hopper_takes_weights_on_the_left_from_registers():
    record = masked_dot("sm_90", num_warps=4)
    assert all(name.startswith("HGMMA.64x16x16") for name in record.matrix)
    assert sum(record.matrix.values()) == 2 * record.unrolled
    assert record.weight_operand == "registers"
    assert record.weight_stores == 0


def test_hopper_stores_weights_on_the_right_to_shared_memory():
    record = masked_dot("sm_90", on_the_left=False)
    assert all(name.startswith("HGMMA.64x64x16") for name in record.matrix)
    assert record.weight_stores > 0


def test_amd_kernels_are_counted():
    problem = Problem(1, 4096, 4096, 4, 128, 1, "float16")
    (record,) = audit(plan([problem], ["gfx942"]), jobs=1)
    assert all("mfma" in name for name in record.matrix)
    assert record.spills == 0 and record.fits and record.weight_stores == 0
    assert 0 < record.classes["unpack"] < record.lane_instructions_per_weight


def test_the_saved_assembly_can_be_counted_again(tmp_path):
    problem = Problem(1, 4096, 4096, 4, 128, 1, "float16")
    (record,) = audit(plan([problem], ["sm_90"]), jobs=1, asm_folder=str(tmp_path))
    loop = find_main_loop(sass.parse(Path(record.asm).read_text()))
    assert loop.count() == record.loop_instructions
    assert loop.matrix() == record.matrix
    packed = record.config["block_n"] * 128 / (32 * record.config["num_warps"])
    assert record.weights_per_thread_per_iteration % packed == 0


def test_problems_that_share_a_kernel_are_compiled_once():
    shapes = [Problem(1, 4096, 4096), Problem(1, 4096, 4096), Problem(2, 4096, 4096)]
    tasks = plan(expand(shapes, ms=(1, 2), num_bits=(4,), group_sizes=(128,), group_dims=(1,)), ["sm_80"])
    assert len(tasks) == 2  # fp16 and bf16
    assert [task.problems for task in tasks] == [6, 6]


def test_a_tile_can_be_tried_and_an_unknown_field_is_an_error():
    problem = Problem(1, 4096, 4096)
    (task,) = plan([problem], ["sm_80"], {"block_n": 32, "num_warps": 1})
    (record,) = audit([task], jobs=1)
    assert (record.config["block_n"], record.config["num_warps"]) == (32, 1)
    with pytest.raises(AuditError, match="block_z"):
        plan([problem], ["sm_80"], {"block_z": 1})


def test_a_limit_of_registers_reaches_the_compiler_on_nvidia_only():
    problem = Problem(1, 4096, 4096)
    assert "maxnreg" not in use_of(problem, "sm_90").launch.options
    assert use_of(problem, "sm_90", {"max_registers": 64}).launch.options["maxnreg"] == 64
    assert "maxnreg" not in use_of(problem, "gfx942", {"max_registers": 64}).launch.options


def test_what_does_not_compile_is_an_error_that_names_kernel_and_architecture():
    (task,) = plan([Problem(1, 4096, 4096)], ["sm_80"], {"block_n": 48})
    with pytest.raises(AuditError, match=r"_decode_kernel.*sm_80"):
        audit([task], jobs=1)


def test_large_m_is_audited_as_the_dequantization_that_serves_it():
    (record,) = audit(plan([Problem(4096, 4096, 4096)], ["sm_90"]), jobs=1)
    assert record.kernel == "_dequantize_kernel"
    assert record.matrix == {}
    assert record.bytes_per_weight == 0.5 + 4 / 128 + 2


ONE = ("--shape 4096x4096 --m 1 --num-bits 4 --group-size 128 --group-dim 1 --dtype float16").split()


def invoke(*arguments: str):
    from woq_triton.cli import app

    return CliRunner().invoke(app, ["audit", *arguments])


def test_the_command_prints_a_table_and_json_with_every_field(tmp_path):
    result = invoke(*ONE, "--arch", "sm_90", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "lanes/w" in result.stdout and "budget = " in result.stdout
    path = tmp_path / "audit.json"
    result = invoke(*ONE, "--arch", "sm_90", "--jobs", "1", "--json", "--output", str(path))
    (record,) = json.loads(result.stdout)
    assert [record] == json.loads(path.read_text())
    assert {field.name for field in dataclasses.fields(Record)} <= set(record)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "sm_70"], "--arch sm_70: choose from"),
        (["--num-bits", "3"], "--num-bits 3: choose from 4, 8"),
        (["--group-size", "0"], "--group-size must be positive"),
        (["--group-dim", "2"], "--group-dim 2"),
        (["--dtype", "float8"], "--dtype float8"),
        (["--m", "0"], "at least 1"),
        (["--shape", "4096"], "OUTxIN"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--shape", "64x64", "--tile", "block_n"], "FIELD=VALUE"),
        (["--shape", "64x64", "--tile", "block_n=0"], "block_n must be a positive number"),
        (["--shape", "64x64", "--tile", "num_warps=-2"], "num_warps must be a positive number"),
        (["--shape", "64x64", "--tile", "block_n=48"], "block_n must be a power of two"),
        (["--shape", "99999999999x99999999999"], "2**48 weights or more"),
        (["--shape", "64x64", "--jobs", "-1"], "--jobs must be positive"),
        (["--shape", "64x64", "--output", "missing-folder/audit.json"], "cannot be written"),
    ],
)
def test_a_bad_option_is_one_clear_line(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
