"""Speed on a device: tables beside the peers, and the search for better tiles."""

import dataclasses
import functools
import itertools
import time
from typing import Any

import torch
from torch import Tensor

import benchmarks.ours
import benchmarks.peers  # noqa: F401
from benchmarks import measure
from benchmarks.device_session import Session, dense64
from benchmarks.problems import Problem, problems_of
from benchmarks.providers import PROVIDERS, check, held_bytes, make
from tests.numerics import DENSE_ROUNDING, ROUNDED, make_x, relative_error
from woq_triton import QuantizedWeight, QuantScheme, quantize
from woq_triton.backends import triton as backend
from woq_triton_kernels import tiles


def tables(session: Session) -> dict[str, Any]:
    """Decode and prefill beside the peers."""
    if session.dry:
        problems = [Problem("tiny", 64, 256, QuantScheme(bits, 128)) for bits in (4, 8)]
        token_counts, chosen = (1, 17), [p for p in PROVIDERS if p.ours or p.num_bits >= 16]
    else:
        problems = [p for bits in (4, 8) for p in problems_of("llama-3-8b", ["o_proj", "down_proj"], bits)]
        problems += problems_of("llama-3-70b", ["o_proj"], 4)
        token_counts, chosen = (1, 4, 16, 64, 256, 1024), PROVIDERS
    ends = session.ends - (0 if session.dry else 150)  # the sweep needs the rest
    records, left_out = [], {}
    for problem, provider in itertools.product(problems, chosen):
        reason = provider.unavailable(session.device)
        if reason or provider.num_bits not in (16, 32, problem.scheme.num_bits):
            if reason and "runs on" not in reason:
                left_out[provider.name] = f"missing: {reason}"
            continue
        if time.monotonic() > ends:
            left_out[f"{provider.name} on {problem.name}"] = "no time was left"
            continue
        try:
            module = make(provider, problem, session.device)
            wrong = check(provider, module, problem, session.device)
            if wrong:
                left_out[f"{provider.name} on {problem.name}"] = f"failing: {wrong}"
                session.expect(not provider.ours, f"{provider.name}: {wrong}")
                continue
            remake = functools.partial(make, provider, problem, session.device)
            copies = [module] if session.dry else measure.copies_of(module, session.device, remake)
            for tokens in token_counts:
                x = problem.tokens(tokens, provider.dtype).to(session.device)
                seconds = measure.module_seconds(copies, x, session.device, 0.01)
                records.append(_record(problem, provider.name, provider.num_bits, tokens, seconds, module))
                print(f"   {problem.name} {provider.name} M={tokens}: {1e6 * seconds:.1f} us", flush=True)
        except Exception as error:  # a peer may fail in any way
            left_out[f"{provider.name} on {problem.name}"] = f"failing: {type(error).__name__}: {error}"[:300]
            session.expect(not provider.ours, f"{provider.name}: {error}")
        if not session.dry:
            torch.cuda.empty_cache()
    return {"records": records, "left_out": left_out, "ceilings": None if session.dry else _ceilings()}


def _record(
    problem: Problem, name: str, bits: int, tokens: int, seconds: float, module: Any
) -> dict[str, Any]:
    return {
        "layer": problem.name,
        "out_features": problem.out_features,
        "in_features": problem.in_features,
        "scheme": str(problem.scheme),
        "num_bits": bits,
        "provider": name,
        "tokens": tokens,
        "seconds": seconds,
        "bytes": held_bytes(module),
    }


def _ceilings() -> dict[str, float]:
    return {
        "copy_bytes_per_second": measure.copy_bandwidth("cuda"),
        "bf16_flops_per_second": measure.matrix_rate("cuda", torch.bfloat16),
        "fp32_flops_per_second": measure.matrix_rate("cuda", torch.float32),
    }


def sweep(session: Session) -> list[dict[str, Any]]:
    """The fastest tile of the most important problems, beside the one that `pick_tile` chooses."""
    shapes = [(64, 256)] if session.dry else [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192)]
    dtypes = [torch.float16] if session.dry else [torch.float16, torch.bfloat16]
    found = []
    for bits, (N, K), dtype, M in itertools.product(
        (4, 8), shapes, dtypes, (1,) if session.dry else (1, 8, 16, 64, 256)
    ):
        if session.left() < 20:
            print("   no time was left for the rest")
            break
        best = _best_tile(session, bits, N, K, dtype, M)
        found.append(best)
        times = f"{best['seconds'] * 1e6:.1f} us, chosen {best['chosen_seconds'] * 1e6:.1f} us"
        print(f"   int{bits} {N}x{K} M={M} {dtype}: {times}", flush=True)
    return found


def candidates(base: tiles.TileConfig, limit: int) -> list[tiles.TileConfig]:
    """Tiles near one, itself first, without those that no kernel can have."""
    choices = {
        "block_m": sorted({base.block_m, max(8, base.block_m // 2), 2 * base.block_m}),
        "block_n": [64, 128, 256],
        "num_warps": [2, 4, 8],
        "num_stages": [2, 3, 4, 5],
        "split_k": sorted({base.split_k, max(1, base.split_k // 2), 2 * base.split_k}),
        "step": [1, 2],
    }
    found = [base]
    for values in itertools.product(*choices.values()):
        tile = dataclasses.replace(base, **dict(zip(choices, values, strict=True)))
        differing = sum(getattr(tile, name) != getattr(base, name) for name in choices)
        if 0 < differing <= 2 and tile.block_n // tile.num_warps >= 16:
            found.append(tile)
    return found[:limit]


def _best_tile(session: Session, bits: int, N: int, K: int, dtype: torch.dtype, M: int) -> dict[str, Any]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    qweight = quantize(weight, QuantScheme(bits, 128)).to(session.device)
    copies = [qweight]
    if not session.dry:
        count = 1 + 2 * measure.last_level_cache("cuda") // qweight.nbytes
        copies += [dataclasses.replace(qweight, packed=qweight.packed.clone()) for _ in range(min(count, 32))]
    x = make_x(M, K, dtype=dtype).to(session.device)
    expected = x.double() @ dense64(qweight).t()
    arch, processors = backend._architecture(x.device)
    base = tiles.pick_tile(M, N, K, bits, 128, 1, dtype, arch, processors)
    timed: list[tuple[float, tiles.TileConfig]] = []
    for tile in candidates(base, 3 if session.dry else 60):
        if session.left() < 15 and timed:
            break
        try:
            seconds = _tile_seconds(session, copies, x, expected, tile)
        except Exception:  # too much shared memory, a combination that does not compile: not a candidate
            if tile == base:
                raise
            continue
        if seconds is not None:
            timed.append((seconds, tile))
    seconds, tile = min(timed, key=lambda pair: pair[0])
    return {
        "M": M, "N": N, "K": K, "num_bits": bits, "group_size": 128, "group_dim": 1,
        "dtype": str(dtype).removeprefix("torch."), "arch": arch, "tile": tile.to_dict(), "seconds": seconds,
        "chosen": base.to_dict(), "chosen_seconds": timed[0][0], "tried": len(timed),
    }  # fmt: skip


def _tile_seconds(
    session: Session, copies: list[QuantizedWeight], x: Tensor, expected: Tensor, tile: tiles.TileConfig
) -> float | None:
    """Seconds of a product with a tile; None if it is wrong."""
    out = torch.full((x.shape[0], copies[0].shape[0]), float("nan"), dtype=x.dtype, device=x.device)

    def run(qweight: QuantizedWeight) -> None:
        bits, size, dim = qweight.op_scheme[:3]
        backend.launch(x, qweight.packed, qweight.scale, qweight.min, None, out, bits, size, dim, tile)

    start = time.perf_counter()
    run(copies[0])
    if not relative_error(out, expected) < ROUNDED[x.dtype] + DENSE_ROUNDING[x.dtype]:
        return None
    if session.dry:
        return time.perf_counter() - start
    return measure.graph_median([functools.partial(run, qweight) for qweight in copies], replays=5)
