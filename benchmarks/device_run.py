"""The parts of `benchmarks/device.py` in their order, and where their results go."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import device_checks, device_crossover, device_launches, device_speed, results
from benchmarks.device_session import Session
from woq_triton_kernels import tiles


def main(description: str) -> int:
    """Run all parts; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=460, help="time for everything")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --dry-run goes through everything without one")
    try:
        path = results.new_file(options.results, "device", "cpu" if options.dry_run else "cuda")
    except ValueError as error:
        parser.error(str(error))
    session = Session(options.dry_run, options.seconds)
    checks = {
        "numerics": device_checks.numerics,
        "determinism": device_checks.determinism,
        "launches": device_launches.launches,
        "capture": device_checks.capture,
        "compile": device_checks.compiled,
    }
    for name, part in checks.items():
        session.section(name, part)
    right = not session.failures
    session.section("tables", device_speed.tables)
    if right:
        session.section("crossover", device_crossover.crossover)
        session.section("sweep", device_speed.sweep)
    if not options.dry_run:
        results.write(path, "device", "cuda", {**session.found, "failures": session.failures})
        print(path)
        _write_table(session)
    for failure in session.failures:
        print(f"FAILED {failure}")
    run = "dry run" if options.dry_run else "run"
    print(f"{run}: {len(session.failures)} failures" if session.failures else f"{run} passed")
    return 1 if session.failures else 0


def _write_table(session: Session) -> None:
    """Leave the best tiles where `pick_tile`'s shipped tables lie."""
    best = session.found.get("sweep")
    if best and not session.failures:
        print(write_table(best, tiles.CONFIGS))


def write_table(best: list[dict[str, Any]], folder: Path) -> Path:
    """Write what `device_speed.sweep` found as the table that `tiles.load_table` reads.

    Args:
        best: Its result, all of one architecture; of problems in one bucket of M the last counts.
        folder: Where tables lie.
    """
    names = ("N", "K", "num_bits", "group_size", "group_dim", "dtype", "tile")
    entries = [{"M": tiles.bucket(found["M"]), **{name: found[name] for name in names}} for found in best]
    folder.mkdir(exist_ok=True)
    path = folder / f"{best[0]['arch']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
