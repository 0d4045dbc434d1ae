"""Which tile serves which problem: a pure function of the problem and the device's architecture.

`pick_tile` looks in the table shipped for the device (``configs/<arch>.json``, measured) and otherwise
follows a heuristic. There is no search at run time: the choice must be the same under CUDA graph
capture, on every rank and on every run.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

MAX_DECODE_M = 16
"""Largest M that the decode kernel serves."""

PARTIAL_ELEMENTS = 1 << 22
"""fp32 elements of the decode kernel's scratch: the limit of tiles times splits."""

COUNTERS = 1 << 14
"""int32 counters of the decode kernel's scratch: the limit of tiles that are split."""

DEQUANTIZE_ROWS = 32
"""Rows in a tile of the dequantize kernel."""


def single_group(group_size: int, group_dim: int, N: int, K: int) -> int:
    """The group size as kernels take it: 0 if one group spans the dimension (one compiled kernel then)."""
    return 0 if group_size >= (K if group_dim == 1 else N) else group_size


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

    def constants(self, num_bits: int, group_size: int, group_dim: int, N: int, K: int) -> dict[str, Any]:
        """Compile-time arguments that both kernels take."""
        return {
            "NUM_BITS": num_bits,
            "GROUP_SIZE": single_group(group_size, group_dim, N, K),
            "GROUP_DIM": group_dim,
            "SCALE_ON": self.scale_on,
            "GRAIN": grain(single_group(group_size, group_dim, N, K)),
            "ROW_GROUP": single_group(group_size, group_dim, N, K) % self.block_n == 0,
            "SUBNORMAL": self.subnormal,
            "UNPACK": self.unpack,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STEP": self.step,
            "SPLIT_K": self.split_k,
            "SUM_ROWS": min(self.block_n, 16 * self.num_warps),
            "EVEN_K": K % (128 * self.step) == 0,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def grain(group_size: int) -> int:
    """Columns that surely share a group: the largest power of 2 up to a block that divides the group size."""
    return math.gcd(group_size, 128)


FUSED_MAX_M = 512
"""Above this M, dequantizing once and calling the vendor's GEMM is taken to be faster."""

_PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
_PROCESSORS |= {"gfx90a": 110, "gfx942": 304, "gfx950": 256}


def unpack_style(arch: str) -> str:
    """Instructions with which kernels for an architecture unpack."""
    return "ptx" if arch.startswith("sm_") else "gcn" if arch.startswith("gfx9") else "plain"


def keeps_subnormals(arch: str) -> bool:
    """Whether the architecture's matrix unit is known to keep fp16 subnormals."""
    return arch.startswith(("sm_", "gfx94", "gfx95"))


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
    nests = grain(size) >= 32
    decode = M <= MAX_DECODE_M
    if decode:
        block_m = 8 if M <= 8 and arch.startswith("sm_") else 16
    else:
        block_m = 32 if M <= 32 else 64
    block_n = 64 if dtype == torch.float32 else 128
    if group_dim == 1:
        scale_on = "accumulator" if nests and (decode or 4 * block_m <= grain(size)) else "weights"
    else:
        rows = math.gcd(size, block_n)
        scale_on = "x" if rows >= 16 and block_m <= 32 else "weights"
        if scale_on == "x":
            block_n = rows
    while block_n > 16 and block_n >= 2 * N:
        block_n //= 2
    if dtype == torch.float32 and scale_on == "weights" and nests and group_dim == 1:
        scale_on = "accumulator"
    num_warps = max(1, min(4, block_n // 32))
    split_k = 1
    if decode:
        tiles = -(-N // block_n)
        slots = 2 * (processors or _PROCESSORS.get(arch, 108))
        split_k = max(
            1, min(slots // tiles, -(-K // 128) // 4, PARTIAL_ELEMENTS // (tiles * block_n * block_m))
        )
        if tiles > COUNTERS:
            split_k = 1
    return TileConfig(
        kernel="decode" if decode else "gemm",
        block_m=block_m,
        block_n=block_n,
        step=1,
        split_k=split_k,
        num_warps=num_warps,
        num_stages=4 if decode else 3,
        scale_on=scale_on,
        unpack=unpack_style(arch),
        subnormal=dtype == torch.float16 and keeps_subnormals(arch),
    )
