"""How a weight is quantized: the four settings of DeepSpeed's weight quantization config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class QuantScheme:
    """Settings of group-wise weight quantization, checked when made.

    Args:
        num_bits: Bits in a code, 4 or 8.
        group_size: Weights that share one scale (and minimum); -1, or more than the dimension has,
            means the whole dimension. A dimension that is no multiple of it ends in a shorter group.
        group_dim: Dimension of the ``[out_features, in_features]`` weight that groups run along:
            1 (in_features) or 0 (out_features).
        symmetric: ``w = (q - 2**(num_bits-1)) * scale`` if true, else ``w = q * scale + min``.

    Raises:
        ValueError: A setting has a value that is not listed above.
    """

    num_bits: int = 4
    group_size: int = 128
    group_dim: int = 1
    symmetric: bool = False

    def __post_init__(self) -> None:
        """Refuse what no implementation can serve."""
        _require("num_bits", self.num_bits, _is_int(self.num_bits) and self.num_bits in (4, 8), "4 or 8")
        size_ok = _is_int(self.group_size) and (1 <= self.group_size < 2**31 or self.group_size == -1)
        _require("group_size", self.group_size, size_ok, "a positive integer, or -1 for the whole dimension")
        dim_ok = _is_int(self.group_dim) and self.group_dim in (0, 1)
        _require(
            "group_dim", self.group_dim, dim_ok, "1 (groups along in_features) or 0 (along out_features)"
        )
        _require("symmetric", self.symmetric, isinstance(self.symmetric, bool), "true or false")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "QuantScheme":
        """Make a scheme from a config's dictionary.

        Raises:
            ValueError: A field is unknown or has a bad value.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; the fields are {', '.join(known)}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a config's dictionary."""
        return asdict(self)

    @property
    def zero_code(self) -> int:
        """The code that stands for 0 in a symmetric group."""
        return int(2 ** (self.num_bits - 1))

    @property
    def max_code(self) -> int:
        """The largest code."""
        return int(2**self.num_bits - 1)

    def resolve_group_size(self, shape: tuple[int, int]) -> int:
        """The group size with -1 replaced by the length of the grouped dimension (at least 1)."""
        return max(1, shape[self.group_dim]) if self.group_size == -1 else self.group_size

    def metadata_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of scale and min for an ``[out_features, in_features]`` weight."""
        groups = -(-shape[self.group_dim] // self.resolve_group_size(shape))
        return (groups, shape[1]) if self.group_dim == 0 else (shape[0], groups)

    def __str__(self) -> str:
        """Short form for reports, such as ``int4 g128 dim1 asymmetric``."""
        size = "channel" if self.group_size == -1 else f"g{self.group_size}"
        return f"int{self.num_bits} {size} dim{self.group_dim} {'' if self.symmetric else 'a'}symmetric"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")
