"""Run functions on several processes that form a gloo group, with a hard limit on the time.

Starting a process with torch, DeepSpeed and transformers takes ten seconds, so a pool of ranks is
started once a world size and serves many tests. A pool that misbehaved is ended, and the next test
gets a fresh one.
"""

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(AssertionError):
    """A rank raised; its traceback is the message."""


class Pool:
    """Processes that run the same function at the same time.

    Args:
        world_size: How many.
    """

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Freed tensors go back to the system at once, so that a process's size says what it holds.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.world_size = world_size
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: str, *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Call ``module:function`` on every rank.

        Returns:
            What each rank returned; for a rank that raised, the exception's ``(type name, message)``
            wrapped in a `RankError`; for one that died, None.

        Raises:
            RankError: Some rank did not answer in time, because another one raised; the pool is ended.
            TimeoutError: Some rank did not answer in time; the pool is ended.
        """
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = TimeoutError(
                    f"{function}: ranks {list(waiting.values())} gave no answer in {timeout} s"
                )
                # A rank that raised is why the others wait.
                raise next((a for a in answers.values() if isinstance(a, RankError)), late) from late
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    answers[waiting[pipe]] = None
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


_pools: dict[int, Pool] = {}


def run(world_size: int, function: str, *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
    """Call ``module:function`` on as many ranks; every rank has to succeed.

    Returns:
        What each rank returned.

    Raises:
        RankError: A rank raised or died.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    try:
        answers = pool.run(function, *args, timeout=timeout, **kwargs)
        failed = [answer for answer in answers if answer is None or isinstance(answer, RankError)]
        if failed:
            raise failed[0] if isinstance(failed[0], RankError) else RankError("a rank died")
        return answers
    except BaseException:
        # Whatever went wrong may have left a collective half done.
        _pools.pop(world_size).close()
        raise


def close_all() -> None:
    """End all pools."""
    while _pools:
        _pools.popitem()[1].close()


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Its C++ source would be compiled first; gloo's own all-reduce needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            answer = getattr(importlib.import_module(module), name)(*args, **kwargs)
        except Exception:
            answer = RankError(f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
