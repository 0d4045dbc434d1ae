"""Counts GemLite's kernels with this package's audit, beside this package's own, on the same problems.

    pip install gemlite            # imports without a GPU here: the few questions it asks CUDA are answered
    python benchmarks/audit_gemlite.py

A kernel without a loop is counted whole, its prologue and reduction included. GemLite takes the
configuration of its shipped tables (H100, A100) where they have the problem. Where they do not it would
search on the device: all configurations of that search are compiled, and the one with the fewest
lane-instructions per weight is shown, in GemLite's favour.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from woq_triton.audit.chips import CHIPS
from woq_triton.audit.compilation import Launch, compile_launch, record_launches, target_of
from woq_triton.audit.kernels import Task, audit
from woq_triton.audit.problems import Problem
from woq_triton.audit.record import Record, measure

NAMES = {"sm_80": "NVIDIA A100-SXM4-80GB", "sm_90": "NVIDIA H100 80GB HBM3"}
"""What GemLite is told it runs on: it ships no table for H200, and H100 is the same architecture."""

RESULTS = Path(__file__).parent / "results" / "audit_gemlite.json"

SHAPES = {
    "llama-3-8b o_proj": (4096, 4096),
    "llama-3-8b down_proj": (4096, 14336),
    "llama-3-70b o_proj": (8192, 8192),
}
GROUP_SIZES = (128, 64)
ROWS = (1, 8, 16)
"""At 2 to 4 rows GemLite runs its kernel for one row as often: then a weight costs as often as much."""


def problems() -> list[Problem]:
    """The products compared: int4 in groups along in_features, fp16."""
    return [
        Problem(M, N, K, 4, group_size, name=name)
        for name, (N, K) in SHAPES.items()
        for group_size in GROUP_SIZES
        for M in ROWS
    ]


def import_gemlite(arch: str) -> Any:
    """Import GemLite as if on a GPU of this architecture; only once in a process."""
    chip, target = CHIPS[arch], target_of(arch)
    properties = SimpleNamespace(
        name=NAMES[arch],
        multi_processor_count=chip.processors,
        major=target.arch // 10,
        minor=target.arch % 10,
    )
    cuda = {
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in cuda.items():
        setattr(torch.cuda, name, answer)
    from triton.runtime.driver import driver

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": chip.shared_program})
    active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
    with mock.patch.object(driver, "_active", active):
        import gemlite
        import gemlite.core
    return gemlite


def gemlite_launches(problem: Problem, arch: str) -> list[Launch]:
    """The kernel of each configuration that GemLite would use, or try, for a problem."""
    import gemlite.core as core
    from triton.runtime.autotuner import Autotuner

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def run_all(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    half, single = core.DType.FP16.value, core.DType.FP32.value
    per_word = 32 // problem.num_bits
    groups = problem.K // problem.group_size
    kind = core.get_matmul_type(problem.M, problem.num_bits)
    forward: Callable[..., object] = core.GEMLITE_TRITON_MAPPING[kind].forward

    def run() -> None:
        from triton.runtime.driver import driver

        utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": CHIPS[arch].shared_program}
        )
        with (
            mock.patch.object(Autotuner, "run", run_all),
            mock.patch.object(driver._active, "utils", utils, create=True),
        ):
            forward(
                empty(problem.M, problem.K),
                empty(problem.K // per_word, problem.N, dtype=torch.int32),
                empty(groups, problem.N),
                empty(groups, problem.N),
                None,
                problem.num_bits,
                problem.group_size,
                2**problem.num_bits - 1,
                per_word,
                half,
                half,
                single,
                half,
                0,
                4,
                True,
                half * 100 + problem.num_bits,
            )

    return record_launches(run, arch)


def gemlite_records(problem: Problem, arch: str) -> list[Record]:
    """A record of each configuration that GemLite would use, or try, for a problem."""
    launches = {launch.key: launch for launch in gemlite_launches(problem, arch)}
    records = []
    for launch in launches.values():
        names = list(launch.signature)
        tile = {names[path[0]]: value for path, value in launch.constants.items()}
        wanted = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "SPLIT_K", "A_load_order", "dot_prod_mode")
        config = {name: tile[name] for name in wanted if name in tile}
        config |= {name: launch.options[name] for name in ("num_warps", "num_stages")}
        # A program of gemv_revsplitK does two blocks of K, without a loop.
        blocks = 2 if "revsplitK" in launch.name else 1
        record = measure(
            compile_launch(launch, arch),
            num_bits=problem.num_bits,
            bytes_per_weight=problem.bytes_per_weight,
            block_m=tile["BLOCK_SIZE_M"],
            programs=_programs(problem, tile, blocks),
            config=config,
            problem=problem.to_dict(),
            weights_per_iteration=blocks * tile["BLOCK_SIZE_N"] * tile["BLOCK_SIZE_K"],
        )
        records.append(record)
    return records


def _programs(problem: Problem, tile: dict[str, Any], blocks: int) -> int:
    splits = tile.get("SPLIT_K") or -(-problem.K // (blocks * tile["BLOCK_SIZE_K"]))
    return -(-problem.M // tile["BLOCK_SIZE_M"]) * -(-problem.N // tile["BLOCK_SIZE_N"]) * splits


def compare(arch: str) -> list[dict[str, Any]]:
    """Both packages' records of every problem on one architecture."""
    import_gemlite(arch)
    pairs = []
    for problem in problems():
        print(f"{arch} {problem.name} M={problem.M} g={problem.group_size}", file=sys.stderr)
        (ours,) = audit([Task(problem, arch, 1)], jobs=1)
        theirs = gemlite_records(problem, arch)
        best = min(theirs, key=lambda record: record.lane_instructions_per_weight)
        pairs.append(
            {"woq_triton": ours.to_dict(), "gemlite": best.to_dict(), "gemlite_configurations": len(theirs)}
        )
    return pairs


def markdown(pairs: list[dict[str, Any]]) -> str:
    """The README's table."""
    lines = [
        "| | M | group | woq_triton | of bandwidth | GemLite | of bandwidth | GemLite's kernel |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair in pairs:
        ours, theirs = pair["woq_triton"], pair["gemlite"]
        problem = ours["problem"]
        lines.append(
            f"| {ours['arch']} {problem['N']}×{problem['K']} | {problem['M']} | {problem['group_size']} "
            f"| {ours['lane_instructions_per_weight']:.2f} | {ours['predicted_fraction']:.0%} "
            f"| {theirs['lane_instructions_per_weight']:.2f} | {theirs['predicted_fraction']:.0%} "
            f"| {theirs['kernel'].removesuffix('_kernel')} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compare on each architecture, in a process of its own; write JSON, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=sorted(NAMES), help="repeatable; default: both")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"JSON file (default: {RESULTS})")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    archs = options.arch or sorted(NAMES)
    try:
        version = importlib.metadata.version("gemlite")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("GemLite is not installed: pip install gemlite")
    if options.one:
        print(json.dumps(compare(archs[0])))
        return
    pairs: list[dict[str, Any]] = []
    for arch in archs:
        command = [sys.executable, __file__, "--one", "--arch", arch]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode != 0:
            sys.exit(f"the comparison on {arch} failed")
        pairs += json.loads(result.stdout)
    environment = {name: importlib.metadata.version(name) for name in ("torch", "triton")} | {
        "gemlite": version
    }
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"environment": environment, "pairs": pairs}, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"cannot write {options.output}: {error}")
    print(markdown(pairs))


if __name__ == "__main__":
    main()
