"""The audit's table and JSON."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from woq_triton.audit.chips import CHIPS
from woq_triton.audit.compilation import AuditError
from woq_triton.audit.goals import failures
from woq_triton.audit.mainloop import CLASSES
from woq_triton.audit.record import Record

_HEADER = (
    "arch  M dtype bits group dim kernel tile split programs fill% warps stages regs spill shared res "
    "matrix left 16B% wstore lanes/w " + " ".join(CLASSES) + " budget bound pred% goals"
).split()


def _row(record: Record) -> list[str]:
    problem, config = record.problem, record.config
    matrix = "+".join(f"{count}x{name}" for name, count in record.matrix.items()) or "-"
    return [
        record.arch,
        str(problem["M"]),
        {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[problem["dtype"]],
        str(problem["num_bits"]),
        "all" if problem["group_size"] < 0 else str(problem["group_size"]),
        str(problem["group_dim"]),
        str(config.get("kernel", record.kernel)),
        f"{config.get('block_m', '-')}x{config.get('block_n', '-')}",
        str(config.get("split_k", "-")),
        str(record.programs),
        f"{100 * record.fill:.0f}",
        str(config.get("num_warps", "-")),
        str(config.get("num_stages", "-")),
        str(record.registers),
        str(record.spills),
        str(record.shared_bytes),
        str(record.resident_programs),
        matrix,
        record.weight_operand or "-",
        f"{100 * record.share_16_byte:.0f}",
        str(record.weight_stores),
        f"{record.lane_instructions_per_weight:.2f}",
        *(f"{record.classes[name]:.2f}" for name in CLASSES),
        f"{record.issue_budget:.1f}",
        record.predicted_bound,
        f"{100 * record.predicted_fraction:.0f}",
        "; ".join(failures(record)) or "met",
    ]


def table(records: Sequence[Record]) -> str:
    """One line a compiled kernel, then one an architecture, then what the columns mean for each chip."""
    rows = [_HEADER, *(_row(record) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "-" * min(len(lines[0]), 200))
    archs = sorted({record.arch for record in records})
    return "\n".join([*lines, "", *(_summary(records, arch) for arch in archs), "", *legend(archs)])


def _summary(records: Sequence[Record], arch: str) -> str:
    """One line on all kernels of an architecture."""
    own = [record for record in records if record.arch == arch]
    missing = sum(bool(failures(record)) for record in own)
    lanes = [record.lane_instructions_per_weight for record in own]
    return (
        f"{arch}: {len(own)} kernels for {sum(record.problems for record in own)} problems, "
        f"{min(lanes):.2f} to {max(lanes):.2f} lane-instructions per weight, {missing} miss a goal"
    )


def legend(archs: Iterable[str]) -> list[str]:
    """The budget's formula with each chip's numbers and their source."""
    lines = [
        "lanes/w: lane-instructions per weight in the main loop, then by class; "
        "res: programs a processor holds;",
        "pred%: predicted share of memory bandwidth, a bound and not a measurement;",
        "budget = lanes * bytes_per_weight / (bandwidth / (processors * clock)):",
    ]
    for arch in archs:
        chip = CHIPS[arch]
        lines.append(
            f"  {arch} {chip.name}: {chip.lanes} lanes, {chip.bandwidth / 1e12:.3g} TB/s, {chip.processors} "
            f"processors, {chip.clock / 1e9:.3g} GHz; {chip.bytes_needed_in_flight() / 1024:.0f} KiB in "
            f"flight a processor ({chip.source})"
        )
    return lines


def to_json(records: Sequence[Record]) -> str:
    """A list of records, each with the goals that it misses."""
    return json.dumps([{**record.to_dict(), "misses": failures(record)} for record in records], indent=1)


def write_json(records: Sequence[Record], path: Path) -> None:
    """Write the records to a file.

    Raises:
        AuditError: It cannot be written.
    """
    try:
        path.write_text(to_json(records) + "\n")
    except OSError as error:
        raise AuditError(f"cannot write {path}: {error}") from error
