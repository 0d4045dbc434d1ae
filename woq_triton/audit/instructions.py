"""What the audit knows of one machine instruction, whichever chip it is for.

`sass` and `amdgcn` parse disassembly into these; `mainloop` finds the loop and sorts its instructions.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["matrix", "memory", "control", "float", "convert", "widen", "move", "arrange", "integer"]
"""What an instruction does by its name alone. "widen" extends a 16-bit float to 32 bits with integer
instructions; "convert" goes from integer to float; "move" copies a register or sets a constant; "arrange"
picks bytes of two registers, as in pairing two 16-bit floats."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        text: As disassembled, without its address.
        name: Name with modifiers, for instance "LDG.E.128".
        kind: What it does, by its name.
        defs: Registers written, one name each.
        uses: Registers read as data.
        address: Registers read as part of an address.
        predicated: Whether it may leave `defs` unwritten.
        target: Label it jumps to, if it does.
        loads: Bytes a lane loads from global memory; 0 if it does not.
        stores_shared: Whether it stores to memory that a program's threads share.
        spill: Whether it touches a thread's own memory, where registers are spilled to.
        scalar: Whether it has an issue port of its own beside the vector instructions (AMD's scalar unit).
        pipe: Execution pipe whose width matters beside issue: "alu", "fma" or "".
        left: Where a matrix instruction takes its left operand from: "registers", "shared" or "tensor".
    """

    text: str
    name: str
    kind: Kind
    defs: frozenset[str]
    uses: frozenset[str]
    address: frozenset[str]
    predicated: bool = False
    target: str = ""
    loads: int = 0
    stores_shared: bool = False
    spill: bool = False
    scalar: bool = False
    pipe: str = ""
    left: str = ""


@dataclass(frozen=True)
class Program:
    """A disassembled kernel.

    Attributes:
        instructions: In the order of their addresses.
        labels: Index of the instruction that each label stands before.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def split_operands(text: str) -> list[str]:
    """Operands of an instruction, split at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
