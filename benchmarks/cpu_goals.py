"""The goals of this package on a CPU, as ratios measured in one run: `python -m benchmarks.cpu_goals`.

All layers of a ratio are timed in turn, call by call, so that a slow moment of the machine hits all alike.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import benchmarks.ours
import benchmarks.peers  # noqa: F401
from benchmarks import measure, results
from benchmarks.problems import Problem
from benchmarks.providers import PROVIDERS, Provider, check, make
from woq_triton import QuantScheme, quantize_model

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
    Goal(4, TOKENS, "DeepSpeed int4", 1.0),
    Goal(8, TOKENS, "DeepSpeed int8", 1.0),
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and leave it as JSON; 1 if this package computes something wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long to time each group")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    options = parser.parse_args(arguments)
    try:
        path = results.new_file(options.results, "cpu-goals", "cpu")
    except ValueError as error:
        parser.error(str(error))
    records: list[dict[str, Any]] = []
    cases = [(shape, tokens) for shape in SHAPES for tokens in TOKENS]
    built: dict[tuple[tuple[int, int], str], list[nn.Module]] = {}
    titles = [f"{shape[0]}x{shape[1]}, {tokens} tokens" for shape, tokens in cases]
    for (shape, tokens), _ in zip(cases, measure.progress(titles, "goals"), strict=True):
        for num_bits in (4, 8):
            names = [g.beside for g in GOALS if g.num_bits == num_bits and tokens in g.tokens]
            names = [name for name in dict.fromkeys(names) if _provider(name).unavailable("cpu") is None]
            ours = f"woq_triton int{num_bits}"
            calls = {}
            for name in (ours, *names):
                if (shape, name) not in built:
                    built[shape, name] = _copies(_provider(name), shape, num_bits)
                dtype = _provider(name).dtype
                x = _problem(shape, num_bits).tokens(tokens, dtype)
                calls[name] = measure.rotating(built[shape, name], x)
            medians = measure.interleaved_medians(calls, options.seconds)
            records += _records(shape, tokens, num_bits, ours, medians)
        if tokens == TOKENS[-1]:
            built.clear()
    body = {"records": records, "memory": memory(), "least_ratios": _least(records)}
    results.write(path, "cpu-goals", "cpu", body)
    print(table(body))
    print(f"\n{path}")
    return 0


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
    shape: tuple[int, int], tokens: int, num_bits: int, ours: str, medians: dict[str, float]
) -> list[dict[str, Any]]:
    records = []
    for goal in GOALS:
        if goal.num_bits == num_bits and tokens in goal.tokens and goal.beside in medians:
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


def table(body: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| weight | tokens | beside | this package | the other | ratio | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in body["records"]:
        shape = "×".join(map(str, record["shape"]))
        lines.append(
            f"| int{record['num_bits']} {shape} | {record['tokens']} | {record['beside']} "
            f"| {1e3 * record['seconds']:.2f} ms | {1e3 * record['beside_seconds']:.2f} ms "
            f"| {record['ratio']:.2f} | {record['goal']:g} | {'met' if record['met'] else 'missed'} |"
        )
    sizes = {name: f"{value / 2**20:.0f} MiB" for name, value in body["memory"].items()}
    lines += [
        "",
        f"Memory of the process above its start, eight layers of 4096×4096: {sizes['resident_dense']} dense "
        f"({sizes['dense_weight_bytes']} of weights), {sizes['resident_quantized']} quantized to int4 "
        f"({sizes['quantized_weight_bytes']} of weights), {sizes['resident_after_use']} after products with "
        "1, 16 and 128 tokens.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
