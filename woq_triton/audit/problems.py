"""The matrix products that the audit looks at: layers of well-known models as AutoTP shards them."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from woq_triton.audit.compilation import AuditError


@dataclass(frozen=True)
class Problem:
    """One product ``[M, K] x [N, K]^T`` with a quantized weight.

    Attributes:
        M: Rows of x.
        N: out_features.
        K: in_features.
        num_bits: 4 or 8.
        group_size: Weights in a group; -1 for one group.
        group_dim: Dimension that groups run along.
        dtype: "float16", "bfloat16" or "float32": of x and of scale and min.
        symmetric: Whether there is no min.
        name: Model, tensor-parallel size and layer.
    """

    M: int
    N: int
    K: int
    num_bits: int = 4
    group_size: int = 128
    group_dim: int = 1
    dtype: str = "float16"
    symmetric: bool = False
    name: str = ""

    @property
    def resolved_group_size(self) -> int:
        """The group size with -1 resolved to the dimension."""
        return self.group_size if self.group_size > 0 else (self.K if self.group_dim == 1 else self.N)

    @property
    def metadata_shape(self) -> tuple[int, int]:
        """Shape of scale and min."""
        size = self.resolved_group_size
        if self.group_dim == 1:
            return self.N, math.ceil(self.K / size)
        return math.ceil(self.N / size), self.K

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of code, scale and min to a weight."""
        element = 4 if self.dtype == "float32" else 2
        metadata = math.prod(self.metadata_shape) * element * (1 if self.symmetric else 2)
        return self.num_bits / 8 + metadata / (self.N * self.K)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder that its linear layers follow from."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def shapes(self, tp: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of one rank's layers, as AutoTP shards separate projections."""
        return {
            "q_proj": (self.heads * self.head_dim // tp, self.hidden),
            "k_proj": (max(1, self.kv_heads // tp) * self.head_dim, self.hidden),
            "o_proj": (self.hidden, self.heads * self.head_dim // tp),
            "gate_proj": (self.intermediate // tp, self.hidden),
            "down_proj": (self.hidden, self.intermediate // tp),
            "lm_head": (self.vocabulary, self.hidden // tp),
        }


MODELS = {
    "llama-3-8b": Model(4096, 14336, 32, 8, 128, 128256),
    "llama-3-70b": Model(8192, 28672, 64, 8, 128, 128256),
    "qwen3-32b": Model(5120, 25600, 64, 8, 128, 151936),
}
"""Sizes from the models' published configurations."""

DECODE_M = (1, 2, 4, 8, 16)
PREFILL_M = (32, 64, 256, 1024)
TENSOR_PARALLEL = (1, 2, 4, 8)
GROUP_SIZES = (32, 64, 128, -1)
DTYPES = ("float16", "bfloat16")


def shapes_of(models: Iterable[str], tps: Iterable[int]) -> list[Problem]:
    """One problem a shape, M and scheme still to be set.

    Raises:
        AuditError: A model is not known.
    """
    tps = list(tps)
    shapes = []
    for name in models:
        if name not in MODELS:
            raise AuditError(f"unknown model {name!r}: choose from {', '.join(MODELS)}, or give --shape NxK")
        for tp in tps:
            for layer, (N, K) in MODELS[name].shapes(tp).items():
                shapes.append(Problem(1, N, K, name=f"{name} tp{tp} {layer}"))
    return shapes


def parse_shape(text: str) -> Problem:
    """A shape written as ``NxK``, out_features first.

    Raises:
        AuditError: It is not written so.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or int(match[1]) == 0 or int(match[2]) == 0:
        raise AuditError(f"a shape is written OUTxIN, for instance 4096x11008, not {text!r}")
    if int(match[1]) * int(match[2]) >= 2**48:
        raise AuditError(f"shape {text} has 2**48 weights or more; give that of one layer")
    return Problem(1, int(match[1]), int(match[2]), name=text)


def expand(
    shapes: Iterable[Problem],
    *,
    ms: Iterable[int] = DECODE_M,
    num_bits: Iterable[int] = (4, 8),
    group_sizes: Iterable[int] = GROUP_SIZES,
    group_dims: Iterable[int] = (1, 0),
    dtypes: Iterable[str] = DTYPES,
    symmetric: Iterable[bool] = (False,),
) -> Iterator[Problem]:
    """Every shape with every M and scheme."""
    ms, num_bits, group_sizes = list(ms), list(num_bits), list(group_sizes)
    group_dims, dtypes, symmetric = list(group_dims), list(dtypes), list(symmetric)
    for shape in shapes:
        for M in ms:
            for bits in num_bits:
                for dtype in dtypes:
                    for dim in group_dims:
                        for size in group_sizes:
                            for sym in symmetric:
                                yield replace(
                                    shape,
                                    M=M,
                                    num_bits=bits,
                                    dtype=dtype,
                                    group_dim=dim,
                                    group_size=size,
                                    symmetric=sym,
                                )
