"""Evaluates the kernels' inline assembly in Triton's interpreter, which knows none.

So the strings that are tested are those that run on a GPU. Only what the kernels use is known:
straight-line code on 32-bit registers, each register holding ``pack`` neighbouring elements.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

_MASK = np.uint32(0xFFFFFFFF)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Any function of three bits: bit ``4a + 2b + c`` of the table."""
    result = np.zeros_like(a)
    for index in range(8):
        if int(table[0]) >> index & 1:
            terms = [v if index >> shift & 1 else ~v for v, shift in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def _halves(register: np.ndarray) -> list[np.ndarray]:
    return [(register & np.uint32(0xFFFF)).astype(np.uint16), (register >> np.uint32(16)).astype(np.uint16)]


def _fma_f16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Two fused multiply-adds; fp64 holds the exact result, which is then rounded once."""
    result = np.uint32(0)
    for shift, halves in zip((0, 16), zip(*map(_halves, (a, b, c)), strict=True), strict=True):
        x, y, z = (half.view(np.float16).astype(np.float64) for half in halves)
        half = (x * y + z).astype(np.float16)
        result = result | half.view(np.uint16).astype(np.uint32) << np.uint32(shift)
    return result


def _fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The same in bf16, which numpy does not have but torch does."""
    result = np.uint32(0)
    for shift, halves in zip((0, 16), zip(*map(_halves, (a, b, c)), strict=True), strict=True):
        wide = [(half.astype(np.uint32) << np.uint32(16)).view(np.float32) for half in halves]
        x, y, z = (value.astype(np.float64) for value in wide)
        half = torch.as_tensor(x * y + z).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        result = result | half.astype(np.uint32) << np.uint32(shift)
    return result


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    # PTX
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, shift: a >> shift,
    "lop3.b32": _lop3,
    "mov.b32": lambda a: a,
    "fma.rn.f16x2": _fma_f16x2,
    "fma.rn.bf16x2": _fma_bf16x2,
    # GCN; a shift names its distance first
    "v_and_b32": lambda a, b: a & b,
    "v_lshrrev_b32": lambda shift, a: a >> shift,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
}


def evaluate(asm: str, inputs: list[np.ndarray]) -> np.ndarray:
    """Run assembly that writes ``$0`` from ``$1``, ``$2``, … on arrays of 32-bit registers."""
    registers = {f"${i}": value for i, value in enumerate(inputs, start=1)}

    def read(operand: str) -> np.ndarray:
        if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", operand):
            return np.array([int(operand, 0)], dtype=np.uint32)
        return registers[operand]

    for statement in filter(None, (part.strip(" {}") for part in re.split(r"[;\n]", asm))):
        name, _, operands = statement.partition(" ")
        if name == ".reg":
            continue
        target, *sources = (part.strip() for part in operands.split(","))
        registers[target] = _INSTRUCTIONS[name](*map(read, sources)) & _MASK
    return registers["$0"]


class _Results:
    def __init__(self, handle: interpreter.TensorHandle) -> None:
        self._handle = handle

    def get_result(self, index: int) -> interpreter.TensorHandle:
        assert index == 0
        return self._handle


def _create_inline_asm(_self, asm, constraints, values, types, is_pure, pack):
    outputs, *inputs = constraints.split(",")
    assert outputs in ("=r", "=&r", "=v") and len(inputs) == len(values), constraints
    assert is_pure
    words = []
    for value in values:
        assert value.data.dtype == np.int16 and pack == 2, "two 16-bit elements to a register"
        words.append(np.ascontiguousarray(value.data).reshape(-1).view(np.uint32))
    result = evaluate(asm, words).view(np.int16).reshape(values[0].data.shape)
    return _Results(interpreter.TensorHandle(result, types[0].scalar))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within this context the interpreter runs inline assembly."""
    with mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", _create_inline_asm):
        yield
