"""Which tile serves which problem: a pure function of the problem and the device's architecture.

`pick_tile` looks in the table shipped for the architecture (``configs/<arch>.json``, measured) and
otherwise follows a heuristic. There is no search at run time: the choice must be the same under CUDA
graph capture, on every rank and on every run.
"""

import functools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MAX_DECODE_M = 16
"""Largest M that the decode kernel serves."""

FUSED_MAX_M = 512
"""Above this M, dequantizing once and calling the vendor's GEMM is taken to be faster."""

PARTIAL_ELEMENTS = 1 << 22
"""fp32 elements of the decode kernel's scratch: the limit of a launch's partial tiles."""

COUNTERS = 1 << 14
"""int32 counters of the decode kernel's scratch: the limit of tiles that are split."""

DEQUANTIZE_ROWS = 32
"""Rows in a tile of the dequantize kernel."""

CONFIGS = Path(__file__).parent / "configs"
"""Where the tables lie."""


@dataclass(frozen=True)
class TileConfig:
    """How one matrix multiplication is cut up and compiled.

    Attributes:
        kernel: "decode" or "gemm".
        block_m: Rows of x in a tile.
        block_n: Weight rows (out_features) in a tile.
        step: Packed blocks of 128 columns that one iteration takes.
        split_k: Programs that share a tile's K range; 1 for gemm.
        num_warps: Warps in a program.
        num_stages: Depth of the load pipeline.
        scale_on: Where scale and min are applied: "accumulator", "x" or "weights".
        unpack: Instructions that unpack: "ptx", "gcn" or "plain".
        subnormal: Whether fp16 operands are subnormals (see `woq_triton_kernels.unpack`).
        max_registers: Most registers of a lane on NVIDIA; 0 leaves them to the compiler.
    """

    kernel: str
    block_m: int
    block_n: int
    step: int
    split_k: int
    num_warps: int
    num_stages: int
    scale_on: str
    unpack: str
    subnormal: bool
    max_registers: int = 0

    def constants(self, num_bits: int, group_size: int, group_dim: int, N: int, K: int) -> dict[str, Any]:
        """Compile-time arguments that both kernels take."""
        size = single_group(group_size, group_dim, N, K)
        sum_rows = min(self.block_n, 16 * self.num_warps)
        if self.unpack == "gcn" and self.scale_on == "weights":
            # `accumulate_weights` takes it for half of a program's lanes, and a wave has 64.
            sum_rows = max(32, sum_rows)
        registers = {"maxnreg": self.max_registers} if self.max_registers and self.unpack == "ptx" else {}
        return {
            "NUM_BITS": num_bits,
            "GROUP_SIZE": size,
            "GROUP_DIM": group_dim,
            "SCALE_ON": self.scale_on,
            "GRAIN": grain(size),
            "ROW_GROUP": size % self.block_n == 0,
            "SUBNORMAL": self.subnormal,
            "UNPACK": self.unpack,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STEP": self.step,
            "SPLIT_K": self.split_k > 1,
            "SUM_ROWS": sum_rows,
            "EVEN_K": K % (128 * self.step) == 0,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **registers,
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def single_group(group_size: int, group_dim: int, N: int, K: int) -> int:
    """The group size as kernels take it: 0 if one group spans the dimension (one compiled kernel then)."""
    return 0 if group_size >= (K if group_dim == 1 else N) else group_size


def grain(group_size: int) -> int:
    """Neighbours that surely share a group: the largest power of 2 that divides the size, at most 128."""
    return math.gcd(group_size, 128)


@dataclass(frozen=True)
class _Arch:
    """What the heuristic knows of an architecture.

    Attributes:
        processors: Streaming multiprocessors (compute units) of the largest server part.
        resident: Programs of the 4-bit decode kernel that a processor should hold: enough loads in flight
            to cover memory latency (at 24 KB of packed weights each), few enough for registers.
        unpack: As in `TileConfig`.
        subnormal: Whether the matrix unit is known to keep fp16 subnormals.
        decode_m: Smallest block_m of the decode kernel.
        decode_stages: Its load pipeline's depth.
        matrix: Its matrix instructions: "mma" with operands in registers; "wgmma" and "tcgen05", which take
            activations from shared memory; "mfma"; "" if not known.
        spills: Whether its compiler, left alone, spills fp16 weights along group_dim 0, to make room for
            more programs than memory needs.
    """

    processors: int
    resident: int
    unpack: str
    subnormal: bool
    decode_m: int
    decode_stages: int
    matrix: str
    spills: bool = False


def _nvidia(processors: int, matrix: str = "mma", stages: int = 4, spills: bool = False) -> _Arch:
    return _Arch(processors, 4, "ptx", True, 8, stages, matrix, spills)


def _amd(processors: int, subnormal: bool) -> _Arch:
    return _Arch(processors, 4, "gcn", subnormal, 16, 2, "mfma")


_ARCHS = {
    "sm_80": _nvidia(108),
    "sm_86": _nvidia(84),
    "sm_89": _nvidia(142, stages=2, spills=True),  # slower memory: a third of sm_80's bytes in flight
    "sm_90": _nvidia(132, "wgmma"),
    "sm_100": _nvidia(148, "tcgen05", spills=True),
    "sm_120": _nvidia(188),
    "gfx90a": _amd(110, False),
    "gfx942": _amd(304, True),
    "gfx950": _amd(256, True),
}
_OTHER = _Arch(108, 4, "plain", False, 16, 2, "")


def _known(arch: str) -> _Arch:
    """Facts of an architecture, or of the nearest known relative."""
    if arch in _ARCHS:
        return _ARCHS[arch]
    return _nvidia(108) if arch.startswith("sm_") else _OTHER


def pick_tile(
    M: int,
    N: int,
    K: int,
    num_bits: int,
    group_size: int,
    group_dim: int,
    dtype: torch.dtype,
    arch: str,
    processors: int | None = None,
) -> TileConfig:
    """Choose the tile of ``[M, K] x [N, K]^T``.

    Args:
        M: Rows of x, at least 1.
        N: out_features.
        K: in_features.
        num_bits: 4 or 8.
        group_size: Weights in a group.
        group_dim: Dimension that groups run along.
        dtype: Dtype of x.
        arch: "sm_90", "gfx942" and the like; any other name gets what every target has.
        processors: Streaming multiprocessors (compute units) of the device; by default those of the
            architecture's largest server part.
    """
    size = single_group(group_size, group_dim, N, K)
    key = (bucket(M), N, K, num_bits, size, group_dim, str(dtype).removeprefix("torch."))
    shipped = load_table(CONFIGS, arch).get(key)
    if shipped is not None:
        return shipped
    facts = _known(arch)
    if M <= MAX_DECODE_M:
        return _pick_decode(M, N, K, num_bits, size, group_dim, dtype, facts, processors)
    return _pick_gemm(M, N, K, size, group_dim, dtype, facts, processors)


def _pick_decode(
    M: int,
    N: int,
    K: int,
    num_bits: int,
    size: int,
    group_dim: int,
    dtype: torch.dtype,
    facts: _Arch,
    processors: int | None,
) -> TileConfig:
    """64 rows a warp: so many products to each activation that a warp reads and sums."""
    block_m = max(facts.decode_m, 8 if M <= 8 else 16)
    block_n = 64 if dtype == torch.float32 else 128
    halves = facts.unpack == "ptx" and dtype != torch.float32  # weights are scaled two to an instruction
    half_bf16 = halves and dtype == torch.bfloat16  # with one instruction, from the code's own bits
    if group_dim == 0:
        # Scaling pairs of weights costs the same for any BLOCK_M. x times an fp16 scale, often below 1e-4,
        # would lose bits to underflow.
        same_rows = math.gcd(size, block_n) >= 16
        scale_on = "x" if same_rows and not halves and dtype != torch.float16 else "weights"
        block_n = math.gcd(size, block_n) if same_rows else block_n
    else:
        # An 8-bit code is two operands in bf16 and one weight.
        on_weights = half_bf16 and (num_bits == 8 or block_m > 8)
        scale_on = "accumulator" if grain(size) >= 32 and not on_weights else "weights"
    while block_n > 16 and block_n >= 2 * N:
        block_n //= 2
    # Without a matrix unit, or with scale and min gathered for each weight, registers allow fewer rows.
    gathered = scale_on == "weights" and (grain(size) < 32 if group_dim == 1 else size % block_n != 0)
    num_warps = max(1, block_n // (16 if gathered or dtype == torch.float32 else 64))
    # A step of 8-bit codes is twice as many bytes: fewer of them need to be in flight.
    resident = facts.resident if num_bits == 4 else facts.resident - 1
    stages = facts.decode_stages if num_bits == 4 else max(2, facts.decode_stages - 1)
    few_registers = num_bits == 8 and (scale_on == "weights" or (grain(size) == 32 and block_m > 8))
    if few_registers or (group_dim == 0 and half_bf16):
        stages = 2  # The addresses of more would cost registers or instructions that are not there.
    elif stages > 2 and num_bits == 4 and scale_on == "accumulator" and grain(size) == 32 and halves:
        stages += 1  # The compiler then arranges registers without spilling.
    processors = processors or facts.processors
    return TileConfig(
        kernel="decode",
        block_m=block_m,
        block_n=block_n,
        step=1,
        split_k=pick_split(-(-N // block_n), -(-K // 128), block_n * block_m, resident, processors, 0.25),
        num_warps=num_warps,
        num_stages=stages,
        scale_on=scale_on,
        unpack=facts.unpack,
        subnormal=facts.subnormal and dtype == torch.float16,
        max_registers=255 if facts.spills and group_dim == 0 and dtype == torch.float16 else 0,
    )


def pick_split(
    tiles: int, steps: int, elements: int, resident: int, processors: int, share_cost: float
) -> int:
    """How many programs should share the K range of each tile.

    The time of a launch is taken to be that of the busiest processor: its programs times the steps of
    each, but never less than as if it held `resident` of them, since fewer cannot keep memory busy. A
    program costs half a step to start.

    Args:
        tiles: Tiles of the output.
        steps: Steps of K.
        elements: Elements of a partial tile.
        resident: Programs that keep a processor busy.
        processors: How many there are.
        share_cost: Steps that a partial tile's way through the cache takes as long as.
    """
    most = min(steps // 2, 16, PARTIAL_ELEMENTS // (tiles * elements)) if tiles <= COUNTERS else 1

    def cost(split: int) -> float:
        programs = max(resident, -(-tiles * split // processors))
        return programs * (-(-steps // split) + 0.5) + (split - 1) * share_cost

    return min(range(1, max(1, most) + 1), key=cost)


_WIDE_TILES = {"mma": (64, 256, 8), "wgmma": (128, 128, 8), "tcgen05": (64, 128, 4), "mfma": (64, 128, 4)}
"""block_m, block_n and num_warps for more than 64 rows, without spills and within tensor memory."""


def _pick_gemm(
    M: int,
    N: int,
    K: int,
    size: int,
    group_dim: int,
    dtype: torch.dtype,
    facts: _Arch,
    processors: int | None,
) -> TileConfig:
    """On weights, scale and min cost the same for any block_m; on the accumulator a share of it a group.

    The answer is the same for all M up to 512 of a `bucket`, so that one compiled kernel serves them.
    """
    rows = bucket(M)
    spans = group_dim == 1 and grain(size) >= 32
    stages = 3 if facts.unpack == "ptx" else 2
    if dtype == torch.float32 or not facts.matrix:
        block_m, block_n, num_warps = 32, 64, 4
    elif rows <= 64 and facts.matrix == "tcgen05":
        block_m, block_n, num_warps = max(32, rows), 64, 2  # two warps multiply registers, as with mma
    elif rows <= 32:
        block_m, block_n, num_warps = 32, 128, 4
    elif rows <= 64 and facts.matrix != "mfma":
        block_m, block_n, num_warps = 64, 128, 4
    else:
        block_m, block_n, num_warps = _WIDE_TILES[facts.matrix]
    scale_on = "weights"
    if facts.unpack != "ptx" or dtype == torch.float32:  # scaling weights is slow there
        on_x = group_dim == 0 and size % block_n == 0 and dtype != torch.float16
        scale_on = "accumulator" if spans else "x" if on_x else "weights"
        block_m = block_m if grain(size) == 128 else 32
    if group_dim == 0 and size % block_n and scale_on == "weights":
        # Scale and min are tiles as large as the weights', which shared memory and registers have to hold.
        stages = 2
        few_rows, narrow = rows <= 32 and dtype != torch.float32, math.gcd(size, 64)
        if few_rows and narrow >= 32 and facts.matrix in ("mma", "tcgen05"):
            block_n, num_warps = narrow, narrow // 32  # all weight rows of so narrow a tile share a group
        elif facts.matrix in ("tcgen05", "mfma"):
            block_n, num_warps = 64, 2
        elif few_rows and facts.matrix == "mma":
            block_n, num_warps, stages = 64, 4, 3
        elif block_n > 128:
            block_m, block_n, num_warps = 64, 128, 4
            stages = 2 if size % block_n else 3
    while block_n > 32 and block_n >= 2 * N:
        block_n, num_warps = block_n // 2, num_warps // 2 if num_warps > 4 else num_warps
    split_k = 1
    if M <= rows:
        tiles, cost = -(-rows // block_m) * -(-N // block_n), min(block_m / 32, 1.0)
        split_k = pick_split(tiles, -(-K // 128), block_n * block_m, 1, processors or facts.processors, cost)
    return TileConfig(
        kernel="gemm",
        block_m=block_m,
        block_n=block_n,
        step=1,
        split_k=split_k,
        num_warps=num_warps,
        num_stages=stages,
        scale_on=scale_on,
        unpack=facts.unpack,
        subnormal=facts.subnormal and dtype == torch.float16,
    )


def bucket(M: int) -> int:
    """The M that stands for this one in a table: the next power of two, from 8 to 512."""
    return min(512, max(8, 1 << (M - 1).bit_length()))


TableKey = tuple[int, int, int, int, int, int, str]
"""``(bucket, N, K, num_bits, group_size or 0, group_dim, dtype)``."""


@functools.cache
def load_table(folder: Path, arch: str) -> dict[TableKey, TileConfig]:
    """The tiles measured for an architecture; empty if there is no table.

    A table is a JSON list of objects with the fields ``M`` (a `bucket`), ``N``, ``K``, ``num_bits``,
    ``group_size`` (0 for one group), ``group_dim``, ``dtype`` ("float16", ...) and ``tile``, the fields
    of a `TileConfig`.

    Raises:
        ValueError: The table is not of this form.
    """
    path = folder / f"{arch}.json"
    if not path.exists():
        return {}
    names = ("M", "N", "K", "num_bits", "group_size", "group_dim", "dtype")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {tuple(entry[name] for name in names): TileConfig(**entry["tile"]) for entry in entries}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"tile table {path} is damaged ({error!r}); reinstall the package") from error
