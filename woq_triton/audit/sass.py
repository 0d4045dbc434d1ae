"""Reads NVIDIA machine code (SASS) as ``nvdisasm -c`` prints it.

SASS has no public specification beyond the list of names in NVIDIA's "CUDA Binary Utilities". What
matters here is regular: results come first, a predicate in front of the name makes an instruction
conditional, brackets hold addresses, and ``.64`` or ``.128`` say how many registers an operand spans.
"""

import re

from woq_triton.audit.instructions import Instruction, Kind, Program, split_operands

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)\b(\.64)?")

_CONTROL = (
    "BAR BRA BRX BREAK BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ELECT ERRBAR EXIT FENCE JMP MEMBAR NANOSLEEP "
    "NOP RET SYNCS UCGABAR WARPGROUP WARPSYNC YIELD ACQBULK ENDCOLLECTIVE USETMAXREG UTCBAR UTCATOMSWS"
).split()
_MEMORY = (
    "LD LDG LDGSTS LDS LDSM LDL LDGDEPBAR ST STG STS STSM STL RED REDG ATOM ATOMG ATOMS UTMALDG UTMASTG "
    "UTMAPF UBLKCP UBLKPF LDTM STTM UTCCP ARRIVES"
).split()
_NO_RESULT = ("ST", "RED", "LDGSTS", "UTMA", "UBLK", "BAR", "BRA", "EXIT", "STTM")
_MOVES = ("MOV", "UMOV", "CS2R", "R2UR", "UR2R")
_ALU = (
    "LOP3 SHF SHL SHR PRMT IADD3 IADD VIADD VIMNMX VIADDMNMX ISETP FSETP FMNMX SEL FSEL LEA MOV BFE BMSK "
    "SGXT IMNMX PLOP3 I2FP F2FP IABS POPC FLO VOTE LOP"
).split()


def parse(text: str) -> Program:
    """Parse what ``nvdisasm -c`` printed for a cubin with one kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _LINE.match(line):
            instructions.append(_instruction(match[1] or "", match[2], match[3].replace(".reuse", "")))
    return Program(tuple(instructions), labels)


def _instruction(predicate: str, name: str, text: str) -> Instruction:
    base, *modifiers = name.split(".")
    operands = split_operands(text)
    kind = _kind(base, modifiers, operands)
    results = _result_count(base, operands)
    defs: set[str] = set()
    for operand in operands[:results]:
        defs |= _registers(operand, _result_width(base, modifiers))
    uses: set[str] = set()
    address: set[str] = set()
    for position, operand in enumerate(operands[results:]):
        inside = "".join(re.findall(r"\[[^\]]*\]", operand))
        address |= _registers(inside, 2 if "desc" in operand else 1)
        uses |= _registers(
            re.sub(r"\[[^\]]*\]", "", operand), _source_width(base, modifiers, position, operand)
        )
    if base == "PRMT" and operands[2] in ("0x7610", "0x7632") and operands[3] == operands[0]:
        # A 16-bit value goes into the lower half; that the upper half stays means nothing.
        uses -= defs
    uses |= _registers(predicate, 1)
    target = re.search(r"`\((\S+)\)", text)
    return Instruction(
        text=f"{'@' + predicate + ' ' if predicate else ''}{name} {text}".strip(),
        name=name,
        kind=kind,
        defs=frozenset(defs),
        uses=frozenset(uses),
        address=frozenset(address),
        predicated=bool(predicate),
        target=target[1] if target and base == "BRA" else "",
        loads=_bytes(modifiers) if base in ("LDG", "LDGSTS", "LD") else 0,
        stores_shared=base in ("STS", "STSM", "STTM"),
        spill=base in ("LDL", "STL"),
        pipe=_pipe(base),
        left=_left(base, operands) if kind == "matrix" else "",
    )


def _kind(base: str, modifiers: list[str], operands: list[str]) -> Kind:
    if base.endswith("MMA") and not modifiers[:1] == ["MMA"]:
        return "matrix"
    if base in _CONTROL:
        return "control"
    if base in _MEMORY:
        return "memory"
    sources = operands[1:]
    if base in _MOVES or (base in ("IMAD", "HFMA2") and all(_is_zero(source) for source in sources[:2])):
        return "move"
    if base in ("I2F", "I2FP", "U2F"):
        return "convert"
    if base.startswith(("F2", "MUFU")) or re.fullmatch(
        r"U?[FHD](ADD|MUL|FMA|SEL|MNMX|SETP?|SET|CHK|SWZADD)2?", base
    ):
        return "float"
    if _widens(base, modifiers, sources):
        return "widen"
    return "arrange" if base == "PRMT" else "integer"


def _is_zero(operand: str) -> bool:
    return operand.strip("-") in ("RZ", "URZ")


def _widens(base: str, modifiers: list[str], sources: list[str]) -> bool:
    """Whether this is a bf16 number extended to fp32, its bits moved to the upper half."""
    if base == "IMAD":
        return len(sources) == 3 and sources[1] == "0x10000" and _is_zero(sources[2])
    if base in ("SHL", "SHF") and sources:
        return "L" in (base[-1], *modifiers[:1]) and "0x10" in sources
    if base == "PRMT":
        return sources[1:] in (["0x5410", "RZ"], ["0x7610", "RZ"], ["0x7632", "RZ"]) or (
            len(sources) == 3 and _is_zero(sources[0])
        )
    return base == "LOP3" and "0xffff0000" in sources


def _pipe(base: str) -> str:
    if base in _ALU:
        return "alu"
    if base in ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HMUL2", "HFMA2", "FADD2", "FMUL2", "FFMA2"):
        return "fma"
    return ""


def _left(base: str, operands: list[str]) -> str:
    if base.startswith("UTC"):
        return "tensor" if operands and operands[0].startswith("tmem") else "shared"
    return "registers" if len(operands) > 1 and re.match(r"R\d", operands[1]) else "shared"


def _bytes(modifiers: list[str]) -> int:
    for modifier in modifiers:
        if modifier in ("64", "128", "256"):
            return int(modifier) // 8
        if modifier in ("U8", "S8"):
            return 1
        if modifier in ("U16", "S16"):
            return 2
    return 4


def _result_count(base: str, operands: list[str]) -> int:
    """How many operands, from the first on, are written: predicates, one register, more predicates."""
    if base.startswith(_NO_RESULT) or base in _CONTROL:
        return 0
    if base.endswith(("SETP", "SETP2", "PLOP3")):
        return min(2, len(operands))
    count = 0
    while count < len(operands) and re.fullmatch(r"U?P[T\d]", operands[count]):
        count += 1
    count += 1
    while count < len(operands) and re.fullmatch(r"U?P\d", operands[count]):
        count += 1
    return min(count, len(operands))


def _shape(modifiers: list[str]) -> tuple[int, int]:
    """N and K of a warp group's matrix instruction, as in ``64x8x16``."""
    for modifier in modifiers:
        if match := re.fullmatch(r"64x(\d+)x(\d+)", modifier):
            return int(match[1]), int(match[2])
    return 8, 16


def _result_width(base: str, modifiers: list[str]) -> int:
    if base.endswith("GMMA"):
        return _shape(modifiers)[0] // (2 if "F32" in modifiers else 4)
    if base.endswith("MMA"):
        return 4 if "F32" in modifiers or base == "IMMA" else 2
    if base in ("LDSM", "LDTM"):
        for modifier in modifiers:
            if match := re.fullmatch(r"x?(\d+)", modifier):
                if match[1] != "16" or base == "LDTM":
                    return int(match[1])
        return 1
    if base.startswith(("LD", "ULD", "ATOM")):
        return max(1, _bytes(modifiers) // 4)
    if "WIDE" in modifiers or "64" in modifiers or (base == "CS2R" and "32" not in modifiers):
        return 2
    return 2 if base in ("FADD2", "FMUL2", "FFMA2") or base.startswith("D") else 1


def _source_width(base: str, modifiers: list[str], position: int, operand: str) -> int:
    if ".64" in operand:
        return 2
    if base.endswith("GMMA"):
        return (4, 1, _result_width(base, modifiers))[min(position, 2)]
    if base.endswith("MMA"):
        wide = any(modifier in ("16816", "16832", "16864") for modifier in modifiers) or (
            "TF32" in modifiers and "1688" in modifiers
        )
        return ((4, 2) if wide else (2, 1))[position] if position < 2 else _result_width(base, modifiers)
    if base in ("STS", "STG", "ST", "STL"):
        return max(1, _bytes(modifiers) // 4)
    if base in ("STSM", "STTM"):
        counts = [int(m.lstrip("x")) for m in modifiers if re.fullmatch(r"x?\d+", m) and m != "16"]
        return counts[0] if counts else 1
    if "WIDE" in modifiers:
        return 2 if position == 2 else 1
    return 2 if base in ("FADD2", "FMUL2", "FFMA2") or base.startswith("D") else 1


def _registers(operand: str, width: int) -> set[str]:
    """Registers that an operand names, `width` in a row from each."""
    found: set[str] = set()
    for file, number, wide in _REGISTER.findall(operand):
        span = 1 if file.endswith("P") else max(width, 2 if wide else 1)
        found |= {f"{file}{int(number) + offset}" for offset in range(span)}
    return found
