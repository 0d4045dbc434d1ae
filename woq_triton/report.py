"""What `quantize_model` did: per layer, what was left alone and why, and the bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from woq_triton.scheme import QuantScheme


@dataclass(frozen=True)
class LayerReport:
    """A layer that was quantized.

    Attributes:
        name: Its name in the model.
        kind: Class of the dense layer.
        shape: ``(out_features, in_features)`` of this rank's weight.
        scheme: How it was quantized.
        bytes_before: Of the dense weight; 0 where it is tied to a layer listed before.
        bytes_after: Of codes, scale and min; 0 likewise.
        relative_error: Frobenius norm of the weight's change over that of the weight.
        implementation: Which implementation serves it (`woq_triton.backends`).
        tied_to: The layer that it shares its weight with, if any.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    scheme: QuantScheme
    bytes_before: int
    bytes_after: int
    relative_error: float
    implementation: str
    tied_to: str | None = None


@dataclass(frozen=True)
class SkippedLayer:
    """A layer with weights that was left alone.

    Attributes:
        name: Its name in the model.
        kind: Its class.
        reason: Why.
        nbytes: Of its own parameters of two or more dimensions.
    """

    name: str
    kind: str
    reason: str
    nbytes: int


@dataclass
class QuantizationReport:
    """Everything that `quantize_model` did to a model, on this rank.

    Attributes:
        layers: What was quantized.
        skipped: What a key matched but was left alone, with the reason.
        unmatched_keys: Keys of the config that no layer's name has.
    """

    layers: list[LayerReport] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    unmatched_keys: list[str] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Bytes of the quantized layers' weights before; tied weights count once."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the quantized layers' weights now; tied weights count once."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def bytes_skipped(self) -> int:
        """Bytes of the weights that were left alone."""
        return sum(layer.nbytes for layer in self.skipped)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, strings and numbers."""
        totals = {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_skipped": self.bytes_skipped,
        }
        return {**asdict(self), **totals}

    def __str__(self) -> str:
        """A table for people."""
        rows = [("layer", "class", "shape", "scheme", "before", "after", "error", "served by")]
        for layer in self.layers:
            tied = f"tied to {layer.tied_to}"
            rows.append(
                (
                    layer.name,
                    layer.kind,
                    f"{layer.shape[0]}x{layer.shape[1]}",
                    str(layer.scheme),
                    tied if layer.tied_to else format_bytes(layer.bytes_before),
                    "" if layer.tied_to else format_bytes(layer.bytes_after),
                    f"{layer.relative_error:.2%}",
                    layer.implementation,
                )
            )
        lines = _table(rows)
        if self.skipped:
            lines += ["", "left alone:"]
            skipped = [(s.name, s.kind, format_bytes(s.nbytes), s.reason) for s in self.skipped]
            lines += [f"  {line}" for line in _table(skipped)]
        if self.unmatched_keys:
            lines += ["", f"keys that matched no layer: {', '.join(map(repr, self.unmatched_keys))}"]
        lines += [
            "",
            f"{len(self.layers)} layers quantized: {format_bytes(self.bytes_before)} -> "
            f"{format_bytes(self.bytes_after)}; {format_bytes(self.bytes_skipped)} left alone",
        ]
        return "\n".join(lines)


def format_bytes(nbytes: int) -> str:
    """Bytes with a binary unit, such as ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
