"""`woq-triton audit`: compile the kernels offline and count what they do for each weight."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from woq_triton.audit.chips import CHIPS
from woq_triton.audit.compilation import AuditError
from woq_triton.audit.goals import failures
from woq_triton.audit.kernels import audit as run_audit
from woq_triton.audit.kernels import plan
from woq_triton.audit.problems import (
    DECODE_M,
    DTYPES,
    GROUP_SIZES,
    MODELS,
    PREFILL_M,
    TENSOR_PARALLEL,
    expand,
    parse_shape,
    shapes_of,
)
from woq_triton.audit.report import table, to_json, write_json


def audit(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"Architecture, repeatable: {', '.join(CHIPS)}.", show_default="sm_90"),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Whose layers, repeatable: {', '.join(MODELS)}.", show_default="all of them"),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(help="Ranks they are sharded over, repeatable.", show_default="1, 2, 4, 8"),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape of your own, OUTxIN, repeatable; instead of models.")
    ] = None,
    m: Annotated[
        list[int] | None,
        typer.Option("--m", "-M", help="Rows of x, repeatable.", show_default="1 to 1024"),
    ] = None,
    num_bits: Annotated[
        list[int] | None, typer.Option(help="4 or 8, repeatable.", show_default="both")
    ] = None,
    group_size: Annotated[
        list[int] | None,
        typer.Option(help="Weights in a group, -1 for all; repeatable.", show_default="32, 64, 128, -1"),
    ] = None,
    group_dim: Annotated[
        list[int] | None, typer.Option(help="1 or 0, repeatable.", show_default="both")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float16, bfloat16, float32.", show_default="float16, bfloat16")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Schemes without a minimum.")] = False,
    tile: Annotated[
        list[str] | None,
        typer.Option(
            help="FIELD=VALUE of the tile configuration to try instead of the chosen one, repeatable."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a kernel misses a goal.")] = False,
    jobs: Annotated[
        int, typer.Option(help="Kernels compiled at a time; 0: one a core.", show_default=False)
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print records as JSON instead of a table.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the records to a JSON file as well.")] = None,
    save_asm: Annotated[
        Path | None, typer.Option(help="Folder for the assembly of each kernel, to count again.")
    ] = None,
) -> None:
    """Compile each kernel that the layers of a model need, for GPUs that are not there, and count.

    For each: registers, spills, shared memory, matrix instructions, loads, and the instructions of the main
    loop per weight by what they are for, against what the chip can issue while memory delivers a weight.
    """
    try:
        _check_choices(arch, num_bits, group_size, group_dim, dtype, [*(m or []), *(tp or [])], jobs, output)
        shapes = [parse_shape(text) for text in shape or []]
        if not shapes or model:
            shapes += shapes_of(model or MODELS, tp or TENSOR_PARALLEL)
        problems = expand(
            shapes,
            ms=m or (*DECODE_M, *PREFILL_M),
            num_bits=num_bits or (4, 8),
            group_sizes=group_size or GROUP_SIZES,
            group_dims=(1, 0) if group_dim is None else group_dim,
            dtypes=dtype or DTYPES,
            symmetric=(symmetric,),
        )
        tasks = plan(problems, arch or ["sm_90"], _changes(tile or []))
        with _progress(len(tasks)) as bar:
            records = run_audit(
                tasks, jobs=jobs or None, asm_folder=str(save_asm) if save_asm else None, progress=bar.update
            )
        if output:
            write_json(records, output)
    except AuditError as error:
        typer.echo(f"woq-triton audit: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(to_json(records) if as_json else table(records))
    missed = [record for record in records if failures(record)]
    if check and missed:
        typer.echo(f"{len(missed)} of {len(records)} kernels miss a goal", err=True)
        raise typer.Exit(1)


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="compiling", unit="kernel", leave=False)


def _check_choices(
    archs: list[str] | None,
    num_bits: list[int] | None,
    group_sizes: list[int] | None,
    group_dims: list[int] | None,
    dtypes: list[str] | None,
    counts: list[int],
    jobs: int,
    output: Path | None,
) -> None:
    allowed: list[tuple[str, list[Any] | None, tuple[Any, ...]]] = [
        ("--arch", archs, tuple(CHIPS)),
        ("--num-bits", num_bits, (4, 8)),
        ("--group-dim", group_dims, (0, 1)),
        ("--dtype", dtypes, (*DTYPES, "float32")),
    ]
    for option, values, choices in allowed:
        for value in values or []:
            if value not in choices:
                raise AuditError(f"{option} {value}: choose from {', '.join(map(str, choices))}")
    if any(size == 0 or size < -1 for size in group_sizes or []):
        raise AuditError("--group-size must be positive, or -1 for one group")
    if any(count < 1 for count in counts):
        raise AuditError("--m and --tp must be at least 1")
    if jobs < 0:
        raise AuditError("--jobs must be positive, or 0 for one a core")
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise AuditError(f"--output {output} cannot be written")


_POWERS = ("block_m", "block_n", "step", "num_warps")
_NUMBERS = (*_POWERS, "split_k", "num_stages", "max_registers")


def _changes(settings: list[str]) -> dict[str, Any]:
    """``block_n=64`` and the like as a dict: numbers and booleans where they look so, else text."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise AuditError(f"--tile takes FIELD=VALUE, not {setting!r}")
        if name in _NUMBERS and not (value.isdigit() and int(value) > 0):
            raise AuditError(f"--tile {setting}: {name} must be a positive number")
        if name in _POWERS and int(value).bit_count() > 1:
            raise AuditError(f"--tile {setting}: {name} must be a power of two")
        changes[name] = {"true": True, "false": False}.get(
            value.lower(), int(value) if value.isdigit() else value
        )
    return changes
