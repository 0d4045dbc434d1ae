"""Reads AMD machine code in the assembler's notation, as Triton keeps it in ``asm["amdgcn"]``.

Names say which unit executes an instruction: ``v_`` vector, ``s_`` scalar, ``ds_`` the shared memory,
``buffer_`` and ``global_`` memory. A wave's scalar instructions and waits issue beside another wave's
vector instructions (AMD, "CDNA3 Instruction Set Architecture", chapter 3) and are kept apart.
"""

import re

from woq_triton.audit.instructions import Instruction, Kind, Program, split_operands

_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b[ \t]*(.*?)(?:\s*(?:;|//).*)?$")
_LABEL = re.compile(r"^(\.?LBB\w+):")
_REGISTER = re.compile(r"\b([vsa])\[(\d+):(\d+)\]|\b([vsa])(\d+)\b|\b(vcc|scc|exec|m0)\b")
_GLOBAL = ("buffer_", "global_", "flat_")
_WIDTHS = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "byte": 1, "dword": 4}
_RESOURCES = {
    "vgprs": r"\.vgpr_count:\s*(\d+)",
    "agprs": r"\.agpr_count:\s*(\d+)",
    "vgpr_spills": r"\.vgpr_spill_count:\s*(\d+)",
    "private": r"\.private_segment_fixed_size:\s*(\d+)",
}


def parse(text: str) -> Program:
    """Parse the assembly text of one kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (match := _INSTRUCTION.match(line)) and not match[1].startswith("tmp"):
            instructions.append(_instruction(match[1], match[2].strip()))
            if match[1] == "s_endpgm":
                break
    return Program(tuple(instructions), labels)


def resources(text: str) -> dict[str, int]:
    """Registers and spills from the kernel's metadata: vgprs, agprs, vgpr_spills, private (bytes)."""
    found = {name: re.search(pattern, text) for name, pattern in _RESOURCES.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def _instruction(name: str, text: str) -> Instruction:
    operands = split_operands(text)
    memory = name.startswith((*_GLOBAL, "ds_", "s_load", "s_buffer_load", "scratch_"))
    stores = memory and ("store" in name or "write" in name)
    results = 0 if stores or name.startswith(_CONTROL) or not operands else 1
    if name.startswith(("v_add_co", "v_sub_co", "v_addc_co", "v_subb_co", "v_div_scale")):
        results = 2
    defs = set().union(*(_registers(operand) for operand in operands[:results]), set())
    if name.startswith("s_cmp"):
        defs, results = {"scc"}, 0
    elif name.startswith(("s_add", "s_sub", "s_and", "s_or", "s_lsh", "s_ash", "s_xor", "s_not", "s_bfe")):
        defs = defs | {"scc"}
    rest = operands[results:]
    uses = set().union(*(_registers(operand) for operand in rest), set())
    address: set[str] = set()
    if memory:
        # A store's data follows its address in LDS and flat instructions and precedes it in buffer ones.
        data = rest[:1] if stores and name.startswith("buffer_") else rest[1:] if stores else []
        if name.startswith("global_") and stores:
            data = rest[1:2]
        uses = set().union(*(_registers(operand) for operand in data), set())
        address = set().union(*(_registers(operand) for operand in rest), set()) - uses
    if name.startswith("s_cbranch_scc"):
        uses = {"scc"}
    elif name.startswith("s_cbranch_vcc"):
        uses = {"vcc"}
    loads = _bytes(name) if memory and "load" in name and name.startswith(_GLOBAL) else 0
    return Instruction(
        text=f"{name} {text}".strip(),
        name=name,
        kind=_kind(name, memory, operands),
        defs=frozenset(defs),
        uses=frozenset(uses),
        address=frozenset(address),
        target=text if name.startswith(("s_cbranch", "s_branch")) else "",
        loads=loads,
        stores_shared=name.startswith("ds_") and stores,
        spill=name.startswith("scratch_"),
        scalar=name.startswith("s_"),
        left="registers" if "mfma" in name else "",
    )


_CONTROL = (
    "s_cbranch",
    "s_branch",
    "s_barrier",
    "s_waitcnt",
    "s_nop",
    "s_endpgm",
    "s_sleep",
    "s_setprio",
    "s_sched",
)


def _kind(name: str, memory: bool, operands: list[str]) -> Kind:
    if "mfma" in name:
        return "matrix"
    if name.startswith(_CONTROL):
        return "control"
    if memory:
        return "memory"
    if re.match(r"[vs]_(mov|accvgpr|swap|readfirstlane|readlane|writelane)", name):
        return "move"
    if re.match(r"v_cvt_\w*f(32|16)_\w*(u|i|ubyte)\d", name):
        return "convert"
    if _FLOAT.match(name):
        return "float"
    # A bf16 number extended to fp32: its bits moved to the upper half, or the lower half cleared.
    if name.startswith("v_lshlrev_b32") and operands[1] == "16":
        return "widen"
    if name.startswith("v_and_b32") and "0xffff0000" in operands[1:]:
        return "widen"
    return "arrange" if name.startswith(("v_perm", "v_bfi", "v_pack", "v_alignb")) else "integer"


_FLOAT = re.compile(
    r"v_(cvt|(pk_)?(fma|mul|add|sub|subrev|max|min|mac|fmac|mad|dot\d)\w*_(b?f)(16|32)|(rcp|ldexp|med3)_f\d)"
)


def _bytes(name: str) -> int:
    match = re.search(r"_(ubyte|sbyte|ushort|sshort|short|byte|dword)(?:x(\d))?", name)
    return _WIDTHS[match[1]] * int(match[2] or 1) if match else 4


def _registers(operand: str) -> set[str]:
    found: set[str] = set()
    for file, first, last, single_file, single, special in _REGISTER.findall(operand):
        if special:
            found.add(special)
        elif single_file:
            found.add(single_file + single)
        else:
            found |= {f"{file}{number}" for number in range(int(first), int(last) + 1)}
    return found
