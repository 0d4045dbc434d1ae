"""This package's kernels under audit: which of them serve a problem, compiled and measured."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from woq_triton.audit.compilation import AuditError, Launch, compile_launch, record_launches
from woq_triton.audit.problems import Problem
from woq_triton.audit.record import Record, measure


@dataclass(frozen=True)
class Task:
    """A kernel to compile: the first problem that needs it, and how many do."""

    problem: Problem
    arch: str
    problems: int
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Use:
    """How the package serves a problem on an architecture.

    Attributes:
        launch: What it launches.
        config: The tile configuration, as a dict.
        block_m: Rows of x that a program multiplies each weight with; 0 if it only dequantizes.
        programs: Programs that it launches.
        bytes_per_weight: Bytes that it must move for each weight.
    """

    launch: Launch
    config: dict[str, Any]
    block_m: int
    programs: int
    bytes_per_weight: float


def use_of(problem: Problem, arch: str, changes: Mapping[str, Any] | None = None) -> Use:
    """What the package launches for a problem on an architecture.

    Args:
        problem: The product.
        arch: "sm_90", "gfx942" and the like.
        changes: Fields of the tile configuration to set instead of what `pick_tile` chose.

    Raises:
        AuditError: Triton is missing or interprets, or a field does not exist.
    """
    try:
        from woq_triton.backends.triton import dequantize, launch
        from woq_triton_kernels.tiles import DEQUANTIZE_ROWS, FUSED_MAX_M, pick_tile
    except ModuleNotFoundError as error:
        raise AuditError("the audit needs Triton: pip install 'woq_triton[triton]'") from error
    from woq_triton_kernels.layout import packed_width

    dtype = getattr(torch, problem.dtype)
    M, N, K = problem.M, problem.N, problem.K
    size = problem.resolved_group_size

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    packed = empty(N, packed_width(K, problem.num_bits), dtype=torch.int16)
    scale = empty(*problem.metadata_shape)
    minimum = None if problem.symmetric else empty(*problem.metadata_shape)
    scheme = (problem.num_bits, size, problem.group_dim)
    weight = (packed, scale, minimum)
    if M > FUSED_MAX_M:
        launches = record_launches(lambda: dequantize(*weight, *scheme, N, K, dtype), arch)
        programs = -(-N // DEQUANTIZE_ROWS) * -(-K // 128)
        moved = problem.bytes_per_weight + dtype.itemsize
        return Use(launches[0], {"kernel": "dequantize"}, 0, programs, moved)
    config = pick_tile(M, N, K, *scheme, dtype, arch)
    if changes:
        try:
            config = replace(config, **changes)
        except TypeError as error:
            raise AuditError(f"no such field of a tile: {', '.join(changes)} ({error})") from error
    x, out = empty(M, K), empty(M, N)
    launches = record_launches(lambda: launch(x, *weight, None, out, *scheme, config), arch)
    programs = -(-M // config.block_m) * -(-N // config.block_n) * config.split_k
    return Use(launches[0], config.to_dict(), config.block_m, programs, problem.bytes_per_weight)


def plan(
    problems: Iterable[Problem], archs: Iterable[str], changes: Mapping[str, Any] | None = None
) -> list[Task]:
    """The distinct kernels that the problems need, each once an architecture."""
    problems = list(problems)
    tasks: dict[tuple[str, str], Task] = {}
    for arch in archs:
        for problem in problems:
            key = use_of(problem, arch, changes).launch.key
            known = tasks.get((arch, key))
            if known is None:
                tasks[arch, key] = Task(problem, arch, 1, tuple((changes or {}).items()))
            else:
                tasks[arch, key] = replace(known, problems=known.problems + 1)
    return list(tasks.values())


def audit_task(task: Task, asm_folder: str | None = None) -> Record:
    """Compile and measure one kernel; its assembly goes to a file in `asm_folder`, if given."""
    problem = task.problem
    use = use_of(problem, task.arch, dict(task.changes))
    compiled = compile_launch(use.launch, task.arch)
    record = measure(
        compiled,
        num_bits=problem.num_bits,
        bytes_per_weight=use.bytes_per_weight,
        block_m=use.block_m,
        programs=use.programs,
        config=use.config,
        problem=problem.to_dict(),
        problems=task.problems,
    )
    if asm_folder is None:
        return record
    path = Path(asm_folder) / f"{_file_name(problem, task.arch, use.config)}.asm"
    path.write_text(compiled.assembly)
    return replace(record, asm=str(path))


def _file_name(problem: Problem, arch: str, config: dict[str, Any]) -> str:
    fields = "-".join(str(value) for value in config.values())
    scheme = f"int{problem.num_bits}_g{problem.group_size}_dim{problem.group_dim}"
    scheme += "_symmetric" if problem.symmetric else ""
    shape = f"M{problem.M}_N{problem.N}_K{problem.K}"
    return re.sub(r"[^\w.-]", "_", f"{arch}_{problem.dtype}_{scheme}_{shape}_{fields}")


def audit(
    tasks: list[Task],
    *,
    jobs: int | None = None,
    asm_folder: str | None = None,
    progress: Callable[[], object] | None = None,
) -> list[Record]:
    """Compile and measure kernels, several at a time.

    Args:
        tasks: From `plan`.
        jobs: Processes; by default one a core. 1 stays in this process.
        asm_folder: Folder that assembly files are written to.
        progress: Called after each kernel.

    Returns:
        One record a task, in the order of the tasks.

    Raises:
        AuditError: A kernel does not compile or cannot be counted.
    """
    if asm_folder is not None:
        try:
            Path(asm_folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AuditError(f"cannot write to {asm_folder}: {error}") from error
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    records: dict[int, Record] = {}
    if jobs <= 1:
        for index, task in enumerate(tasks):
            records[index] = audit_task(task, asm_folder)
            if progress:
                progress()
        return list(records.values())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(audit_task, task, asm_folder): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                records[futures[future]] = future.result()
                if progress:
                    progress()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [records[index] for index in range(len(tasks))]
