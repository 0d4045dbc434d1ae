"""What ranks do in the tests of the launcher: in a module of its own, where a new process finds it."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from torch import distributed


def answer(terminal: TextIO, offset: int) -> int:
    """Print noise, and return something that depends on the rank."""
    print("noise on standard output")
    os.write(1, b"noise from C++\n")
    print("noise on standard error", file=sys.stderr)
    terminal.write(f"shown by rank {os.environ['RANK']}\n")
    distributed.init_process_group("gloo")
    ranks: list[int | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, distributed.get_rank())
    assert ranks == list(range(len(ranks)))
    return distributed.get_rank() + offset


def rank_1_fails(terminal: TextIO, how: str) -> None:
    """Rank 1 raises, dies of a signal or leaves, while the others wait for it."""
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 1:
        if how == "raise":
            raise ValueError("layer 'h.0' has a NaN\nin it")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    distributed.barrier()


def wait_for_ever(terminal: TextIO, started: str) -> None:
    """Leave a file with this rank's process id, then hang where no Python code runs."""
    distributed.init_process_group("gloo")
    (Path(started) / os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    if distributed.get_rank() == 0:
        time.sleep(600)
    distributed.barrier()
