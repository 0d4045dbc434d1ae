"""From how many tokens on is it quicker to dequantize once and leave the product to the vendor's GEMM?

The answer belongs into `woq_triton_kernels.tiles.FUSED_MAX_M`.
"""

import functools
import itertools
import time
from typing import Any

import torch

from benchmarks import measure
from benchmarks.device_session import Session, dense64
from benchmarks.problems import Problem, problems_of
from tests.numerics import DENSE_ROUNDING, ROUNDED, make_x, relative_error
from woq_triton import QuantScheme, quantize
from woq_triton.backends import triton as backend
from woq_triton_kernels.tiles import FUSED_MAX_M, pick_tile

TOKENS = (32, 64, 128, 256, 512, 1024, 2048)


def crossover(session: Session) -> dict[str, Any]:
    """Both ways for every number of tokens, and the most tokens up to which the fused kernel wins."""
    if session.dry:
        problems, counts = [Problem("tiny", 64, 256, QuantScheme(4, 128))], (17,)
    else:
        problems = [p for bits in (4, 8) for p in problems_of("llama-3-8b", ["o_proj", "down_proj"], bits)]
        counts = TOKENS
    dtypes = (torch.float16,) if session.dry else (torch.bfloat16, torch.float16)
    records, most = [], []
    for problem, dtype in itertools.product(problems, dtypes):
        if not session.dry and session.left() < 100:  # the sweep needs the rest
            print("   no time was left for the rest")
            break
        rows = [_both(session, problem, dtype, tokens) for tokens in counts]
        records += rows
        most.append(fused_up_to(rows))
        print(f"   {problem.name} {problem.scheme} {dtype}: fused up to M={most[-1]}", flush=True)
    if most and not session.dry:
        print(f"   FUSED_MAX_M is {FUSED_MAX_M}; the median measured here is {sorted(most)[len(most) // 2]}")
    return {"records": records, "fused_up_to": most, "fused_max_m": FUSED_MAX_M}


def fused_up_to(rows: list[dict[str, Any]]) -> int:
    """The largest number of tokens up to which the fused kernel is never slower; 0 if it always is."""
    faster = itertools.takewhile(lambda row: row["fused_seconds"] <= row["dense_seconds"], rows)
    return max((row["tokens"] for row in faster), default=0)


def _both(session: Session, problem: Problem, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    N, K = problem.out_features, problem.in_features
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    qweight = quantize(weight, problem.scheme).to(session.device)
    x = make_x(tokens, K, dtype=dtype).to(session.device)
    out = torch.empty(tokens, N, dtype=dtype, device=session.device)
    arguments = (x, qweight.packed, qweight.scale, qweight.min, None, out, *qweight.op_scheme[:3])
    arch, processors = backend._architecture(x.device)
    tile = pick_tile(tokens, N, K, *qweight.op_scheme[:3], dtype, arch, processors)
    ways = {
        "fused": functools.partial(backend.launch, *arguments, tile),
        "dense": functools.partial(backend._dense_linear, *arguments),
    }
    expected = x.double() @ dense64(qweight).t()
    row: dict[str, Any] = {"layer": problem.name, "scheme": str(problem.scheme), "dtype": str(dtype)}
    row |= {"out_features": N, "in_features": K, "tokens": tokens}
    for name, way in ways.items():
        out.fill_(float("nan"))
        start = time.perf_counter()
        way()
        error = relative_error(out, expected)
        limit = ROUNDED[dtype] + DENSE_ROUNDING[dtype]
        session.expect(error < limit, f"{problem.name} {name} M={tokens}: error {error:.1e}")
        seconds = time.perf_counter() - start if session.dry else measure.graph_median([way] * 4, replays=5)
        row[f"{name}_seconds"] = seconds
    return row
