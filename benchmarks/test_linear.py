"""A linear layer, provider by provider: `pytest benchmarks --help` lists what can be chosen."""

import statistics
from functools import lru_cache
from typing import Any

import pytest
from torch import nn

from benchmarks import measure
from benchmarks.conftest import Run
from benchmarks.problems import Problem
from benchmarks.providers import Provider, check, held_bytes, make


@lru_cache(maxsize=1)
def _built(chosen: Provider, problem: Problem, device: str) -> tuple[list[nn.Module], int, str | None]:
    """Copies of a provider's module, the bytes of one, and what the gate found wrong."""
    module = make(chosen, problem, device)
    wrong = check(chosen, module, problem, device)
    if wrong:
        return [], held_bytes(module), f"{wrong}; {chosen.note}" if chosen.note else wrong
    copies = measure.copies_of(module, device, lambda: make(chosen, problem, device))
    return copies, held_bytes(module), None


def test_linear(case: tuple[Problem, Provider, int], run: Run, benchmark: Any) -> None:
    """Time one case, once its results are known to be right."""
    problem, chosen, tokens = case
    try:
        modules, nbytes, wrong = _built(chosen, problem, run.device)
    except Exception as error:  # a peer may fail in any way; its absence has to be said, not to end the run
        if chosen.ours:
            raise
        modules, nbytes, wrong = [], 0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if wrong:
        run.left_out[f"{chosen.name} on {problem.name}"] = f"failing: {wrong}"
        if chosen.ours:
            pytest.fail(wrong)
        pytest.skip(wrong)
    x = problem.tokens(tokens, chosen.dtype).to(run.device)
    call, products = measure.timed_call(modules, x, run.device)
    benchmark.pedantic(call, rounds=measure.rounds_for(call, run.seconds))
    times = [seconds / products for seconds in benchmark.stats.stats.data]
    quartiles = statistics.quantiles(times, n=4)
    run.records.append(
        {
            "layer": problem.name,
            "out_features": problem.out_features,
            "in_features": problem.in_features,
            "scheme": None if chosen.num_bits >= 16 else str(problem.scheme),
            "num_bits": chosen.num_bits,
            "provider": chosen.name,
            "tokens": tokens,
            "seconds": statistics.median(times),
            "quartiles": [quartiles[0], quartiles[2]],
            "fastest": min(times),
            "rounds": len(times),
            "bytes": nbytes,
        }
    )
