"""Run a function on local ranks through torch.distributed's launcher, and tell failures apart.

The launcher starts the processes, gives them a rendezvous on a free loopback port, and ends all of them when
one fails or when it is interrupted; `woq_triton.serving.rank_process` is what it starts. Added here: the rank
that failed first is named with its own error, once.
"""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from woq_triton.serving import rank_process
from woq_triton.serving.rank_process import Request

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOG_LINES_SHOWN = 15


class Interrupted(Exception):
    """The launcher was asked to stop; all ranks have ended."""


@dataclass(eq=False)
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
        """The error for people, with the details if verbose."""
        details = f"\n\n{self.details.rstrip()}" if verbose else ""
        return f"error: rank {self.rank}: {self.message}{details}"


def launch(
    function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, folder: Path, verbose: bool
) -> list[Any]:
    """Call a function on every rank of this machine.

    Args:
        function: A function of a module, called as ``function(terminal, *arguments)`` with the usual
            environment variables of torch.distributed set. ``terminal`` is the caller's standard error.
        arguments: Picklable.
        ranks: Processes to start.
        folder: An empty folder for what goes to the ranks and comes from them, their logs included.
        verbose: Let ranks print to standard error instead.

    Returns:
        What the function returned, by rank.

    Raises:
        RankFailed: A rank raised or died.
        Interrupted: SIGINT, SIGTERM or SIGHUP came.
    """
    _silence_launcher()
    Request(function, arguments, verbose).write(folder)
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
        # Not SIGINT: that one would be passed on, and have each rank tell where it was.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    try:
        with _signal_handlers_restored():
            # A command, unlike a function, gets a session of its own, which no terminal's Ctrl-C reaches.
            elastic_launch(config, sys.executable)("-m", rank_process.__name__, str(folder))
    except ChildFailedError as error:
        raise _explain(error, folder) from None
    except (SignalException, KeyboardInterrupt):
        raise Interrupted from None
    return [rank_process.read_result(folder, rank) for rank in range(ranks)]


def _silence_launcher() -> None:
    """Keep torch's launcher from telling of failures and signals too: each of its modules sets a level."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL)


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


def _explain(error: ChildFailedError, folder: Path) -> RankFailed:
    """The first failure: a rank that died without a word, else the earliest that left one."""
    rank, process = error.get_first_failure()
    failures = rank_process.read_failures(folder)
    if any(failure.rank == rank for failure in failures):
        first = min(failures, key=lambda failure: failure.time)
        return RankFailed(first.rank, first.message, first.details)
    log = rank_process.log_file(folder, rank)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return RankFailed(rank, _how_it_ended(process.exitcode), "\n".join(lines[-_LOG_LINES_SHOWN:]))


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"its process ended with exit code {exitcode} and no message; --verbose shows what it logged"
    name = signal.Signals(-exitcode).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}; --verbose shows what it logged"
