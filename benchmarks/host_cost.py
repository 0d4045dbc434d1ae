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
from typing import Any

import torch

from benchmarks import results
from tests import stub_cuda
from tests.numerics import make_x
from woq_triton.backends import triton as backend
from woq_triton_kernels.layout import packed_width

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- host cost: made by benchmarks/host_cost.py -->", "<!-- end of host cost -->"
SHAPES = ((4096, 4096), (65536, 4096))
PARTS = {
    "op": "`torch.ops.woq_triton.linear`, all of it",
    "dispatcher": "of it torch's dispatcher: an op of the same schema that does nothing",
    "backend": "below the dispatcher: checks, look-up, output, launch",
    "output": "of that the output's allocation",
    "launcher": "of that Triton's C launcher",
    "kernel[grid]": "the same launch by Triton's `kernel[grid](...)` alone",
}
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


def measure(shape: tuple[int, int], stub: stub_cuda.Stub, rounds: int, repeats: int) -> dict[str, Any]:
    """All figures of one problem at M = 1."""
    (N, K), group_size = shape, 128
    packed = torch.zeros(N, packed_width(K, 4), dtype=torch.int16)
    scale = torch.ones(N, K // group_size, dtype=DTYPE)
    x = make_x(1, K, dtype=DTYPE)
    arguments = (x, packed, scale, scale.clone(), None, 4, group_size, 1, N, K)
    op, nothing = torch.ops.woq_triton.linear.default, identity_op()
    out = op(*arguments)
    launch, _ = backend._fused(*arguments[:5], out, *arguments[5:8])
    handle = backend._handles[launch.key(-1)]
    pointers, stream = (*launch.pointers, launch.rows, *launch.numbers), stub.stream
    calls: dict[str, Callable[[], object]] = {
        "op": lambda: op(*arguments),
        "dispatcher": lambda: nothing(*arguments),
        "backend": lambda: backend.linear(*arguments),
        "output": lambda: x.new_empty((1, N)),
        "launcher": lambda: handle.send(launch.programs, stream, pointers),
        "kernel[grid]": launch.run,
    }
    before = stub.record.modules, stub.record.launches
    with torch.no_grad():
        found = medians(calls, rounds, repeats)
    assert stub.record.modules == before[0]
    assert stub.record.launches == before[1] + 4 * rounds * repeats
    return {"shape": list(shape), "splits": launch.numbers[-1], "microseconds": found}


def table(found: dict[str, Any]) -> str:
    """The results for the README."""
    environment = found["environment"]
    where = f"{environment['device']}, Python {environment['python']}"
    names = [
        "×".join(map(str, problem["shape"])) + (", split-K" if problem["splits"] > 1 else ", no split-K")
        for problem in found["problems"]
    ]
    rows = [
        f"| microseconds of CPU time, M = 1, {where} | " + " | ".join(names) + " |",
        "| --- " * (1 + len(names)) + "|",
    ]
    for name, text in PARTS.items():
        times = [problem["microseconds"][name] for problem in found["problems"]]
        rows.append(f"| {text} | " + " | ".join(f"{value:.1f}" for value in times) + " |")
    return "\n".join(rows)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--repeats", type=int, default=100, help="calls in a row in a round")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    parser.add_argument("--readme", type=Path, default=README, help="file to put the table into")
    options = parser.parse_args()
    if reason := stub_cuda.unusable():
        parser.error(f"host cost cannot be measured here: {reason}")
    os.environ["WOQ_TRITON_IMPL"] = "triton"
    torch.set_num_threads(1)
    try:
        path = results.new_file(options.results, "host-cost", "cpu")
        with stub_cuda.active(90) as stub:
            problems = [measure(shape, stub, options.rounds, options.repeats) for shape in SHAPES]
        rest = {"rounds": options.rounds, "repeats": options.repeats, "problems": problems}
        results.write(path, "host-cost", "cpu", rest)
        text = table({**rest, "environment": results.environment("cpu")})
        results.put(options.readme, START, END, text)
    except ValueError as error:
        parser.error(str(error))
    print(f"{text}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
