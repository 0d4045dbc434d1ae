"""Time and memory: how a call is timed on a CPU and on a GPU, and what the machine could do at best.

Each call gets another copy of its weight, in turn, together larger than the last-level cache: in a model,
too, a layer's weight is read once a token and has left the cache before the next.
"""

import argparse
import copy
import ctypes
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.providers import held_bytes

Call = Callable[[], object]


def last_level_cache(device: str) -> int:
    """Bytes of the last-level cache; 32 MiB where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with suppress(OSError, ValueError):
            text = (index / "size").read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * 1024 ** ("KMG".index(text[-1]) + 1))
    return max(sizes) or 32 << 20


def copies_of(
    module: nn.Module, device: str, remake: Callable[[], nn.Module] | None = None
) -> list[nn.Module]:
    """A module and as many copies as exceed the last-level cache twice; at most 64.

    Args:
        module: The first.
        device: Where it is.
        remake: Makes another where a module cannot be copied.
    """
    count = 1 + 2 * last_level_cache(device) // max(1, held_bytes(module))
    return [module, *(_copied(module, remake) for _ in range(min(count, 64) - 1))]


def _copied(module: nn.Module, remake: Callable[[], nn.Module] | None) -> nn.Module:
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError):
        if remake is None:
            raise
        return remake()
    for old, new in zip(module.parameters(), copied.parameters(), strict=True):
        vars(new).update(vars(old))  # a copy loses them, and DeepSpeed's keep their dequantizer there
    return copied


def rotating(modules: list[nn.Module], x: Tensor) -> Call:
    """A call that multiplies with the next copy each time."""
    turns = itertools.cycle(modules)

    @torch.no_grad()
    def call() -> object:
        return next(turns)(x)

    return call


def rounds_for(call: Call, seconds: float, least: int = 3, most: int = 300) -> int:
    """Rounds of a call that fit the time; warms it up."""
    call()
    start = time.perf_counter()
    call()
    return max(least, min(most, round(seconds / max(time.perf_counter() - start, 1e-6))))


def interleaved_medians(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Median seconds of each call, all taken in turn so that a slow moment of the machine hits all alike.

    Each is timed right after an untimed call of its own: in a model, too, the layer before ran the same code.
    What another call leaves behind, caches full of its code and threads asleep, is no part of a layer.

    Args:
        calls: What to time, by name.
        seconds: About how long it may take in all.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = rounds_for(lambda: [call() for call in calls.values()], seconds / 2)
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def captured(calls: list[Call]) -> Call:
    """One replay of all calls, captured into a CUDA graph, to its end.

    Args:
        calls: Calls that read different weights, together larger than L2.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay() -> object:
        graph.replay()
        torch.cuda.synchronize()
        return kept

    return replay


def graph_median(calls: list[Call], replays: int = 20) -> float:
    """Median seconds of one of the calls on a GPU; those that `captured` describes."""
    replay = captured(calls)
    replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def timed_call(modules: list[nn.Module], x: Tensor, device: str) -> tuple[Call, int]:
    """A call to time, and how many products it is: on a GPU all copies in one graph."""
    if device != "cuda":
        return rotating(modules, x), 1
    with torch.no_grad():
        return captured([functools.partial(module, x) for module in modules]), len(modules)


def module_seconds(modules: list[nn.Module], x: Tensor, device: str, seconds: float) -> float:
    """Median seconds of one product of a module, whose copies take turns."""
    if device != "cuda":
        return interleaved_medians({"it": rotating(modules, x)}, seconds)["it"]
    with torch.no_grad():
        return graph_median([functools.partial(module, x) for module in modules])


def copy_bandwidth(device: str, seconds: float = 1.0) -> float:
    """Bytes a second that a large copy reads and writes: the ceiling for reading weights."""
    size = (1 << 30) if device == "cuda" else 8 * last_level_cache(device)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = functools.partial(target.copy_, source)
    best = (
        graph_median([call] * 4) if device == "cuda" else interleaved_medians({"copy": call}, seconds)["copy"]
    )
    return 2 * size / best


def read_bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second at which a CPU sums a tensor far larger than its caches: the ceiling for one token."""
    source = torch.zeros(8 * last_level_cache("cpu") // 4)
    return source.nbytes / interleaved_medians({"sum": source.sum}, seconds)["sum"]


def matrix_rate(device: str, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Floating-point operations a second of a large square product: the ceiling for many tokens."""
    if device == "cuda":
        call, flops = _square_product(8192, dtype, device)
        return flops / graph_median([call])
    call, flops = _square_product(affordable_size(dtype), dtype)
    return flops / interleaved_medians({"mm": call}, seconds)["mm"]


def affordable_size(dtype: torch.dtype, most: int = 2048, seconds: float = 0.02) -> int:
    """The smallest square product on a CPU, from 256 by doubling, that takes so long; at most `most`.

    Without bf16 instructions torch may multiply bf16 at a thousandth of the fp32 rate: one product of
    2048×2048 matrices then takes minutes.
    """
    size = 256
    while size < most:
        call, _ = _square_product(size, dtype)
        call()
        start = time.perf_counter()
        call()
        if time.perf_counter() - start >= seconds:
            break
        size *= 2
    return size


def _square_product(size: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Call, int]:
    a = torch.randn(size, size, device=device).to(dtype)
    return functools.partial(torch.mm, a, a), 2 * size**3


def resident_bytes() -> int:
    """Memory of this process in RAM, after freed memory was returned to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def positive(text: str) -> float:
    """A positive number, as an option of a script."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def positive_int(text: str) -> int:
    """A positive whole number, as an option of a script."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def progress(items: list[str], title: str) -> Iterator[str]:
    """Go through items with a progress bar on standard error."""
    from tqdm import tqdm

    bar = tqdm(items, desc=title)
    for item in bar:
        bar.set_postfix_str(item)
        yield item
