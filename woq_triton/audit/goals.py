"""What a decode kernel of this package must reach on sm_80 and sm_90, and what none may do."""

from woq_triton.audit.record import Record

GOAL_ARCHS = ("sm_80", "sm_90")
BF16_ALLOWANCE = 0.4


def limit(record: Record) -> float | None:
    """The most lane-instructions per weight that a record may have, or None where no goal is set.

    bf16 needs a shift for every plane after the first (fp16 for every second one), for which it is
    allowed `BF16_ALLOWANCE` more at 4 bits.
    """
    problem = record.problem
    if record.arch not in GOAL_ARCHS or problem["M"] > 16 or problem["dtype"] == "float32":
        return None
    if problem["num_bits"] == 8 or problem["group_dim"] == 0:
        return 3.0
    size = problem["group_size"]
    if size == 32:
        most = 3.0
    elif size == 64:
        most = 2.2
    else:
        most = 1.6 if problem["M"] <= 8 else 2.0
    return most + (BF16_ALLOWANCE if problem["dtype"] == "bfloat16" else 0.0)


def failures(record: Record) -> list[str]:
    """What a record misses, in words; empty if nothing."""
    found = []
    if record.spills:
        found.append(f"{record.spills} spills")
    if not record.fits:
        found.append(
            f"does not fit: {record.shared_bytes} bytes of shared memory, {record.registers} registers, "
            f"{record.tensor_columns} columns of tensor memory"
        )
    multiplies = record.config.get("kernel") != "dequantize" and record.problem["dtype"] != "float32"
    if multiplies and not record.matrix:
        found.append("no matrix instruction in its main loop")
    if record.problem["M"] > 16:
        return found
    if record.weight_stores:
        found.append(f"{record.weight_stores} stores of unpacked weights to shared memory")
    if any(name.startswith("UTC") for name in record.matrix):
        found.append("tcgen05 in a decode loop")
    if record.bytes_in_flight < record.bytes_needed:
        found.append(f"{record.bytes_in_flight} bytes in flight, {record.bytes_needed} needed")
    most = limit(record)
    if most is not None and record.lane_instructions_per_weight > most + 1e-9:
        found.append(
            f"{record.lane_instructions_per_weight:.2f} lane-instructions per weight, goal {most:.1f}"
        )
    return found
