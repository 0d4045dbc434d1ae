"""Kernels for larger M: on every chip they fit, spill nothing and keep unpacked weights in registers."""

import pytest

from woq_triton.audit.goals import failures
from woq_triton.audit.kernels import audit, plan
from woq_triton.audit.problems import Problem

PROBLEMS = {
    "bf16 int4 g128 M32": Problem(32, 4096, 4096, 4, 128, 1, "bfloat16"),
    # A tile of 128 rows, or two warps, spilled here.
    "fp16 int4 dim0 g32 M32": Problem(32, 128256, 4096, 4, 32, 0, "float16"),
    "bf16 int4 dim0 g32 M32": Problem(32, 128256, 4096, 4, 32, 0, "bfloat16"),
    "fp16 int8 g64 M64": Problem(64, 4096, 4096, 8, 64, 1, "float16"),
    "fp16 int4 g128 M256": Problem(256, 4096, 4096, 4, 128, 1, "float16"),
    # Scale and min of groups of fewer rows than a tile once took more shared memory than a chip has.
    "bf16 int8 dim0 g32 M256": Problem(256, 4096, 4096, 8, 32, 0, "bfloat16"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_for_larger_m_fits_and_spills_nothing(name, arch):
    (record,) = audit(plan([PROBLEMS[name]], [arch]), jobs=1)
    assert failures(record) == []
    if arch in ("sm_80", "sm_90"):
        assert "shared" not in record.weight_operand
        assert record.lane_instructions_per_weight < 5.0
