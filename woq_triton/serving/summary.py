"""The summary of `woq-triton generate` as text for people."""

from typing import Any

from woq_triton.report import format_bytes
from woq_triton.scheme import QuantScheme

SMALL_SHARE = 0.1
"""Of a process's memory; below it, the libraries' own ups and downs hide what quantizing weights saves."""


def render(summary: dict[str, Any], report: str | None) -> str:
    """Lay out a summary of `woq_triton.serving.runs` as plain text, with rank 0's report if given."""
    scheme = QuantScheme.from_dict(summary["scheme"])
    ranks = f"{summary['tp']} rank{'s' if summary['tp'] > 1 else ''}"
    parts = [
        f"{summary['model']} on {ranks}, {summary['device']}, {summary['dtype']}, quantized to {scheme}",
        _measurements(summary),
        _texts(summary),
    ]
    if report is not None:
        parts.insert(1, ("on rank 0:\n" if summary["tp"] > 1 else "") + report)
    if "tp_comparison" in summary:
        parts.append(_tp_comparison(summary))
    return "\n\n".join(parts)


def _measurements(summary: dict[str, Any]) -> str:
    dense, quantized = summary["dense"], summary["quantized"]
    rows: list[tuple[str, ...]] = [("", "dense", "quantized", "")]
    place = "GPU" if summary["device"] == "cuda" else "process"
    for memory in summary["memory"]:
        for title, field, note in (
            ("weights", "weight_bytes", ""),
            (f"{place} memory", "resident_bytes", f"{format_bytes(memory['start_bytes'])} before loading"),
            (f"{place} peak", "peak_bytes", "while generating"),
        ):
            values = [format_bytes(memory[phase][field]) for phase in ("dense", "quantized")]
            rows.append((f"rank {memory['rank']}: {title}", *values, note))
    for title, field in (("prefill", "prefill_tokens_per_second"), ("decode", "decode_tokens_per_second")):
        rows.append(
            (f"{title}, tokens/s", _number(dense[field], ".1f"), _number(quantized[field], ".1f"), "")
        )
    change = _number(summary["perplexity_change"], "+.2%")
    perplexities = [_number(phase["perplexity"], ".3f") for phase in (dense, quantized)]
    rows.append(("perplexity", *perplexities, f"{change} over {summary['eval_tokens']} tokens"))
    rows.append(("KL divergence", "", _number(summary["kl_divergence_nats"], ".4g"), "nats a token, mean"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {note}".rstrip() for a, b, c, note in rows
    ]
    return "\n".join([*lines, *_memory_note(summary, place)])


def _memory_note(summary: dict[str, Any], place: str) -> list[str]:
    """Which rows tell of the model, where it is too small for the others to."""
    shares = [m["dense"]["weight_bytes"] / m["dense"]["resident_bytes"] for m in summary["memory"]]
    if max(shares) >= SMALL_SHARE:
        return []
    return [
        f"note: the dense weights are only {max(shares):.1%} of the {place} memory, and the rest, such as "
        "libraries, varies by more;",
        "      what quantization saves is in the rows 'weights'",
    ]


def _number(value: float | None, form: str) -> str:
    """A number, or the sign for one that is not there or not finite."""
    return "-" if value is None else format(value, form)


def _texts(summary: dict[str, Any]) -> str:
    count = len(summary["dense"]["tokens"])
    return "\n".join(
        [
            f"prompt:    {summary['prompt']}",
            f"dense:     {_indent(summary['dense']['text'])}",
            f"quantized: {_indent(summary['quantized']['text'])}",
            f"dense and quantized: {_difference(summary['first_difference'], count)}",
        ]
    )


def _indent(text: str) -> str:
    return text.strip().replace("\n", "\n           ")


def _difference(difference: dict[str, Any] | None, count: int) -> str:
    if difference is None:
        return f"all {count} tokens equal"
    first, second = (repr(piece) if piece is not None else "the end" for piece in difference["pieces"])
    return f"first different token is number {difference['position'] + 1} of {count}: {first} and {second}"


def _tp_comparison(summary: dict[str, Any]) -> str:
    lines = [f"tp {summary['tp']} against tp 1:"]
    for phase, comparison in summary["tp_comparison"].items():
        count = len(summary[phase]["tokens"])
        lines.append(
            f"  {phase + ':':<10} {_difference(comparison['first_difference'], count)}; "
            f"logits differ by {comparison['logits_relative_difference']:.2g} (relative)"
        )
    return "\n".join(lines)
