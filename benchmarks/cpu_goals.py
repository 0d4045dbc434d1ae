"""The goals of this package on a CPU, as ratios measured in one run: `python -m benchmarks.cpu_goals`.

All layers of a ratio are timed in turn, so that a slow moment of the machine hits all alike, each call right
after an untimed one of the same layer.
Where the processor has bf16 instructions, the goals beside dense bf16 are measured once more in a process in
which oneDNN, which multiplies for torch, must do without them: most CPUs lack them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import benchmarks.ours
import benchmarks.peers  # noqa: F401
from benchmarks import measure, results
from benchmarks.cpu_goals_table import ALONE, table
from benchmarks.problems import Problem
from benchmarks.providers import PROVIDERS, Provider, check, held_bytes, make
from woq_triton import QuantScheme, quantize_model
from woq_triton.backends.cpu import multiplies_bf16

SHAPES = ((4096, 4096), (4096, 11008))
TOKENS = (1, 16, 128, 512)


@dataclass(frozen=True)
class Goal:
    """How fast a layer is to be beside another, at some numbers of tokens."""

    num_bits: int
    tokens: tuple[int, ...]
    beside: str
    ratio: float


GOALS = (
    Goal(4, (1,), "dense bf16", 5.0),
    Goal(8, (1,), "dense bf16", 3.0),
    Goal(4, (1,), "DeepSpeed int4", 20.0),
    Goal(4, (16,), "dense bf16", 1.0),
    Goal(4, (16,), "dense fp32", 0.6),
    Goal(4, (128, 512), "dense fp32", 0.85),
    Goal(4, TOKENS[1:], "DeepSpeed int4", 1.0),
    Goal(8, TOKENS, "DeepSpeed int8", 1.0),
)


_NO_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and leave it as JSON; 1 if this package computes something wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=measure.positive, default=5.0, help="about how long to time each group"
    )
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    parser.add_argument(
        "--dense-bf16", action="store_true", help="only what is beside dense bf16, printed as JSON, not kept"
    )
    options = parser.parse_args(arguments)
    if options.dense_bf16:
        goals = [goal for goal in GOALS if goal.beside == "dense bf16"]
        print(json.dumps(measure_goals(goals, options.seconds)["records"]))
        return 0
    try:
        path = results.new_file(options.results, "cpu-goals", "cpu")
    except ValueError as error:
        parser.error(str(error))
    body = measure_goals(GOALS, options.seconds)
    body["memory"] = memory()
    body["ceilings"] = {
        "read_bytes_per_second": measure.read_bandwidth(),
        "fp32_flops_per_second": measure.matrix_rate("cpu", torch.float32),
    }
    body["without_bf16_instructions"] = _without_bf16(options.seconds)
    results.write(path, "cpu-goals", "cpu", body)
    print(table(body))
    print(f"\n{path}")
    return 0


def measure_goals(goals: Sequence[Goal], seconds: float) -> dict[str, Any]:
    """The ratio of each goal, and every layer's own time and bytes."""
    records: list[dict[str, Any]] = []
    timings: list[dict[str, Any]] = []
    tokens_of_goals = sorted({tokens for goal in goals for tokens in goal.tokens})
    cases = [(shape, tokens) for shape in SHAPES for tokens in tokens_of_goals]
    built: dict[tuple[tuple[int, int], str], list[nn.Module]] = {}
    titles = [f"{shape[0]}x{shape[1]}, {tokens} tokens" for shape, tokens in cases]
    for (shape, tokens), _ in zip(cases, measure.progress(titles, "goals"), strict=True):
        for num_bits in (4, 8):
            chosen = [goal for goal in goals if goal.num_bits == num_bits and tokens in goal.tokens]
            if not chosen:
                continue
            ours = f"woq_triton int{num_bits}"
            names = [ours, *dict.fromkeys(goal.beside for goal in chosen)]
            if num_bits == 4 and tokens <= 16:
                names.append(ALONE)
            calls = {}
            for name in names:
                if _provider(name).unavailable("cpu") is not None:
                    continue
                if (shape, name) not in built:
                    built[shape, name] = _copies(_provider(name), shape, num_bits)
                x = _problem(shape, num_bits).tokens(tokens, _provider(name).dtype)
                calls[name] = measure.rotating(built[shape, name], x)
            medians = measure.interleaved_medians(calls, seconds)
            records += _records(chosen, shape, tokens, num_bits, ours, medians)
            timings += [
                {
                    "shape": list(shape),
                    "tokens": tokens,
                    "beside": ours,
                    "provider": name,
                    "bytes": held_bytes(built[shape, name][0]),
                    "seconds": median,
                }
                for name, median in medians.items()
            ]
        if tokens == tokens_of_goals[-1]:
            built.clear()
    return {"records": records, "timings": timings, "least_ratios": _least(records)}


def _without_bf16(seconds: float) -> list[dict[str, Any]] | None:
    """The goals beside dense bf16 where oneDNN must not use bf16 instructions; None where there are none."""
    if not multiplies_bf16():
        return None
    command = [sys.executable, "-m", "benchmarks.cpu_goals", "--dense-bf16", "--seconds", str(seconds)]
    done = subprocess.run(command, env={**os.environ, **_NO_BF16}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} failed")
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def _provider(name: str) -> Provider:
    return next(chosen for chosen in PROVIDERS if chosen.name == name)


def _problem(shape: tuple[int, int], num_bits: int) -> Problem:
    return Problem(f"{shape[0]}x{shape[1]}", *shape, QuantScheme(num_bits, 128))


def _copies(chosen: Provider, shape: tuple[int, int], num_bits: int) -> list[nn.Module]:
    problem = _problem(shape, num_bits)
    module = make(chosen, problem, "cpu")
    wrong = check(chosen, module, problem, "cpu")
    if wrong:
        sys.exit(f"{chosen.name} on {problem.name} is wrong, so nothing is timed: {wrong}")
    return measure.copies_of(module, "cpu")


def _records(
    goals: Sequence[Goal],
    shape: tuple[int, int],
    tokens: int,
    num_bits: int,
    ours: str,
    medians: dict[str, float],
) -> list[dict[str, Any]]:
    records = []
    for goal in goals:
        if goal.beside in medians:
            ratio = medians[goal.beside] / medians[ours]
            records.append(
                {
                    "shape": list(shape),
                    "tokens": tokens,
                    "num_bits": num_bits,
                    "beside": goal.beside,
                    "goal": goal.ratio,
                    "ratio": ratio,
                    "met": ratio >= goal.ratio,
                    "seconds": medians[ours],
                    "beside_seconds": medians[goal.beside],
                }
            )
    return records


def _least(records: list[dict[str, Any]]) -> dict[str, float]:
    least: dict[str, float] = {}
    for record in records:
        key = f"int{record['num_bits']} M={record['tokens']} beside {record['beside']}"
        least[key] = min(least.get(key, record["ratio"]), record["ratio"])
    return least


def memory(layers: int = 8, size: int = 4096) -> dict[str, int]:
    """Bytes of this process with a dense model, and with the same model quantized to int4 and used."""
    start = measure.resident_bytes()
    model = nn.Sequential(
        *(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers))
    ).requires_grad_(False)
    dense = measure.resident_bytes()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    settings = {"num_bits": 4, "group_size": 128, "group_dim": 1, "symmetric": False}
    report = quantize_model(model, {"weight_quantization": {"post_init_quant": {"*": settings}}})
    quantized = measure.resident_bytes()
    with torch.no_grad():
        for tokens in (1, 16, 128):
            model(torch.randn(tokens, size, dtype=torch.bfloat16))
    return {
        "dense_weight_bytes": weights,
        "quantized_weight_bytes": report.bytes_after,
        "resident_dense": dense - start,
        "resident_quantized": quantized - start,
        "resident_after_use": measure.resident_bytes() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
