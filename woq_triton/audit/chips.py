"""The chips that the audit predicts for, and what bounds a kernel on them.

A weight-only matrix product at small M reads every packed weight once and does little else. Per weight
it needs

    memory     bytes / bandwidth                                   bytes: packed code, share of scale and min
    issue      lane-instructions / (lanes * processors * clock)    one instruction a scheduler and cycle
    pipes      of these, integer ones / (alu_lanes * ...), multiply-adds / (fma_lanes * ...)
    tensor     2 * BLOCK_M operations / matrix rate

and takes the longest of them, if they overlap perfectly. The **issue budget** is the number of
lane-instructions per weight at which issue takes as long as memory:

    budget = lanes * bytes / (bandwidth / (processors * clock))

These are bounds and predictions, not measurements: they leave out latency, launch, the reduction and
the last wave, and take the datasheet's bandwidth, of which copies reach about 90%.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """What bounds a kernel on one chip.

    Attributes:
        name: Product that the numbers are for.
        arch: Architecture as Triton and `pick_tile` name it.
        bandwidth: Memory bandwidth, bytes a second.
        processors: Streaming multiprocessors (compute units).
        clock: Hz, the boost clock at which the datasheet's matrix rate holds.
        lanes: Lanes that a processor's schedulers can issue for in a cycle.
        alu_lanes: Lanes of the pipe for integer and logic instructions; 0 if as wide as issue.
        fma_lanes: Lanes of the pipe for fp32 multiply-adds; 0 if as wide as issue.
        matrix_rate: Dense fp16 or bf16 operations a second of the matrix units.
        registers: 32-bit registers of a processor.
        register_unit: Registers a lane are handed out in multiples of this.
        max_registers: Registers that one lane can have.
        warp: Lanes in a warp (wave).
        max_warps: Warps that a processor holds.
        max_programs: Programs that a processor holds.
        shared: Shared memory of a processor, bytes.
        shared_program: The most that one program may have.
        shared_reserved: What the system takes of each program's share.
        source: Where the numbers are from.
    """

    name: str
    arch: str
    bandwidth: float
    processors: int
    clock: float
    lanes: int
    alu_lanes: int
    fma_lanes: int
    matrix_rate: float
    registers: int
    register_unit: int
    max_registers: int
    warp: int
    max_warps: int
    max_programs: int
    shared: int
    shared_program: int
    shared_reserved: int
    source: str

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes that memory delivers to one processor in a cycle."""
        return self.bandwidth / (self.processors * self.clock)

    def issue_budget(self, bytes_per_weight: float) -> float:
        """Lane-instructions per weight at which issue takes as long as memory."""
        return self.lanes * bytes_per_weight / self.bytes_per_cycle

    def bytes_needed_in_flight(self) -> float:
        """Bytes a processor must have under way to keep memory busy (Little's law, `LATENCY`)."""
        return self.bandwidth / self.processors * LATENCY

    def resident_programs(
        self, registers: int, shared_bytes: int, num_warps: int, tensor_columns: int = 0
    ) -> int:
        """Programs of one kernel that a processor holds at once; 0 if not even one fits."""
        if shared_bytes > self.shared_program or registers > self.max_registers:
            return 0
        unit = self.register_unit
        lane_registers = -(-max(registers, 1) // unit) * unit
        by_registers = self.registers // (lane_registers * self.warp) // num_warps
        by_shared = self.shared // max(shared_bytes + self.shared_reserved, 1)
        by_tensor = TENSOR_COLUMNS // tensor_columns if tensor_columns else self.max_programs
        return min(by_registers, by_shared, by_tensor, self.max_warps // num_warps, self.max_programs)


LATENCY = 800e-9
"""Seconds from a load to its data on a busy memory system: an assumption, about twice the latency of an
idle one (479 cycles on H100, 466 on A100: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking", 2024)."""

TENSOR_COLUMNS = 512
"""Columns of a processor's tensor memory, where there is one (PTX ISA, "Tensor Memory")."""

_GUIDE = "CUDA C++ Programming Guide, tables of compute capabilities and arithmetic throughput"
_KIB = 1024


def _nvidia(name: str, arch: str, **numbers: float | str) -> Chip:
    common = {
        "lanes": 128,
        "alu_lanes": 64,
        "fma_lanes": 128,
        "registers": 65536,
        "register_unit": 8,
        "max_registers": 255,
        "warp": 32,
        "max_warps": 64,
        "max_programs": 32,
        "shared_reserved": 1 * _KIB,
    }
    return Chip(name=name, arch=arch, **{**common, **numbers})  # type: ignore[arg-type]


CHIPS = {
    "sm_80": _nvidia(
        "A100 SXM 80GB",
        "sm_80",
        bandwidth=2.039e12,
        processors=108,
        clock=1.41e9,
        fma_lanes=64,
        matrix_rate=312e12,
        shared=164 * _KIB,
        shared_program=163 * _KIB,
        source=f"NVIDIA A100 datasheet and architecture whitepaper; {_GUIDE}",
    ),
    "sm_89": _nvidia(
        "L40S",
        "sm_89",
        bandwidth=0.864e12,
        processors=142,
        clock=2.52e9,
        matrix_rate=362e12,
        max_warps=48,
        max_programs=24,
        shared=100 * _KIB,
        shared_program=99 * _KIB,
        source=f"NVIDIA L40S datasheet, Ada architecture whitepaper; {_GUIDE}",
    ),
    "sm_90": _nvidia(
        "H200 SXM",
        "sm_90",
        bandwidth=4.8e12,
        processors=132,
        clock=1.83e9,
        matrix_rate=989e12,
        shared=228 * _KIB,
        shared_program=227 * _KIB,
        source=f"NVIDIA H200 datasheet (clock: what its matrix rate implies), Hopper whitepaper; {_GUIDE}",
    ),
    "sm_100": _nvidia(
        "B200",
        "sm_100",
        bandwidth=8.0e12,
        processors=148,
        clock=1.85e9,
        matrix_rate=2250e12,
        shared=228 * _KIB,
        shared_program=227 * _KIB,
        source=f"NVIDIA DGX B200 datasheet (clock: what its matrix rate implies); {_GUIDE}",
    ),
    "gfx942": Chip(
        name="MI300X",
        arch="gfx942",
        bandwidth=5.3e12,
        processors=304,
        clock=2.1e9,
        lanes=64,
        alu_lanes=0,
        fma_lanes=0,
        matrix_rate=1307e12,
        registers=4 * 512 * 64,
        register_unit=8,
        max_registers=512,
        warp=64,
        max_warps=32,
        max_programs=32,
        shared=64 * _KIB,
        shared_program=64 * _KIB,
        shared_reserved=0,
        source="AMD MI300X datasheet, CDNA 3 architecture whitepaper and ISA guide",
    ),
}
"""The chip that each architecture's predictions are for."""
