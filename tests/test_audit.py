"""The audit's chips, problems, goals and reports."""

import dataclasses
import json
import math

import pytest

from woq_triton.audit.chips import CHIPS, LATENCY
from woq_triton.audit.compilation import AuditError, target_of
from woq_triton.audit.goals import failures, limit
from woq_triton.audit.mainloop import CLASSES
from woq_triton.audit.problems import MODELS, Problem, expand, parse_shape, shapes_of
from woq_triton.audit.record import Record
from woq_triton.audit.report import table, to_json, write_json


def test_the_issue_budget_is_what_memory_leaves_time_for():
    chip = CHIPS["sm_90"]
    # 4.8 TB/s over 132 SMs at 1.83 GHz deliver 19.9 bytes a cycle, 39.7 int4 weights; 128 lanes issue.
    assert chip.issue_budget(0.5) == pytest.approx(128 / 39.74, rel=1e-3)
    assert chip.bytes_needed_in_flight() == pytest.approx(4.8e12 / 132 * LATENCY)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        (91, 31232, 4, 5),  # 96 registers * 128 lanes: 5 of 65536
        (32, 56000, 4, 4),  # 4 * (56000 + 1024) of 233472 bytes
        (32, 0, 16, 4),  # 64 warps
        (16, 0, 1, 32),  # 32 programs
        (32, 240000, 4, 0),  # more shared memory than a program can have
    ],
)
def test_resident_programs_are_what_the_scarcest_resource_allows(registers, shared, warps, programs):
    assert CHIPS["sm_90"].resident_programs(registers, shared, warps) == programs


def test_tensor_memory_bounds_resident_programs():
    programs = [CHIPS["sm_100"].resident_programs(64, 16384, 4, columns) for columns in (0, 128, 512, 544)]
    assert programs == [8, 4, 1, 0]


def test_amd_shared_memory_bounds_resident_programs():
    assert CHIPS["gfx942"].resident_programs(118, 25600, 4) == 2
    assert CHIPS["gfx942"].resident_programs(118, 0, 4) == 4


def test_shapes_are_those_of_a_rank():
    shapes = {shape.name: (shape.N, shape.K) for shape in shapes_of(["llama-3-70b"], [1, 8])}
    assert shapes["llama-3-70b tp1 q_proj"] == (8192, 8192)
    assert shapes["llama-3-70b tp8 k_proj"] == (128, 8192)
    assert shapes["llama-3-70b tp8 o_proj"] == (8192, 1024)
    assert shapes["llama-3-70b tp8 gate_proj"] == (3584, 8192)
    assert shapes["llama-3-70b tp8 down_proj"] == (8192, 3584)
    assert shapes["llama-3-70b tp8 lm_head"] == (128256, 1024)
    assert len(shapes_of(MODELS, [1, 2, 4, 8])) == 3 * 4 * 6


def test_bytes_per_weight_include_scale_and_min():
    assert Problem(1, 4096, 4096, 4, 128).bytes_per_weight == 0.5 + 4 / 128
    assert Problem(1, 4096, 4096, 8, -1, symmetric=True).bytes_per_weight == 1 + 2 / 4096
    # The last group of a row is shorter, and has metadata like any other.
    assert Problem(1, 16, 130, 4, 128).metadata_shape == (16, 2)
    assert Problem(1, 130, 16, 4, 128, group_dim=0).metadata_shape == (2, 16)


def test_every_shape_is_combined_with_every_scheme():
    problems = list(
        expand([parse_shape("64x128")], ms=(1, 16), num_bits=(4,), group_sizes=(32, -1), group_dims=(1,))
    )
    assert len(problems) == 2 * 2 * 2
    assert {(p.M, p.N, p.K) for p in problems} == {(1, 64, 128), (16, 64, 128)}


@pytest.mark.parametrize("text", ["4096", "4096x", "0x128", "4096x-1", "axb"])
def test_a_shape_that_is_none_is_an_error(text):
    with pytest.raises(AuditError, match="OUTxIN"):
        parse_shape(text)


def test_an_unknown_model_is_an_error_that_names_the_known_ones():
    with pytest.raises(AuditError, match=r"llama-2.*llama-3-8b"):
        shapes_of(["llama-2"], [1])


def test_an_unknown_architecture_is_an_error():
    pytest.importorskip("triton")
    with pytest.raises(AuditError, match="sm_90"):
        target_of("hopper")


def a_record(**changes) -> Record:
    good = Record(
        kernel="_decode_kernel",
        arch="sm_90",
        chip="H200 SXM",
        config={"kernel": "decode", "block_m": 8, "block_n": 128, "split_k": 8},
        problem=Problem(1, 4096, 4096).to_dict(),
        problems=1,
        registers=91,
        spills=0,
        shared_bytes=31232,
        tensor_columns=0,
        fits=True,
        resident_programs=5,
        programs=256,
        fill=0.97,
        matrix={"HMMA.16816.F32": 24},
        weight_operand="registers",
        global_loads={"2": 2, "4": 4, "16": 4},
        share_16_byte=0.76,
        shared_stores=2,
        weight_stores=0,
        loop_instructions=200,
        scalar_instructions=0,
        unrolled=1,
        weights_per_thread_per_iteration=128.0,
        lane_instructions_per_weight=1.56,
        classes=dict.fromkeys(CLASSES, 0.26),
        bytes_per_weight=0.53,
        issue_budget=3.4,
        bytes_in_flight=122880,
        bytes_needed=29091,
        predicted_bound="memory",
        predicted_fraction=1.0,
    )
    return dataclasses.replace(good, **changes)


def with_problem(**changes) -> Record:
    return a_record(problem=dataclasses.replace(Problem(1, 4096, 4096), **changes).to_dict())


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 1.6),
        ({"M": 16}, 2.0),
        ({"group_size": -1}, 1.6),
        ({"group_size": 64}, 2.2),
        ({"group_size": 32}, 3.0),
        ({"dtype": "bfloat16"}, 2.0),
        ({"num_bits": 8, "dtype": "bfloat16"}, 3.0),
        ({"group_dim": 0}, 3.0),
        ({"M": 64}, None),
        ({"dtype": "float32"}, None),
    ],
)
def test_goals_are_set_by_scheme_and_rows(changes, most):
    assert limit(with_problem(**changes)) == most


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"lane_instructions_per_weight": 1.7}, "goal 1.6"),
        ({"spills": 4}, "4 spills"),
        ({"weight_stores": 8}, "stores of unpacked weights"),
        ({"fits": False}, "does not fit"),
        ({"matrix": {}}, "no matrix instruction"),
        ({"matrix": {"UTCHMMA": 8}}, "tcgen05"),
        ({"bytes_in_flight": 1024}, "in flight"),
    ],
)
def test_what_a_kernel_misses_is_said_in_words(changes, words):
    found = failures(a_record(**changes))
    assert found == [] if words is None else words in found[0]


def test_the_table_has_a_row_a_kernel_and_the_source_of_its_chips_numbers():
    text = table([a_record(), a_record(arch="sm_80", lane_instructions_per_weight=9.0)])
    assert "24xHMMA.16816.F32" in text and "goal 1.6" in text
    assert "sm_80: 1 kernels for 1 problems, 9.00 to 9.00 lane-instructions per weight, 1 miss a goal" in text
    assert "A100" in text and "H200" in text and "datasheet" in text


def test_json_is_complete_and_an_unwritable_path_is_an_error(tmp_path):
    path = tmp_path / "audit.json"
    write_json([a_record()], path)
    (record,) = json.loads(path.read_text())
    assert record["lane_instructions_per_weight"] == 1.56
    assert record["misses"] == []
    assert math.isclose(json.loads(to_json([a_record()]))[0]["fill"], 0.97)
    with pytest.raises(AuditError, match="cannot write"):
        write_json([a_record()], tmp_path / "missing" / "audit.json")
