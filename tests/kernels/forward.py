"""Runs test functions in a process of their own, in which Triton is imported the other way."""

import atexit
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_executor: ProcessPoolExecutor | None = None


def _call(module: str, function: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), function)(**arguments)


def run_elsewhere(interpret: bool, module: str, function: str, arguments: dict[str, Any]) -> None:
    """Call a test function in the helper process; what it raises is raised here."""
    global _executor
    if _executor is None:
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
        try:
            context = multiprocessing.get_context("spawn")
            _executor = ProcessPoolExecutor(max_workers=1, mp_context=context)
            _executor.submit(int).result()  # the process starts here, and reads the environment
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        atexit.register(_executor.shutdown)
    _executor.submit(_call, module, function, arguments).result()


def pyfunc_call(item: Any, interpret: bool) -> bool | None:
    """What `pytest_pyfunc_call` does in a folder whose tests need Triton imported one way."""
    import triton

    if triton.knobs.runtime.interpret == interpret:
        return None
    names = item._fixtureinfo.argnames
    arguments = {name: item.funcargs[name] for name in names}
    run_elsewhere(interpret, item.module.__name__, item.function.__name__, arguments)
    return True
