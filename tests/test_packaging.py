"""What the distribution holds, what importing it needs, and that its parts say the same version."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import woq_triton

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_kernels_folder_is_no_package_that_would_hide_hugging_faces() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_wheel_has_exactly_the_two_packages_at_its_top(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"woq_triton", "woq_triton_kernels"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with git's list of files")
def test_the_wheel_has_every_file_of_the_packages_that_git_has(wheel_names: list[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "woq_triton", "kernels/woq_triton_kernels"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = {name.removeprefix("kernels/") for name in listed.stdout.splitlines()}
    assert files - set(wheel_names) == set()


def test_both_packages_say_that_they_are_typed(wheel_names: list[str]) -> None:
    assert {"woq_triton/py.typed", "woq_triton_kernels/py.typed"} <= set(wheel_names)


def test_the_version_is_the_same_everywhere() -> None:
    project = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert project is not None
    assert project[1] == woq_triton.__version__


def test_importing_needs_neither_triton_nor_deepspeed_nor_transformers_and_still_serves() -> None:
    code = """
import sys

ABSENT = {"triton", "deepspeed", "transformers", "typer", "tqdm", "pydantic", "numpy"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
import woq_triton

weight = torch.randn(48, 96) + 1
qweight = woq_triton.quantize(weight, woq_triton.QuantScheme(8, 32))
x = torch.randn(3, 96)
dense = x @ weight.t()
error = (woq_triton.linear(x, qweight) - dense).norm() / dense.norm()
assert error < 0.01, error
assert "deepspeed" not in sys.modules and not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_command_line_without_its_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from woq_triton.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert "pip install 'woq_triton[autotp]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_module_of_the_packages_says_what_it_is_for() -> None:
    folders = [ROOT / "woq_triton", ROOT / "kernels" / "woq_triton_kernels"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    without = [
        str(path) for path in files if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert without == []
