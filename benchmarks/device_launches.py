"""What has to hold of launches on a device: warm-up and capture, alignment, streams, devices, host cost."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor, nn

from benchmarks.device_session import Session, call, dense64
from tests.numerics import DENSE_ROUNDING, ROUNDED, make_weight, make_x, relative_error
from woq_triton import QuantizedEmbedding, QuantizedLinear, QuantScheme, linear, quantize, warmup
from woq_triton.backends import triton as backend

DTYPE = torch.float16


def launches(session: Session) -> dict[str, Any]:
    """All checks of this file."""
    found: dict[str, Any] = {"warm-up": warm_up_and_capture(session)}
    alignment(session)
    plain_and_fast(session)
    if not session.dry:
        streams(session)
        if torch.cuda.device_count() > 1:
            other_device(session)
        found["host microseconds"] = host_cost(session)
        print(f"   host microseconds of a call: {found['host microseconds']}")
    return found


def make_model(session: Session) -> nn.Sequential:
    """An embedding and layers of different kinds, quantized, on the device."""
    scheme = QuantScheme(4, 64)

    def layer(in_features: int, out_features: int, bias: bool) -> QuantizedLinear:
        return QuantizedLinear.from_linear(nn.Linear(in_features, out_features, bias, dtype=DTYPE), scheme)

    width, inner = (64, 128) if session.dry else (512, 2048)
    table = QuantizedEmbedding.from_embedding(nn.Embedding(300, width, dtype=DTYPE), scheme)
    layers = [layer(width, inner, True), layer(inner, width, False), layer(width, 300, False)]
    return nn.Sequential(table, *layers).to(session.device)


@contextmanager
def loads() -> Iterator[list[str]]:
    """Names of the kernels that are compiled or loaded in the meantime."""
    names: list[str] = []

    def compiled(*, fn: Any, **_: Any) -> None:
        names.append(f"compiled {fn.name}")

    def loaded(module: Any, function: Any, name: str, *_: Any) -> None:
        names.append(f"loaded {name}")

    runtime = triton.knobs.runtime
    earlier, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, compiled
    runtime.kernel_load_start_hook.add(loaded)
    try:
        yield names
    finally:
        runtime.kernel_load_start_hook.remove(loaded)
        runtime.jit_post_compile_hook = earlier


@torch.no_grad()
def warm_up_and_capture(session: Session) -> str:
    """After `warmup` a graph is captured at once: nothing compiles or loads, and replays compute anew."""
    model, sizes = make_model(session), (1, 8, 9, 16, 17, 33, 64, 65, 130, 300, 512)
    report = warmup(model, max_tokens=max(sizes))
    print(f"   {report}")
    if session.dry:
        return str(report)
    session.expect(report.kernels > 0, f"no handles on this Triton {triton.__version__}: {report.reason}")
    with loads() as names:
        for tokens in sizes:
            ids = torch.randint(0, 300, (1, tokens), device=session.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(ids)
            for seed in (1, 2):
                ids.copy_(torch.randint(0, 300, ids.shape, generator=torch.Generator().manual_seed(seed)))
                graph.replay()
                torch.cuda.synchronize()
                session.expect(torch.equal(out, model(ids)), f"replay at {tokens} tokens differs from eager")
    session.expect(not names, f"after the warm-up: {', '.join(names)}")
    counters = [scratch.counters for scratch in backend.workspace.table(torch.device("cuda", 0)).values()]
    session.expect(all(not used.any() for used in counters), "a counter was left behind")
    return f"{report}; {len(sizes)} captures"


def alignment(session: Session) -> None:
    """A view off alignment, after an aligned one of the same shape, is multiplied right."""
    shape = (64, 256) if session.dry else (512, 2048)
    qweight = quantize(make_weight(*shape, DTYPE), QuantScheme(4, 64)).to(session.device)
    dense = dense64(qweight)
    memory = make_x(1, 3 * shape[1] + 1, dtype=DTYPE).to(session.device).view(-1)
    for offset in (0, 1, 0, 1):
        x = memory[offset : offset + 3 * shape[1]].view(3, shape[1])
        error = relative_error(call(x, qweight), x.double() @ dense.t())
        bound = ROUNDED[DTYPE] + DENSE_ROUNDING[DTYPE]
        session.expect(error < bound, f"x {2 * offset} bytes off alignment: error {error:.2g}")


def plain_and_fast(session: Session) -> None:
    """A request seen before gives the bits of Triton's own launch."""
    shape = (64, 256) if session.dry else (1024, 4096)
    qweight = quantize(make_weight(*shape, DTYPE), QuantScheme(4, 64)).to(session.device)
    for tokens in (1, 16, 40):
        x = make_x(tokens, shape[1], dtype=DTYPE).to(session.device)
        out = torch.empty(tokens, shape[0], dtype=DTYPE, device=session.device)
        weight = (qweight.packed, qweight.scale, qweight.min)
        launch, _ = backend._fused(x, *weight, None, out, *qweight.op_scheme[:3])
        launch.run()
        same = all(torch.equal(call(x, qweight), out) for _ in range(3))
        session.expect(same, f"at M={tokens} a handle computes other bits than Triton's launch")


def streams(session: Session) -> None:
    """Launches that overlap on several streams do not disturb each other."""
    qweight = quantize(make_weight(1024, 8192, DTYPE), QuantScheme(4, 64)).to(session.device)
    xs = [make_x(1, 8192, dtype=DTYPE, seed=seed).to(session.device) for seed in range(4)]
    expected = [linear(x, qweight) for x in xs]
    pools, outs = [torch.cuda.Stream() for _ in xs], []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, x in zip(pools, xs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(linear(x, qweight))
    torch.cuda.synchronize()
    same = all(torch.equal(out, expected[index % len(xs)]) for index, out in enumerate(outs))
    session.expect(same, "streams disturb each other")


def other_device(session: Session) -> None:
    """Tensors on a device that is not the current one are served there."""
    qweight = quantize(make_weight(512, 2048, DTYPE), QuantScheme(4, 64))
    x = make_x(1, 2048, dtype=DTYPE)
    expected = linear(x.cuda(0), qweight.to("cuda:0")).cpu()
    there, moved = x.cuda(1), qweight.to("cuda:1")
    same = all(torch.equal(linear(there, moved).cpu(), expected) for _ in range(3))
    session.expect(same and torch.cuda.current_device() == 0, "the second device computes something else")


@torch.no_grad()
def host_cost(session: Session) -> dict[str, float]:
    """Microseconds that the host takes for a launch, where the kernel is shorter than that."""
    qweight = quantize(make_weight(256, 512, DTYPE), QuantScheme(4, 64)).to(session.device)
    x = make_x(1, 512, dtype=DTYPE).to(session.device)
    arguments = (x, qweight.packed, qweight.scale, qweight.min, None, *qweight.op_scheme)
    op = torch.ops.woq_triton.linear.default
    launch, _ = backend._fused(*arguments[:5], op(*arguments), *arguments[5:8])
    dense = torch.zeros(512, 256, dtype=DTYPE, device=session.device)
    calls: dict[str, Callable[[], Tensor | None]] = {
        "op": lambda: op(*arguments),
        "kernel[grid]": launch.run,
        "torch.mm": lambda: torch.mm(x, dense),
    }
    found: dict[str, float] = {}
    for name, run in calls.items():
        run()
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                run()
            times.append((time.perf_counter() - start) * 1e4)
        found[name] = round(sorted(times)[10], 2)
    return found
