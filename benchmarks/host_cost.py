"""What a product costs the host: from the op to the driver's launch, on a CUDA library that does nothing.

    python -m benchmarks.host_cost

Everything above the driver is real: torch's dispatcher, this package's checks and look-ups, the allocation of
the output, Triton's C launcher with its argument parsing. Not in the figures: what the driver's own
cuLaunchKernelEx takes, the allocation and the current device and stream as torch's CUDA build finds them
(tensors are on the CPU here, and device and stream are two Python functions that return a number), Python
around the op. The same launch through Triton's own ``kernel[grid](...)`` is timed beside it, without checks,
allocation or dispatcher. Times are CPU time of the thread, medians of rounds in which all calls take turns.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from benchmarks import results
from tests import stub_cuda
from tests.numerics import make_weight, make_x
from woq_triton import QuantScheme, quantize
from woq_triton.backends import triton as backend

SHAPES = {"4096x4096, split-K": (4096, 4096), "28672x4096, no split-K": (28672, 4096)}
DTYPE = torch.bfloat16
kept: list[torch.library.Library] = []


def medians(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Median microseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(repeats):
                call()
            times[name].append((time.thread_time_ns() - start) / repeats / 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


@functools.cache
def identity_op() -> Callable[..., object]:
    """An op with the schema and the registrations of `linear` that does nothing."""
    from woq_triton.ops import _SCHEMAS

    library = torch.library.Library("woq_triton_host_cost", "DEF")
    library.define("linear" + _SCHEMAS["linear"])
    library.impl("linear", lambda *arguments: arguments[0], "CPU")
    library.impl("linear", torch.library.fallthrough_kernel, "AutogradCPU")
    kept.append(library)
    op: Callable[..., object] = torch.ops.woq_triton_host_cost.linear.default
    return op


def measure(shape: tuple[int, int], stub: stub_cuda.Stub, rounds: int, repeats: int) -> dict[str, object]:
    """All figures of one problem at M = 1."""
    qweight = quantize(make_weight(*shape, dtype=DTYPE), QuantScheme(4, 128))
    x = make_x(1, shape[1], dtype=DTYPE)
    arguments = (x, qweight.packed, qweight.scale, qweight.min, None, *qweight.op_scheme)
    op, nothing = torch.ops.woq_triton.linear.default, identity_op()
    out = op(*arguments)
    launch, _ = backend._fused(*arguments[:5], out, *arguments[5:8])
    handle = backend._handles[launch.key(-1)]
    pointers, stream = (*launch.pointers, launch.rows, *launch.numbers), stub.stream
    calls: dict[str, Callable[[], object]] = {
        "op": lambda: op(*arguments),
        "dispatcher": lambda: nothing(*arguments),
        "backend": lambda: backend.linear(*arguments),
        "output": lambda: x.new_empty((1, shape[0])),
        "launcher": lambda: handle.send(launch.programs, stream, pointers),
        "kernel[grid]": launch.run,
    }
    before = stub.record.modules, stub.record.launches
    with torch.no_grad():
        found = medians(calls, rounds, repeats)
    assert stub.record.modules == before[0]
    assert stub.record.launches == before[1] + 4 * rounds * repeats
    return {"shape": list(shape), "splits": launch.numbers[-1], "microseconds": found}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--repeats", type=int, default=100, help="calls in a row in a round")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    options = parser.parse_args()
    path = results.new_file(options.results, "host-cost", "cpu")
    os.environ["WOQ_TRITON_IMPL"] = "triton"
    torch.set_num_threads(1)
    with stub_cuda.active(90) as stub:
        found = {
            name: measure(shape, stub, options.rounds, options.repeats) for name, shape in SHAPES.items()
        }
    for name, problem in found.items():
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in problem["microseconds"].items()))  # type: ignore[attr-defined]
    rest = {"rounds": options.rounds, "repeats": options.repeats, "triton": triton.__version__}
    results.write(path, "host-cost", "cpu", {**rest, "problems": found})
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
