"""Finds a kernel's main loop and says what each of its instructions is there for.

The main loop is the innermost loop with matrix instructions (with most float instructions, where there
are none). An instruction belongs to a class by what it is and by where its result goes, followed through
registers, around the loop's back edge as well:

    matrix    the matrix unit's own instructions (fp32 without such a unit: its multiply-adds)
    memory    loads, stores and asynchronous copies
    address   integer instructions whose results reach an address
    unpack    other integer instructions, and integer to float, whose results reach a product
    scale     float arithmetic: scale and min, wherever they are applied, taking them to fp32, and rounding
    other     loop control, barriers, waits, constants and copies of registers
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from woq_triton.audit.instructions import Instruction, Program

CLASSES = ("unpack", "scale", "matrix", "memory", "address", "other")


@dataclass(frozen=True)
class MainLoop:
    """The instructions of one iteration, and the class of each.

    Attributes:
        instructions: From the loop's label to its back edge.
        classes: Class of each instruction.
        looped: False where the program has no loop and `instructions` is all of it.
    """

    instructions: tuple[Instruction, ...]
    classes: tuple[str, ...]
    looped: bool

    def count(self, classes: Iterable[str] = CLASSES) -> int:
        """Instructions of these classes that a warp issues, scalar ones aside."""
        wanted = set(classes)
        pairs = zip(self.instructions, self.classes, strict=True)
        return sum(kind in wanted and not instruction.scalar for instruction, kind in pairs)

    def by_class(self) -> dict[str, int]:
        """How many instructions there are of each class."""
        return {name: self.count([name]) for name in CLASSES}

    def pipe(self, name: str) -> int:
        """Instructions that need one execution pipe."""
        return sum(instruction.pipe == name for instruction in self.instructions)

    def products(self) -> int:
        """Matrix instructions, or where there are none the multiply-adds of a lane."""
        matrix = sum(instruction.kind == "matrix" for instruction in self.instructions)
        return matrix or sum(_multiply_adds(instruction.name) for instruction in self.instructions)

    def matrix(self) -> dict[str, int]:
        """Matrix instructions by name."""
        names = [instruction.name for instruction in self.instructions if instruction.kind == "matrix"]
        return dict(sorted(Counter(names).items()))

    def weight_stores(self) -> int:
        """Stores to shared memory of values that this loop took out of packed words.

        Pairing two 16-bit values does not count as taking apart: activations are stored so as well.
        """
        graph = _Graph(self.instructions)
        count = 0
        for index, instruction in enumerate(self.instructions):
            if instruction.stores_shared:
                sources = graph.backward((index, register) for register in instruction.uses)
                count += any(
                    self.classes[source] == "unpack" and self.instructions[source].kind != "arrange"
                    for source in sources
                )
        return count


def find_main_loop(program: Program, looped: bool = True) -> MainLoop:
    """The innermost loop with most matrix instructions, or all of a program without one.

    Args:
        program: The disassembled kernel.
        looped: Whether the source has a main loop. Without one, machine loops only wait or retry.
    """
    spans = []
    for index, instruction in enumerate(program.instructions):
        start = program.labels.get(instruction.target)
        if looped and start is not None and start < index:
            spans.append((start, index + 1))
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]

    def weight(span: tuple[int, int]) -> tuple[int, int]:
        kinds = Counter(instruction.kind for instruction in program.instructions[slice(*span)])
        return kinds["matrix"], kinds["float"]

    # A loop around the matrix instructions may hold small loops that wait: it is then the main one.
    matrix = [span for span in spans if weight(span)[0]]
    candidates = [
        span
        for span in matrix
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in matrix)
    ]
    whole = (0, len(program.instructions))
    if not weight(whole)[0]:
        candidates = [span for span in inner if weight(span)[1]]
    best = max(candidates, key=weight, default=whole)
    body = program.instructions[slice(*best)]
    return MainLoop(body, _classify(body), looped=best != whole)


class _Graph:
    """Who defines what each instruction reads, in a loop body that runs again and again."""

    def __init__(self, body: tuple[Instruction, ...]) -> None:
        self.body = body
        self.writers: dict[str, list[int]] = {}
        for index, instruction in enumerate(body):
            for register in instruction.defs:
                self.writers.setdefault(register, []).append(index)

    def defining(self, index: int, register: str) -> list[int]:
        """Writers that may have set a register when instruction `index` reads it."""
        writers = self.writers.get(register, [])
        earlier = [writer for writer in writers if writer < index][::-1]
        later = [writer for writer in writers if writer >= index][::-1]
        found = []
        for writer in earlier + later:
            found.append(writer)
            if not self.body[writer].predicated:
                break
        return found

    def backward(self, roots: Iterable[tuple[int, str]]) -> set[int]:
        """Instructions whose results reach a root through registers, not through memory or a product."""
        reached: set[int] = set()
        pending = [writer for root in roots for writer in self.defining(*root)]
        while pending:
            index = pending.pop()
            if index in reached:
                continue
            reached.add(index)
            if self.body[index].kind not in ("memory", "matrix"):
                for register in self.body[index].uses:
                    pending += self.defining(index, register)
        return reached


def _multiply_adds(name: str) -> int:
    """fp32 multiply-adds of a lane that an instruction does."""
    if name.startswith(("FFMA2", "v_pk_fma_f32")):
        return 2
    return int(name.startswith(("FFMA", "v_fma_f32", "v_fmac_f32")))


def _classify(body: tuple[Instruction, ...]) -> tuple[str, ...]:
    graph = _Graph(body)
    addresses = graph.backward(
        (index, register) for index, instruction in enumerate(body) for register in instruction.address
    )
    products = graph.backward(
        (index, register)
        for index, instruction in enumerate(body)
        if instruction.kind in ("matrix", "float", "convert") or instruction.stores_shared
        for register in instruction.uses
        if not register.startswith(("P", "UP"))
    )
    operands = graph.backward(
        (index, register)
        for index, instruction in enumerate(body)
        if instruction.kind == "matrix"
        for register in instruction.uses
    )
    has_matrix = any(instruction.kind == "matrix" for instruction in body)
    classes: list[str] = []
    for index, instruction in enumerate(body):
        kind = instruction.kind
        if kind in ("matrix", "memory"):
            classes.append(kind)
        elif kind == "float":
            product = _multiply_adds(instruction.name) and not has_matrix
            classes.append("matrix" if product else "scale")
        elif kind == "control":
            classes.append("other")
        elif index in addresses:
            classes.append("address")
        elif kind == "convert":
            classes.append("unpack")
        elif index in products and (kind == "widen" or (kind == "arrange" and index not in operands)):
            classes.append("scale")
        elif kind in ("integer", "arrange") and index in products:
            # What works on the bits of a result of float arithmetic rounds it.
            sources = graph.backward((index, register) for register in instruction.uses)
            rounds = any(body[source].kind == "float" for source in sources)
            classes.append("scale" if rounds else "unpack")
        else:
            classes.append("other")
    return tuple(classes)
