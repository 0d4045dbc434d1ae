"""The goals on a CPU as Markdown: met or missed, and what bounds those beside dense bf16."""

from typing import Any

ALONE = "torch int4pack"
"""torch's int4 op by itself, timed in the same turns as this package's layer, which calls it."""

Timings = list[dict[str, Any]]


def table(body: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| weight | tokens | beside | this package | the other | ratio | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in body["records"]:
        shape = "×".join(map(str, record["shape"]))
        lines.append(
            f"| int{record['num_bits']} {shape} | {record['tokens']} | {record['beside']} "
            f"| {1e3 * record['seconds']:.2f} ms | {1e3 * record['beside_seconds']:.2f} ms "
            f"| {record['ratio']:.2f} | {record['goal']:g} | {'met' if record['met'] else 'missed'} |"
        )
    sizes = {name: f"{value / 2**20:.0f} MiB" for name, value in body["memory"].items()}
    lines += [
        "",
        f"Memory of the process above its start, eight layers of 4096×4096: {sizes['resident_dense']} dense "
        f"({sizes['dense_weight_bytes']} of weights), {sizes['resident_quantized']} quantized to int4 "
        f"({sizes['quantized_weight_bytes']} of weights), {sizes['resident_after_use']} after products with "
        "1, 16 and 128 tokens.",
    ]
    return "\n".join([*lines, "", *_bounds(body)])


def _bounds(body: dict[str, Any]) -> list[str]:
    """What bounds the ratios to dense bf16, in numbers of the same run."""
    timings = body["timings"]
    reads, flops = (body["ceilings"][key] / 1e9 for key in ("read_bytes_per_second", "fp32_flops_per_second"))
    one = {
        name: [t for t in timings if t["provider"] == name and t["tokens"] == 1]
        for name in ("dense bf16", "woq_triton int4", ALONE, "woq_triton int8")
    }
    if not all(one.values()):
        return []
    dense, int4, alone, int8 = (_span([t["bytes"] / t["seconds"] / 1e9 for t in t1]) for t1 in one.values())
    bytes_of = {name: found[0]["bytes"] for name, found in one.items()}
    smaller4, smaller8 = (bytes_of["dense bf16"] / bytes_of[f"woq_triton int{bits}"] for bits in (4, 8))
    return [
        f"At 1 token the time is that of reading the weight. Dense bf16 reads its own at {dense} GB/s, int4 "
        f"at {int4} (torch's int4 op alone, without the part of the zero points that bf16 cannot hold, at "
        f"{alone}), int8 at {int8}; summing a large tensor reads {reads:.1f}. The int4 weight is "
        f"{smaller4:.1f} times smaller than the bf16 one, the int8 weight {smaller8:.1f} times: a greater "
        "ratio has to come from dense bf16 reading more slowly.",
        "",
        f"At 16 tokens torch's int4 op multiplies in fp32, at {_rates(timings)} GFLOP/s; a large fp32 "
        f"product reaches {flops:.0f}, and dense bf16 has bf16 instructions.",
        *_without_bf16(body["without_bf16_instructions"] or []),
    ]


def _rates(timings: Timings) -> str:
    found = [t for t in timings if t["provider"] == ALONE and t["tokens"] == 16]
    return _span([2e-9 * t["tokens"] * t["shape"][0] * t["shape"][1] / t["seconds"] for t in found])


def _without_bf16(records: Timings) -> list[str]:
    ratios: dict[str, list[float]] = {}
    for record in records:
        key = f"int{record['num_bits']} at {record['tokens']} token{'s' if record['tokens'] > 1 else ''}"
        ratios.setdefault(key, []).append(record["ratio"])
    if not ratios:
        return []
    return [
        "",
        "Without bf16 instructions (`ONEDNN_MAX_CPU_ISA=AVX512_CORE`), as on CPUs that lack them, times as "
        f"fast as dense bf16: {', '.join(f'{key} {_span(found)}' for key, found in ratios.items())}.",
    ]


def _span(values: list[float]) -> str:
    """The least and the greatest of some numbers, or the one that both are."""
    low, high = (f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
