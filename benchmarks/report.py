"""Makes the README's table and the plots from the newest results: `python -m benchmarks.report`.

The table replaces what stands between two comments in the README, so that its numbers are those of a run.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks import cpu_goals, end_to_end, results

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- benchmarks: made by benchmarks/report.py -->", "<!-- end of benchmarks -->"

_BASELINE = "dense bf16"
Records = list[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Write the plots beside the results, and the table into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder that holds the results")
    parser.add_argument("--readme", type=Path, default=README, help="file to put the table into")
    options = parser.parse_args(arguments)
    linear = results.latest(options.results, "linear")
    if linear is None:
        parser.error(f"{options.results} holds no results of `make bench`")
    plots = [plot_speed(linear, options.results / "speed.png")]
    sizes = results.latest(options.results, "sizes")
    if sizes is not None:
        plots.append(plot_roofline(sizes, options.results / "roofline.png"))
    text = section(linear, options.results, plots)
    try:
        results.put(options.readme, START, END, text)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.readme}, {', '.join(map(str, plots))}")
    return 0


def section(linear: dict[str, Any], folder: Path, plots: list[Path]) -> str:
    """Everything that goes into the README."""
    parts = [_where(linear["environment"], linear["ceilings"])]
    for layer in dict.fromkeys(record["layer"] for record in linear["records"]):
        parts.append(speed_table([r for r in linear["records"] if r["layer"] == layer]))
    parts.append(_left_out(linear))
    parts += [f"![{plot.stem}](benchmarks/results/{plot.name})" for plot in plots]
    goals = results.latest(folder, "cpu-goals")
    if goals is not None:
        parts.append(
            "### Goals on a CPU\n\nEach ratio's layers were timed in turn, in one run, each call right "
            "after an untimed one of its own."
        )
        parts.append(cpu_goals.table(goals))
    whole = results.latest(folder, "end-to-end")
    if whole is not None:
        parts.append(end_to_end.section(whole))
    return "\n\n".join(part for part in parts if part)


def speed_table(records: Records) -> str:
    """Milliseconds of one layer by provider and number of tokens; the fastest of each number in bold."""
    tokens = sorted({record["tokens"] for record in records})
    times = {(record["provider"], record["tokens"]): record["seconds"] for record in records}
    first = records[0]
    providers = list(dict.fromkeys(record["provider"] for record in records))
    sizes = {record["provider"]: record["bytes"] for record in records}
    fastest = {m: min(times[p, m] for p in providers if (p, m) in times) for m in tokens}
    lines = [
        f"**{first['layer']}, {first['out_features']}×{first['in_features']}**, median ms a call by tokens",
        "",
        f"| | MiB | {' | '.join(map(str, tokens))} |",
        f"| --- | {' | '.join('---' for _ in range(len(tokens) + 1))} |",
    ]
    for name in providers:
        cells = []
        for m in tokens:
            seconds = times.get((name, m))
            cell = "" if seconds is None else _milliseconds(seconds)
            cells.append(f"**{cell}**" if seconds is not None and seconds == fastest[m] else cell)
        lines.append(f"| {name} | {sizes[name] / 2**20:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_speed(body: dict[str, Any], path: Path) -> Path:
    """Speed-up over the dense bf16 layer against the number of tokens, a panel for each layer and width."""
    records = body["records"]
    base = {(r["layer"], r["tokens"]): r["seconds"] for r in records if r["provider"] == _BASELINE}
    panels = sorted(
        {(r["layer"], r["num_bits"]) for r in records if r["num_bits"] < 16}, key=lambda p: (p[1], p[0])
    )
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(7.5 * columns, 4.4 * rows), squeeze=False, sharey=True, layout="constrained"
    )
    names = list(dict.fromkeys(r["provider"] for r in records if r["provider"] != _BASELINE))
    families = list(dict.fromkeys(map(_family, names)))
    styles = {name: _style(families.index(_family(name)), name) for name in names}
    for axis, (layer, bits) in zip(axes.flat, panels, strict=False):
        shown = [r for r in records if r["layer"] == layer and r["num_bits"] in (bits, 16, 32)]
        for name in names:
            points = sorted(
                (r["tokens"], base[layer, r["tokens"]] / r["seconds"])
                for r in shown
                if r["provider"] == name and (layer, r["tokens"]) in base
            )
            if points:
                axis.plot(*zip(*points, strict=True), label=_family(name), **styles[name])
        axis.axhline(1, color="black", linewidth=1, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({r["tokens"] for r in shown})
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3, which="both")
        axis.set_title(f"{layer}, int{bits}")
        axis.set_xlabel("tokens (rows of x)")
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    for axis in axes[:, 0]:
        axis.set_ylabel(f"speed-up over {_BASELINE}")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    shown_families = [family for family in families if family in lines]
    figure.legend(
        [lines[family] for family in shown_families],
        shown_families,
        loc="outside lower center",
        ncols=4 if columns > 1 else 2,
        fontsize=9,
    )
    figure.suptitle(f"Linear layers on {_machine(body['environment'])}")
    return _save(figure, path)


def plot_roofline(body: dict[str, Any], path: Path) -> Path:
    """Share of the roofline that each layer reaches at one token, against its size."""
    ceilings = body["ceilings"]
    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    records = [r for r in body["records"] if r["tokens"] == min(r["tokens"] for r in body["records"])]
    for index, name in enumerate(dict.fromkeys(r["provider"] for r in records)):
        points = sorted(
            (r["out_features"] * r["in_features"] / 1e6, 100 * share_of_roofline(r, ceilings))
            for r in records
            if r["provider"] == name
        )
        axis.plot(*zip(*points, strict=True), label=name, **_style(index, name) | {"linestyle": "none"})
    axis.axhline(100, color="black", linewidth=1, linestyle=":")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xlabel("weights in the layer, N × K (millions)")
    axis.set_ylabel("% of the roofline at 1 token")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    axis.set_title(
        f"{_machine(body['environment'])}; copies {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s",
        fontsize=10,
    )
    return _save(figure, path)


def share_of_roofline(record: dict[str, Any], ceilings: dict[str, float]) -> float:
    """The least time that reading the weight or multiplying could take, over the time it took."""
    rate = ceilings["fp32_flops_per_second" if record["num_bits"] == 32 else "bf16_flops_per_second"]
    flops = 2 * record["tokens"] * record["out_features"] * record["in_features"]
    least = max(record["bytes"] / ceilings["copy_bytes_per_second"], flops / rate)
    return float(least / record["seconds"])


def _where(environment: dict[str, Any], ceilings: dict[str, float]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    load = environment.get("load_average")
    return (
        f"Measured on {_machine(environment)} on {environment['date'][:10]} ({packages}). "
        f"Large copies reach {ceilings['copy_bytes_per_second'] / 1e9:.1f} GB/s there, products of square "
        f"matrices {_giga(ceilings['bf16_flops_per_second'])} GFLOP/s in bf16 and "
        f"{_giga(ceilings['fp32_flops_per_second'])} in fp32. "
        + (f"Load average at the end {load[0]:.1f}." if load else "")
    )


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.0f}" if rate >= 1e10 else f"{rate / 1e9:.2g}"


def _machine(environment: dict[str, Any]) -> str:
    if "instructions" not in environment:
        return str(environment["device"])
    instructions = ", ".join(environment["instructions"])
    return f"{environment['device']}, {environment['threads']} threads ({instructions})"


def _left_out(body: dict[str, Any]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in body["left_out"].items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    if body.get("interrupted"):
        lines.append("- what is not in the tables: the run was interrupted")
    if not lines:
        return ""
    return "\n".join(["Not measured:", "", *lines])


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _family(provider: str) -> str:
    """A provider's name without its width: the same line in every panel."""
    return re.sub(r" (int4|int8|nf4)(?=,|$)", "", re.sub(r"int[48]pack", "packed op", provider))


def _style(index: int, name: str) -> dict[str, Any]:
    ours = name.startswith("woq_triton")
    return {
        "color": plt.get_cmap("tab20")(2 * index % 20 + 2 * index // 20),
        "linewidth": 2.4 if ours else 1.2,
        "marker": "o" if ours else "sv^D<>Px"[index % 8],
        "markersize": 5,
        "linestyle": "-" if ours else "--",
    }


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
