"""Ranks started by the launcher: results, clean output, and the one error that matters when one fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import rank_functions
from woq_triton.serving.launcher import RankFailed, launch

ROOT = Path(__file__).resolve().parent.parent


def test_results_come_back_by_rank_and_what_ranks_print_goes_to_their_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(rank_functions.answer, (10,), 2, tmp_path, verbose=False) == [10, 11]
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == ["shown by rank 0", "shown by rank 1"]
    for rank in range(2):
        log = (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
        assert {"noise on standard output", "noise from C++", "noise on standard error"} <= set(
            log.splitlines()
        )


def test_signal_handlers_are_those_from_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    launch(rank_functions.answer, (0,), 1, tmp_path, verbose=False)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_rank_that_raised_is_named_though_the_other_lost_its_connection_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed) as failed:
        launch(rank_functions.rank_1_fails, ("raise",), 2, tmp_path, verbose=False)
    assert failed.value.describe(verbose=False) == "error: rank 1: layer 'h.0' has a NaN in it"
    assert "in rank_1_fails" in failed.value.describe(verbose=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("how", "said"), [("SIGSEGV", "SIGSEGV"), ("SIGKILL", "memory runs out"), ("exit", "exit code 3")]
)
def test_the_rank_that_died_without_a_word_is_named(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(RankFailed, match=said) as failed:
        launch(rank_functions.rank_1_fails, (how,), 2, tmp_path, verbose=False)
    assert failed.value.rank == 1


CODE = """
import signal
import sys
from pathlib import Path

# A job that a shell started in the background ignores Ctrl-C, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests import rank_functions
from woq_triton.serving.launcher import Interrupted, launch

if __name__ == "__main__":
    try:
        launch(rank_functions.wait_for_ever, (sys.argv[1],), 2, Path(sys.argv[2]), verbose=False)
    except Interrupted:
        sys.exit(42)
"""


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [
        pytest.param(signal.SIGINT, True, 42, id="ctrl-c"),
        pytest.param(signal.SIGTERM, False, 42, id="terminated"),
        pytest.param(signal.SIGKILL, False, -signal.SIGKILL, id="killed"),
    ],
)
def test_no_rank_outlives_the_launcher(
    tmp_path: Path, number: signal.Signals, to_group: bool, code: int
) -> None:
    started, logs, script = tmp_path / "started", tmp_path / "logs", tmp_path / "script.py"
    started.mkdir()
    logs.mkdir()
    script.write_text(CODE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, str(script), str(started), str(logs)]
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        ranks = wait_for_pids(started, 2)
        (os.killpg if to_group else os.kill)(launcher.pid, number)
        assert launcher.wait(60) == code
        wait_until_gone(ranks)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


def wait_for_pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        texts = [path.read_text(encoding="utf-8") for path in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.1)
    raise TimeoutError(f"{count} ranks did not start")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError(f"ranks {[pid for pid in pids if alive(pid)]} are still there")


def alive(pid: int) -> bool:
    """Whether a process is there, other than as a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
