"""What the decode kernels must reach, on a representative dozen (`make audit` holds all of them to it)."""

import functools
from importlib.metadata import version

import pytest

from woq_triton.audit.goals import BF16_ALLOWANCE, failures, limit
from woq_triton.audit.kernels import audit, plan
from woq_triton.audit.problems import Problem
from woq_triton.audit.record import Record

TRITON = "3.7.1"
"""The pinned version. Others compile a little differently: `woq-triton audit` reports them."""

PROBLEMS = {
    "fp16 int4 g128": Problem(1, 4096, 4096, 4, 128, 1, "float16"),
    "bf16 int4 g128": Problem(1, 4096, 4096, 4, 128, 1, "bfloat16"),
    "bf16 int4 g128 M16": Problem(16, 4096, 14336, 4, 128, 1, "bfloat16"),
    "fp16 int4 g64": Problem(8, 8192, 8192, 4, 64, 1, "float16"),
    "bf16 int4 g32": Problem(4, 5120, 25600, 4, 32, 1, "bfloat16"),
    "bf16 int8 channel": Problem(1, 14336, 4096, 8, -1, 1, "bfloat16"),
    "fp16 int8 g128 M16": Problem(16, 4096, 4096, 8, 128, 1, "float16"),
    "bf16 int8 g32 M16": Problem(16, 4096, 4096, 8, 32, 1, "bfloat16"),
    "bf16 int4 dim0": Problem(1, 4096, 4096, 4, 128, 0, "bfloat16"),
    "bf16 int4 dim0 g32 M16": Problem(16, 8192, 8192, 4, 32, 0, "bfloat16"),
    "bf16 int8 dim0 g32": Problem(1, 8192, 8192, 8, 32, 0, "bfloat16"),
    "fp16 int8 dim0 g32 M16": Problem(16, 4096, 4096, 8, 32, 0, "float16"),
}

DOZEN = [(arch, name) for arch in ("sm_80", "sm_90") for name in PROBLEMS]

# What spills, or takes weights through shared memory, where tiles are chosen as for sm_80.
ELSEWHERE = [
    ("sm_89", Problem(1, 128256, 512, 4, 32, 1, "float16")),
    ("sm_89", Problem(1, 128256, 512, 4, 128, 0, "float16")),
    ("sm_100", Problem(1, 128256, 4096, 8, -1, 0, "float16")),
    ("sm_100", Problem(16, 4096, 4096, 8, 128, 0, "float16")),
    ("sm_100", Problem(16, 128256, 4096, 4, -1, 0, "float16")),
    ("gfx942", Problem(1, 4096, 4096, 8, 32, 0, "float16")),
    ("gfx942", Problem(1, 4096, 4096, 8, 64, 0, "float16")),
]


@functools.cache
def record_of(arch: str, name: str) -> Record:
    (record,) = audit(plan([PROBLEMS[name]], [arch]), jobs=1)
    return record


pinned = pytest.mark.skipif(version("triton") != TRITON, reason=f"goals are set for Triton {TRITON}")


@pinned
@pytest.mark.parametrize(("arch", "name"), DOZEN)
def test_decode_reaches_its_goal(arch, name):
    record = record_of(arch, name)
    assert limit(record) is not None
    assert failures(record) == []


@pinned
@pytest.mark.parametrize(("arch", "problem"), ELSEWHERE)
def test_decode_neither_spills_nor_stores_weights(arch, problem):
    (record,) = audit(plan([problem], [arch]), jobs=1)
    assert failures(record) == []


@pinned
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_bf16_costs_little_more_than_fp16(arch):
    fp16, bf16 = record_of(arch, "fp16 int4 g128"), record_of(arch, "bf16 int4 g128")
    assert bf16.lane_instructions_per_weight <= fp16.lane_instructions_per_weight + BF16_ALLOWANCE


@pinned
def test_blackwell_decodes_without_tensor_memory():
    record = record_of("sm_100", "bf16 int4 g128 M16")
    assert failures(record) == []
    assert record.lane_instructions_per_weight <= 2.4
