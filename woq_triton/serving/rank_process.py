"""The process of one rank: `python -m woq_triton.serving.rank_process FOLDER`, started by the launcher.

The folder holds the request, and takes what the rank returns, how it failed, and what it printed: standard
output belongs to the launcher alone. A rank does not outlive a launcher that was killed.
"""

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """What every rank calls.

    Attributes:
        function: A function of a module, called as ``function(terminal, *arguments)``.
        arguments: Picklable.
        verbose: Print to standard error rather than to the log.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    verbose: bool

    def write(self, folder: Path) -> None:
        """Leave the request in a folder, after the paths by which a rank finds the function's module."""
        with open(folder / "request", "wb") as file:
            pickle.dump(sys.path, file)
            pickle.dump(self, file)

    @classmethod
    def read(cls, folder: Path) -> "Request":
        """The request in a folder; takes over the paths."""
        with open(folder / "request", "rb") as file:
            sys.path = pickle.load(file)
            request: Request = pickle.load(file)
        return request


@dataclass(frozen=True)
class Failure:
    """A rank's own account of why it failed.

    Attributes:
        time: When, in seconds since the epoch.
        rank: Which.
        message: Its error, in one line.
        details: Its traceback.
    """

    time: float
    rank: int
    message: str
    details: str


def log_file(folder: Path, rank: int) -> Path:
    """Where a rank's standard output and error go."""
    return folder / f"rank{rank}.log"


def read_result(folder: Path, rank: int) -> Any:
    """What a rank's function returned."""
    with open(folder / f"rank{rank}.result", "rb") as file:
        return pickle.load(file)


def read_failures(folder: Path) -> list[Failure]:
    """The accounts of all ranks that left one."""
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.failure")]


def main(folder: Path) -> None:
    """Run the request in a folder as the rank that the environment names."""
    _end_with_parent()
    faulthandler.enable()
    rank = int(os.environ["RANK"])
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    log = open(log_file(folder, rank), "w", buffering=1)
    _send_output_to(log)
    try:
        request = Request.read(folder)
        if request.verbose:
            _send_output_to(terminal)
        result = request.function(terminal, *request.arguments)
        with open(folder / f"rank{rank}.result", "wb") as file:
            pickle.dump(result, file)
    except BaseException as error:
        traceback.print_exc()
        _write(Failure(time.time(), rank, _in_one_line(error), traceback.format_exc()), folder)
        # Another rank's death surfaces here as a lost connection: let the launcher see that death first.
        time.sleep(0.5)
        code = 1
    else:
        code = 0
    for stream in (terminal, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # Threads of the process group could keep an ordinary exit waiting.


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    # Kinds whose text speaks for itself; a KeyError's, for one, does not.
    speaks = isinstance(error, (ValueError, TypeError, RuntimeError, OSError)) and text
    return text if speaks else f"{type(error).__name__}: {text}".removesuffix(": ")


def _send_output_to(target: TextIO) -> None:
    """Send this process's standard output and error to a file, also what C++ code writes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target.fileno(), 1)
    os.dup2(target.fileno(), 2)


def _end_with_parent() -> None:
    """Have the kernel end this process when the launcher dies without ending it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(failure: Failure, folder: Path) -> None:
    partial = folder / f"rank{failure.rank}.partial"
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.rename(partial.with_suffix(".failure"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
