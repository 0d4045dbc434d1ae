"""Reads from Triton's GPU IR what machine code no longer tells: shapes.

The main loop of the IR (the innermost ``scf.for`` with products, else with loads, else the whole kernel)
says how many packed words one iteration loads and which products it makes. The number of machine
instructions that those products need is then compared with the number in the machine loop: it tells how
many iterations the compilers below unrolled into one.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_DOT = re.compile(
    r"(tt\.dot|warp_group_dot|tc_gen5_mma)\b.*?: *(?:tensor|!ttg\.memdesc)<(\d+)x(\d+)x(\w+).*?"
    r"\* *(?:tensor|!ttg\.memdesc)<(\d+)x(\d+)x.*?-> *(?:tensor|!ttg\.memdesc)<\d+x\d+x\w+, *#(\w+)"
)
_GEN5 = re.compile(r"tc_gen5_mma\b.*?: *!ttg\.memdesc<(\d+)x(\d+)x(\w+).*?!ttg\.memdesc<(\d+)x(\d+)x")
_LOAD = re.compile(
    r"(?:tt\.load|buffer_load|async_copy_global_to_local|buffer_load_to_local)\b"
    r".*?: *(?:\(?)tensor<([\dx]+)x(?:!tt\.ptr<)?(\w+)"
)
_BUFFER_LOAD = re.compile(r"amdg\.buffer_load\b.*: *tensor<([\dx]+)x(\w+)")
_LAYOUT = re.compile(r"^#(\w+) = #ttg\.(nvidia_mma|amd_mfma|blocked)<\{(.*)\}>", re.MULTILINE)


@dataclass(frozen=True)
class Loop:
    """One iteration of the main loop as Triton's IR has it.

    Attributes:
        packed_words: Integers that an iteration loads, all programs' lanes together.
        word_bits: Bits of each of them.
        matrix_instructions: Matrix instructions that a warp needs for an iteration's products; for
            products without a matrix unit, multiply-adds a lane. 0 without products.
        prefetched: How many iterations' packed words are loaded before the loop starts.
        looped: Whether there is a loop.
    """

    packed_words: int
    word_bits: int
    matrix_instructions: int
    prefetched: int
    looped: bool


def read(text: str) -> Loop:
    """Read the main loop out of a kernel's TTGIR."""
    layouts = {name: (kind, fields) for name, kind, fields in _LAYOUT.findall(text)}
    lines = text.splitlines()
    loops = _loops(lines)
    inner = _innermost(loops, lines, _is_product) or _innermost(loops, lines, _integer_load)
    weigh = {span: sum(_is_product(line) for line in lines[slice(*span)]) for span in inner}
    start, end = max(inner, key=lambda span: weigh[span], default=(0, len(lines)))
    body = lines[start:end]
    loads = [load for line in body if (load := _integer_load(line))]
    words = sum(count for count, _ in loads)
    bits = max((bits for _, bits in loads), default=0)
    before = sum(count for line in lines[:start] if (load := _integer_load(line)) for count in load[:1])
    return Loop(
        packed_words=words,
        word_bits=bits,
        matrix_instructions=sum(_instructions_of(line, layouts) for line in body),
        prefetched=round(before / words) if words and start else 0,
        looped=bool(start),
    )


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """First and last+1 line of each ``scf.for``: it ends at the brace that stands below its beginning."""
    spans = []
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        closing = line[: len(line) - len(line.lstrip())] + "}"
        for end in range(start + 1, len(lines)):
            if lines[end].startswith(closing):
                spans.append((start, end + 1))
                break
    return spans


def _innermost(
    loops: list[tuple[int, int]], lines: list[str], wanted: Callable[[str], object]
) -> list[tuple[int, int]]:
    """Loops with a line that is wanted, but no smaller such loop inside."""
    found = [span for span in loops if any(wanted(line) for line in lines[slice(*span)])]
    return [
        span
        for span in found
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in found)
    ]


def _is_product(line: str) -> bool:
    return bool(_DOT.search(line) or _GEN5.search(line))


def _integer_load(line: str) -> tuple[int, int] | None:
    """Elements and bits of a load of integers that are no pointers, or None."""
    match = _BUFFER_LOAD.search(line) or _LOAD.search(line)
    if match is None or not re.fullmatch(r"i(8|16|32)", match[2]):
        return None
    return math.prod(int(size) for size in match[1].split("x")), int(match[2][1:])


def _numbers(fields: str, name: str) -> list[int]:
    match = re.search(rf"\b{name} = \[([\d, ]*)\]", fields)
    return [int(number) for number in match[1].split(",")] if match else []


def _instructions_of(line: str, layouts: dict[str, tuple[str, str]]) -> int:
    """Matrix instructions (multiply-adds) that one product takes a warp (lane)."""
    if gen5 := _GEN5.search(line):
        m, k, _, _, n = gen5.groups()
        return math.ceil(int(m) / 128) * math.ceil(int(n) / 256) * math.ceil(int(k) / 16)
    match = _DOT.search(line)
    if match is None:
        return 0
    m, k, n = int(match[2]), int(match[3]), int(match[6])
    kind, fields = layouts.get(match[7], ("", ""))
    if kind == "blocked":
        spans = [
            size * threads * warps
            for size, threads, warps in zip(
                _numbers(fields, "sizePerThread"),
                _numbers(fields, "threadsPerWarp"),
                _numbers(fields, "warpsPerCTA"),
                strict=True,
            )
        ]
        each = _numbers(fields, "sizePerThread")
        return (
            math.prod(math.ceil(size / span) * e for size, span, e in zip((m, n), spans, each, strict=True))
            * k
        )
    shape, warps = _numbers(fields, "instrShape"), _numbers(fields, "warpsPerCTA")
    if not shape:
        return 0
    bits = {"f32": 32, "bf16": 16, "f16": 16, "i8": 8}.get(match[4], 8)
    if kind == "amd_mfma":
        depth = shape[2] if len(shape) > 2 else {32: 8, 16: 16, 4: 4}[shape[0]]
    else:
        depth = shape[2] if len(shape) > 2 else 256 // bits
    return math.ceil(m / (shape[0] * warps[0])) * math.ceil(n / (shape[1] * warps[1])) * math.ceil(k / depth)
