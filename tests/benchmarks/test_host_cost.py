"""The measurement of host cost runs without a GPU, and the README states what a run found."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import host_cost, results
from tests import stub_cuda


@pytest.mark.skipif(bool(stub_cuda.unusable()), reason=stub_cuda.unusable() or "usable")
def test_it_measures_writes_and_puts_its_table_into_the_page(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{host_cost.START}\n{host_cost.END}\nafter\n")
    options = ["--rounds", "2", "--repeats", "3", "--results", str(tmp_path), "--readme", str(page)]
    root = results.FOLDER.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_cost", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("host-cost-*.json")
    found = json.loads(path.read_text())
    assert [problem["splits"] > 1 for problem in found["problems"]] == [True, False]
    assert host_cost.table(found) in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_the_readme_states_the_committed_run():
    found = results.latest(results.FOLDER, "host-cost")
    assert found is not None
    assert host_cost.table(found) in host_cost.README.read_text(encoding="utf-8")
