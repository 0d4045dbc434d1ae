"""Results as JSON files, with the environment they come from. A file is never overwritten."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"

_PACKAGES = (
    "torch", "triton", "deepspeed", "transformers", "torchao", "bitsandbytes", "hqq", "optimum-quanto",
    "gemlite", "humming-kernels", "conch-triton-kernels", "vllm",
)  # fmt: skip


def environment(device: str) -> dict[str, Any]:
    """What a reader has to know about where numbers come from."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device_name(device),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda or torch.version.hip,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    else:
        capabilities = torch.cpu.get_capabilities()
        wanted = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16")
        found["instructions"] = [name for name in wanted if capabilities.get(name)]
        found["torch_capability"] = torch.backends.cpu.get_cpu_capability()
    return found


def device_name(device: str) -> str:
    """The name of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    return str(name)


def new_file(folder: Path, kind: str, device: str) -> Path:
    """Path of a file that does not exist yet, in a folder that can be written to.

    Raises:
        ValueError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"results folder {folder} cannot be written to ({error.strerror}); choose another"
        ) from None
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return folder / f"{kind}-{slug}-{stamp}.json"


def write(path: Path, kind: str, device: str, body: dict[str, Any]) -> None:
    """Write results beside the environment, whole or not at all; ends the program if that fails."""
    text = json.dumps({"kind": kind, "environment": environment(device), **body}, indent=1, allow_nan=False)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        print(text)
        sys.exit(f"results cannot be written to {path} ({error.strerror}); they are printed instead")


def latest(folder: Path, kind: str) -> dict[str, Any] | None:
    """The newest results of a kind, or None."""
    paths = sorted(folder.glob(f"{kind}-*.json"), key=lambda path: path.stem.rsplit("-", 2)[1:])
    if not paths:
        return None
    loaded: dict[str, Any] = json.loads(paths[-1].read_text(encoding="utf-8"))
    return loaded


def put(readme: Path, start: str, end: str, text: str) -> None:
    """Replace what stands between two lines of a page.

    Raises:
        ValueError: The file cannot be read or lacks the lines.
    """
    try:
        page = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{readme} cannot be read: {error.strerror}") from None
    head, found_start, rest = page.partition(start)
    _, found_end, tail = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"{readme} lacks the lines {start} and {end}, between which the table goes")
    readme.write_text(f"{head}{start}\n\n{text}\n\n{end}{tail}", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
