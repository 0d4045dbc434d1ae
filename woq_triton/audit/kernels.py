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


def launch_of(problem: Problem, arch: str, changes: Mapping[str, Any] | None = None) -> tuple[Launch, Any]:
    """What the package launches for a problem on an architecture, and the tile configuration it picks.

    Args:
        problem: The product.
        arch: "sm_90", "gfx942" and the like.
        changes: Fields of the tile configuration to set instead of what `pick_tile` chose.

    Raises:
        AuditError: Triton is missing or interprets, or a field does not exist.
    """
    try:
        from woq_triton.backends.triton import launch
        from woq_triton_kernels.tiles import pick_tile
    except ModuleNotFoundError as error:
        raise AuditError("the audit needs Triton: pip install 'woq_triton[triton]'") from error
    from woq_triton_kernels.layout import packed_width

    dtype = getattr(torch, problem.dtype)
    M, N, K = problem.M, problem.N, problem.K
    size = problem.resolved_group_size
    config = pick_tile(M, N, K, problem.num_bits, size, problem.group_dim, dtype, arch)
    if changes:
        try:
            config = replace(config, **changes)
        except TypeError as error:
            raise AuditError(f"no such field of a tile: {', '.join(changes)} ({error})") from error

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, out = empty(M, K), empty(M, N)
    packed = empty(N, packed_width(K, problem.num_bits), dtype=torch.int16)
    scale = empty(*problem.metadata_shape)
    minimum = None if problem.symmetric else empty(*problem.metadata_shape)
    scheme = (problem.num_bits, size, problem.group_dim)
    launches = record_launches(lambda: launch(x, packed, scale, minimum, None, out, *scheme, config), arch)
    if not launches:
        raise AuditError(f"{problem} launches no kernel")
    return launches[0], config


def plan(
    problems: Iterable[Problem], archs: Iterable[str], changes: Mapping[str, Any] | None = None
) -> list[Task]:
    """The distinct kernels that the problems need, each once an architecture."""
    problems = list(problems)
    tasks: dict[tuple[str, str], Task] = {}
    for arch in archs:
        for problem in problems:
            launch, _ = launch_of(problem, arch, changes)
            known = tasks.get((arch, launch.key))
            if known is None:
                tasks[arch, launch.key] = Task(problem, arch, 1, tuple((changes or {}).items()))
            else:
                tasks[arch, launch.key] = replace(known, problems=known.problems + 1)
    return list(tasks.values())


def audit_task(task: Task, asm_folder: str | None = None) -> Record:
    """Compile and measure one kernel; its assembly goes to a file in `asm_folder`, if given."""
    problem = task.problem
    launch, config = launch_of(problem, task.arch, dict(task.changes))
    compiled = compile_launch(launch, task.arch)
    record = measure(
        compiled,
        num_bits=problem.num_bits,
        bytes_per_weight=problem.bytes_per_weight,
        block_m=config.block_m,
        config=config.to_dict(),
        problem=problem.to_dict(),
        problems=task.problems,
    )
    if asm_folder is None:
        return record
    path = Path(asm_folder) / f"{_file_name(problem, task.arch, config)}.asm"
    path.write_text(compiled.assembly)
    return replace(record, asm=str(path))


def _file_name(problem: Problem, arch: str, config: Any) -> str:
    fields = "-".join(str(value) for value in config.to_dict().values())
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
