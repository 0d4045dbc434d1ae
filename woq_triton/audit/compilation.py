"""Compiles kernels for a GPU that is not there.

`record_launches` runs a launcher on tensors without data (torch's "meta" device) and keeps what each
launch would have compiled: Triton's own specialization of the real arguments, so that the audit sees
the very kernels that a GPU would run, and a launcher may change without the audit knowing.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


class AuditError(RuntimeError):
    """The audit cannot do what was asked; the message says what would help."""


@dataclass(frozen=True)
class Launch:
    """What one kernel launch compiles.

    Attributes:
        function: The `triton.jit` function.
        signature: Type of each argument by name; "constexpr" for compile-time ones.
        constants: Values of compile-time arguments by position.
        attributes: What is known of the others: divisibility by 16.
        options: num_warps, num_stages and the like.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.function.__name__)

    @property
    def key(self) -> str:
        """Equal for launches that share a compiled kernel."""
        parts = (self.name, self.signature, self.constants, self.attributes, self.options)
        return repr(parts)


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture.

    Attributes:
        launch: What it was compiled from.
        arch: "sm_90", "gfx942" and the like.
        assembly: Disassembled machine code.
        ttgir: Triton's GPU IR.
        registers: Registers of a lane.
        spills: Loads and stores by which registers are spilled.
        shared_bytes: Shared memory of a program.
        tensor_columns: Columns of tensor memory of a program; 0 where it takes none.
        num_warps: Warps of a program.
    """

    launch: Launch
    arch: str
    assembly: str
    ttgir: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_columns: int
    num_warps: int


def target_of(arch: str) -> Any:
    """Triton's target for an architecture name.

    Raises:
        AuditError: The name is none that Triton compiles for.
    """
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d+)a?", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise AuditError(f"unknown architecture {arch!r}: use sm_80, sm_90, sm_100, gfx942 or the like")


class _OfflineDriver:
    """Stands where Triton asks about the current device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> str:
        return f"{self.target.backend} {self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextlib.contextmanager
def _recording(arch: str, launches: list[Launch]) -> Iterator[None]:
    import triton
    from triton.runtime.driver import driver

    def keep(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        known = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion", "launch_cooperative_grid")
        found = json.loads(compile["specialization_data"])["options"]
        options = {name: found[name] for name in (*known, "maxnreg") if found.get(name) is not None}
        launches.append(
            Launch(
                fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options
            )
        )
        return True  # Do not compile, do not launch.

    earlier_driver, earlier_hook = driver._active, triton.knobs.runtime.jit_cache_hook
    driver.set_active(_OfflineDriver(target_of(arch)))
    triton.knobs.runtime.jit_cache_hook = keep
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = earlier_hook
        driver._active = earlier_driver


def record_launches(run: Callable[[], object], arch: str) -> list[Launch]:
    """The kernels that calling `run` would launch on an architecture, in order; none is compiled.

    Raises:
        AuditError: Triton is not installed, or runs in its interpreter.
    """
    try:
        import triton
    except ModuleNotFoundError as error:
        raise AuditError("the audit needs Triton: pip install 'woq_triton[triton]'") from error
    if triton.knobs.runtime.interpret:
        raise AuditError("the audit compiles kernels, which TRITON_INTERPRET=1 prevents: unset it")
    launches: list[Launch] = []
    with _recording(arch, launches):
        run()
    return launches


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compile for an architecture and disassemble.

    Raises:
        AuditError: The compiler refuses, or the disassembler is missing.
    """
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    target = target_of(arch)
    try:
        kernel = triton.compile(source, target=target, options=launch.options)
    except Exception as error:
        raise AuditError(f"{launch.name} does not compile for {arch}: {error}") from error
    ttgir = str(kernel.asm["ttgir"])
    num_warps = int(kernel.metadata.num_warps)
    shared = int(kernel.metadata.shared)
    tensor = int(getattr(kernel.metadata, "tmem_size", 0))
    if target.backend == "hip":
        from woq_triton.audit.amdgcn import resources

        assembly = str(kernel.asm["amdgcn"])
        found = resources(assembly)
        registers, spills = found["vgprs"], found["vgpr_spills"]
        return Compiled(launch, arch, assembly, ttgir, registers, spills, shared, tensor, num_warps)
    assembly, registers = disassemble(kernel.asm["cubin"])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    return Compiled(launch, arch, assembly, ttgir, registers, spills, shared, tensor, num_warps)


def disassemble(cubin: bytes) -> tuple[str, int]:
    """SASS of a cubin, and the registers of a lane."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        text = _run(_tool("nvdisasm"), "-c", path)
        usage = _run(_tool("cuobjdump"), "-res-usage", path)
    registers = re.search(r"\bREG:(\d+)", usage)
    if registers is None:
        raise AuditError(f"cuobjdump does not state the register count: {usage.strip()!r}")
    return text, int(registers[1])


@functools.cache
def _tool(name: str) -> str:
    import triton

    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    if not os.path.exists(path):
        raise AuditError(f"Triton's package lacks {name} ({path})")
    return path


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise AuditError(f"{os.path.basename(command[0])} failed: {result.stderr.strip()}")
    return result.stdout
