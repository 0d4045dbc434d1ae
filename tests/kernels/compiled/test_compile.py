"""Every kernel compiles for every target that is promised, fits it, uses its matrix unit and its fences."""

import re
from importlib.metadata import version

import pytest
import torch

from tests.kernels.compiled.test_audit_goals import TRITON
from woq_triton.audit.chips import CHIPS
from woq_triton.audit.compilation import Compiled, compile_launch, record_launches
from woq_triton.audit.kernels import use_of
from woq_triton.audit.problems import Problem

ARCHS = ("sm_80", "sm_90", "gfx942")

# Each path and each way to unpack at least once: M, N, K, num_bits, group_size, group_dim, dtype, symmetric.
PROBLEMS = {
    "decode fp16 int4 g128": Problem(1, 4096, 4096, 4, 128, 1, "float16"),
    "decode bf16 int4 g32 symmetric": Problem(8, 4096, 4096, 4, 32, 1, "bfloat16", True),
    "decode bf16 int8 g64 M16": Problem(16, 4096, 4096, 8, 64, 1, "bfloat16"),
    "decode fp16 int8 channel": Problem(1, 4096, 4096, 8, -1, 1, "float16"),
    "decode fp32 int4 g64": Problem(1, 4096, 4096, 4, 64, 1, "float32"),
    "decode bf16 int4 dim0 g128": Problem(1, 4096, 4096, 4, 128, 0, "bfloat16"),
    "decode fp16 int8 dim0 g32 M16": Problem(16, 4096, 4096, 8, 32, 0, "float16"),
    "decode bf16 int4 g48, ragged": Problem(3, 1000, 1000, 4, 48, 1, "bfloat16"),
    "decode fp16 int4 dim0 g10, ragged": Problem(3, 1000, 1000, 4, 10, 0, "float16"),
    "gemm bf16 int4 g128 M32": Problem(32, 4096, 4096, 4, 128, 1, "bfloat16"),
    "gemm fp16 int8 g64 M64": Problem(64, 4096, 4096, 8, 64, 1, "float16"),
    "gemm bf16 int4 dim0 g128 M256": Problem(256, 4096, 4096, 4, 128, 0, "bfloat16"),
    "gemm fp32 int4 g128 M64": Problem(64, 4096, 4096, 4, 128, 1, "float32"),
}

MOST_SPILLS = 0 if version("triton") == TRITON else 8
"""Tiles are chosen for the pinned version; code of another may lack a few registers (3.6: 7 at most here)."""

MATRIX = re.compile(r"\b(HMMA|HGMMA|v_mfma_f32)")


def compiled(problem: Problem, arch: str, **changes) -> Compiled:
    return compile_launch(use_of(problem, arch, changes).launch, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_compiles_fits_and_uses_the_matrix_unit(name, arch):
    problem, chip = PROBLEMS[name], CHIPS[arch]
    kernel = compiled(problem, arch)
    assert kernel.spills <= MOST_SPILLS
    assert chip.resident_programs(kernel.registers, kernel.shared_bytes, kernel.num_warps) >= 1
    if problem.dtype != "float32":
        assert MATRIX.search(kernel.assembly)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("ids", [None, torch.int64])
def test_dequantize_and_gather_compile(ids, arch):
    from woq_triton_kernels.dequantize import dequantize_launch

    def empty(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    row_ids = None if ids is None else empty(4096, dtype=ids)
    packed = empty(4096, 1024, dtype=torch.int16)
    metadata = empty(4096, 32, dtype=torch.bfloat16)
    out = empty(4096, 4096, dtype=torch.bfloat16)
    (launch,) = record_launches(
        lambda: dequantize_launch(row_ids, packed, metadata, metadata, out, 4, 128, 1).run(), arch
    )
    assert compile_launch(launch, arch).spills == 0


def position(lines: list[str], pattern: str, start: int = 0, stop: int | None = None) -> int:
    """Index of the only line that matches between two lines."""
    found = [i for i, line in enumerate(lines[:stop]) if i >= start and re.search(pattern, line)]
    assert len(found) == 1, f"{pattern}: {len(found)} matches"
    return found[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_device_wide_fence_stands_between_partials_and_ticket(arch):
    """All threads' stores, a barrier, then in the thread that draws the ticket a fence, then the ticket."""
    lines = compiled(PROBLEMS["decode fp16 int4 g128"], arch, split_k=4).assembly.splitlines()
    ticket = position(lines, r"\bATOMG\b")
    last_store = max(i for i, line in enumerate(lines[:ticket]) if re.search(r"\bSTG\b", line))
    barrier = position(lines, r"\bBAR\.SYNC", last_store, ticket)
    assert barrier < position(lines, r"\bMEMBAR\.\w+\.GPU", last_store, ticket)
    # Others' partials are read past the first-level cache, and only after the ticket.
    reads = [i for i, line in enumerate(lines) if re.search(r"\bLDG\b.*STRONG\.GPU", line)]
    assert reads and min(reads) > ticket


def test_each_wave_waits_for_its_stores_before_the_ticket_on_amd():
    lines = compiled(PROBLEMS["decode fp16 int4 g128"], "gfx942", split_k=4).assembly.splitlines()
    ticket = position(lines, r"\bglobal_atomic_add\b")
    last_store = max(
        i for i, line in enumerate(lines[:ticket]) if re.search(r"\b(global|buffer)_store", line)
    )
    barrier = position(lines, r"\bs_barrier\b", last_store, ticket)
    position(lines, r"s_waitcnt vmcnt\(0\)", last_store, barrier)
    assert barrier < position(lines, r"\bbuffer_wbl2 sc1\b", last_store, ticket)
