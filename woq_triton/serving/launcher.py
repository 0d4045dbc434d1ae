"""Run a function on local ranks through torch.distributed's launcher, and tell failures apart.

The launcher starts the processes, gives them a rendezvous on a free loopback port, and ends all of them when
one fails or when it is interrupted. Added here: what ranks print goes to a log file each, so that standard
output stays clean; the rank that failed first is named with its own error, once; ranks do not outlive a
launcher that was killed.
"""

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOG_LINES_SHOWN = 15


class Interrupted(Exception):
    """The launcher was asked to stop; all ranks have ended."""


@dataclass
class RankFailed(Exception):
    """A rank failed, and all others were ended.

    Attributes:
        rank: The rank that failed first.
        message: Its error, or how its process ended.
        details: Its traceback, or the end of its log.
    """

    rank: int
    message: str
    details: str

    def describe(self, verbose: bool) -> str:
        """The error for people; with the details if verbose, or if the message alone says too little."""
        return f"error: rank {self.rank}: {self.message}" + (
            f"\n\n{self.details.rstrip()}" if verbose else ""
        )


@dataclass(frozen=True)
class _Failure:
    time: float
    rank: int
    message: str
    details: str


def launch(
    function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, logs: Path, verbose: bool
) -> list[Any]:
    """Call a function on every rank of this machine.

    Args:
        function: A function of a module, called as ``function(terminal, *arguments)`` with the usual
            environment variables of torch.distributed set. ``terminal`` is the caller's standard error.
        arguments: Picklable.
        ranks: Processes to start.
        logs: An empty folder for what ranks print.
        verbose: Let ranks print to standard error instead.

    Returns:
        What the function returned, by rank.

    Raises:
        RankFailed: A rank raised or died.
        Interrupted: SIGINT, SIGTERM or SIGHUP came.
    """
    # Their account of a failure, a screen long, would come on top of ours.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=5,
    )
    try:
        with _signal_handlers_restored():
            results = elastic_launch(config, _run)(function, arguments, str(logs), verbose)
    except ChildFailedError as error:
        raise _explain(error, logs) from None
    except (SignalException, KeyboardInterrupt):
        raise Interrupted from None
    return [results[rank] for rank in range(ranks)]


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Undo the handlers that torch's launcher installs and leaves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], logs: str, verbose: bool) -> Any:
    """One rank."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher as well, which ends the ranks.
    _end_with_parent()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    _redirect_output(terminal if verbose else open(Path(logs) / f"rank{rank}.log", "w", buffering=1))
    faulthandler.enable()
    try:
        return function(terminal, *arguments)
    except BaseException as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, (ValueError, RuntimeError)) and str(error):
            message = f"{type(error).__name__}: {message}"
        failure = _Failure(time.time(), rank, message, traceback.format_exc())
        _write(failure, Path(logs))
        traceback.print_exc()
        # Another rank's death surfaces here as a lost connection: let the launcher see that death first.
        time.sleep(0.5)
        sys.stderr.flush()
        os._exit(1)  # Threads of the process group could keep an ordinary exit waiting.


def _redirect_output(target: TextIO) -> None:
    """Send this process's standard output and error to a file, also what C++ code writes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target.fileno(), 1)
    os.dup2(target.fileno(), 2)


def _end_with_parent() -> None:
    """Have the kernel end this process when the launcher dies without ending it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(failure: _Failure, logs: Path) -> None:
    partial = logs / f"rank{failure.rank}.partial"
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.rename(logs / f"rank{failure.rank}.failure")


def _explain(error: ChildFailedError, logs: Path) -> RankFailed:
    """The first failure: a rank that died without a word, else the earliest that left one."""
    rank, exit_of = error.get_first_failure()
    failures = [_Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in logs.glob("*.failure")]
    if any(failure.rank == rank for failure in failures):
        first = min(failures, key=lambda failure: failure.time)
        return RankFailed(first.rank, first.message, first.details)
    log = logs / f"rank{rank}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return RankFailed(rank, _how_it_ended(exit_of.exitcode), "\n".join(lines[-_LOG_LINES_SHOWN:]))


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"its process ended with exit code {exitcode} and no message; --verbose shows what it logged"
    name = signal.Signals(-exitcode).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}; --verbose shows what it logged"
