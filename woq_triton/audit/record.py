"""What the audit says of one compiled kernel, and the arithmetic that turns counts into predictions."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from woq_triton.audit import amdgcn, sass, ttgir
from woq_triton.audit.chips import CHIPS, Chip
from woq_triton.audit.compilation import AuditError, Compiled
from woq_triton.audit.mainloop import MainLoop, find_main_loop


@dataclass(frozen=True)
class Record:
    """One compiled kernel.

    Attributes:
        kernel: Name of the kernel.
        arch: Architecture it is compiled for.
        chip: Product that the predictions are for.
        config: The tile configuration.
        problem: The first problem that it serves.
        problems: How many of the problems asked for it serves.
        registers: Registers of a lane.
        spills: Loads and stores (AMD: registers) that spilling costs.
        shared_bytes: Shared memory of a program.
        tensor_columns: Columns of tensor memory of a program.
        fits: Whether one program fits the chip.
        resident_programs: Programs that one processor holds at once.
        programs: Programs of a launch for `problem`.
        fill: `programs` over those of as many whole rounds of all processors.
        matrix: Matrix instructions in the main loop, by name.
        weight_operand: Where matrix instructions take the left operand (the weights, in this package)
            from: "registers", "shared", "tensor" or "" without any.
        global_loads: Loads from global memory in the main loop by their width in bytes.
        share_16_byte: Share of the loop's loaded bytes that come in 16-byte loads.
        shared_stores: Stores to shared memory in the main loop.
        weight_stores: Those of them that store unpacked weights.
        loop_instructions: Instructions in the main loop that a warp issues (AMD: scalar ones aside).
        scalar_instructions: AMD's scalar ones, which issue beside the others.
        unrolled: Iterations of the source's loop in one of the machine loop (in the whole program, where
            the compiler unrolled it entirely).
        weights_per_thread_per_iteration: Weights that a program multiplies in one machine iteration,
            a thread's share.
        lane_instructions_per_weight: The quotient of the two.
        classes: The same by class.
        bytes_per_weight: Bytes that memory must deliver for a weight: its code, its share of scale and min.
        issue_budget: Lane-instructions per weight at which issue takes as long as memory.
        bytes_in_flight: Packed bytes that a processor's resident programs have under way.
        bytes_needed: Bytes that must be under way to keep memory busy.
        predicted_bound: "memory", "issue", "alu", "fma" or "tensor".
        predicted_fraction: Predicted share of memory bandwidth.
        asm: File that the assembly was saved to, or "".
    """

    kernel: str
    arch: str
    chip: str
    config: dict[str, Any]
    problem: dict[str, Any]
    problems: int
    registers: int
    spills: int
    shared_bytes: int
    tensor_columns: int
    fits: bool
    resident_programs: int
    programs: int
    fill: float
    matrix: dict[str, int]
    weight_operand: str
    global_loads: dict[str, int]
    share_16_byte: float
    shared_stores: int
    weight_stores: int
    loop_instructions: int
    scalar_instructions: int
    unrolled: int
    weights_per_thread_per_iteration: float
    lane_instructions_per_weight: float
    classes: dict[str, float]
    bytes_per_weight: float
    issue_budget: float
    bytes_in_flight: int
    bytes_needed: int
    predicted_bound: str
    predicted_fraction: float
    asm: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def measure(
    compiled: Compiled,
    *,
    num_bits: int,
    bytes_per_weight: float,
    block_m: int,
    programs: int,
    config: dict[str, Any],
    problem: dict[str, Any],
    problems: int = 1,
    weights_per_iteration: int | None = None,
) -> Record:
    """Count what a compiled kernel does in its main loop and predict what bounds it.

    Args:
        compiled: From `compile_launch`.
        num_bits: Bits of a weight's code.
        bytes_per_weight: Bytes that memory must deliver for each weight.
        block_m: Rows of x that a program multiplies each weight with.
        programs: Programs of a launch for the problem.
        config: Stated in the record.
        problem: Stated in the record.
        problems: Stated in the record.
        weights_per_iteration: Weights that a program multiplies in one iteration of the source's loop.
            By default it is counted: the bits of the integers that an iteration loads.

    Raises:
        AuditError: The architecture has no chip in `CHIPS`, or the loop cannot be counted.
    """
    chip = CHIPS.get(compiled.arch)
    if chip is None:
        raise AuditError(f"no chip known for {compiled.arch}: choose from {', '.join(CHIPS)}")
    reader = amdgcn if compiled.arch.startswith("gfx") else sass
    source = ttgir.read(compiled.ttgir)
    loop = find_main_loop(reader.parse(compiled.assembly), source.looped)
    weights = weights_per_iteration or source.packed_words * source.word_bits // num_bits
    if weights == 0:
        raise AuditError(
            f"{compiled.launch.name} for {compiled.arch} loads no packed weights in its main loop"
        )
    threads = compiled.num_warps * chip.warp
    expected = source.matrix_instructions or block_m * weights // threads
    unrolled = max(1, loop.products() // expected) if source.looped and expected else 1
    weights *= unrolled
    per_weight = threads / weights
    resident = chip.resident_programs(
        compiled.registers, compiled.shared_bytes, compiled.num_warps, compiled.tensor_columns
    )
    tile_bytes = source.packed_words * source.word_bits // 8
    loads = Counter(instruction.loads for instruction in loop.instructions if instruction.loads)
    loaded = sum(width * count for width, count in loads.items())
    bound, fraction = _predict(loop, chip, per_weight, bytes_per_weight, block_m)
    lefts = {instruction.left for instruction in loop.instructions if instruction.kind == "matrix"}
    return Record(
        kernel=compiled.launch.name,
        arch=compiled.arch,
        chip=chip.name,
        config=config,
        problem=problem,
        problems=problems,
        registers=compiled.registers,
        spills=compiled.spills,
        shared_bytes=compiled.shared_bytes,
        tensor_columns=compiled.tensor_columns,
        fits=resident > 0,
        resident_programs=resident,
        programs=programs,
        fill=round(programs / (-(-programs // chip.processors) * chip.processors), 4),
        matrix=loop.matrix(),
        weight_operand="+".join(sorted(lefts)),
        global_loads={str(width): loads[width] for width in sorted(loads)},
        share_16_byte=round(16 * loads[16] / loaded, 4) if loaded else 0.0,
        shared_stores=sum(instruction.stores_shared for instruction in loop.instructions),
        weight_stores=loop.weight_stores(),
        loop_instructions=loop.count(),
        scalar_instructions=sum(instruction.scalar for instruction in loop.instructions),
        unrolled=unrolled,
        weights_per_thread_per_iteration=1 / per_weight,
        lane_instructions_per_weight=round(loop.count() * per_weight, 4),
        classes={name: round(count * per_weight, 4) for name, count in loop.by_class().items()},
        bytes_per_weight=bytes_per_weight,
        issue_budget=round(chip.issue_budget(bytes_per_weight), 4),
        bytes_in_flight=max(source.prefetched, 1) * tile_bytes * resident,
        bytes_needed=round(chip.bytes_needed_in_flight()),
        predicted_bound=bound,
        predicted_fraction=round(fraction, 4),
    )


def _predict(
    loop: MainLoop, chip: Chip, per_weight: float, bytes_per_weight: float, block_m: int
) -> tuple[str, float]:
    """The bound that takes longest, and memory's share of its time."""
    cycles_per_second = chip.processors * chip.clock
    times = {
        "memory": bytes_per_weight / chip.bandwidth,
        "issue": loop.count() * per_weight / (chip.lanes * cycles_per_second),
        "tensor": 2 * block_m / chip.matrix_rate,
    }
    if chip.alu_lanes:
        times["alu"] = loop.pipe("alu") * per_weight / (chip.alu_lanes * cycles_per_second)
    if chip.fma_lanes:
        times["fma"] = loop.pipe("fma") * per_weight / (chip.fma_lanes * cycles_per_second)
    bound = max(times, key=lambda name: times[name])
    return bound, times["memory"] / times[bound]
