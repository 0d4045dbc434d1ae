"""Imports run one way, and only the places meant for it know DeepSpeed, transformers and Triton."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"woq_triton": ROOT / "woq_triton", "woq_triton_kernels": ROOT / "kernels" / "woq_triton_kernels"}

# Each step may import itself and what stands before it. A package stands for all its modules.
CHAIN = [
    ["woq_triton_kernels", "woq_triton.scheme", "woq_triton.mapped_memory"],
    ["woq_triton.config", "woq_triton.report"],
    ["woq_triton.quantize"],
    ["woq_triton.reference", "woq_triton.checks"],
    ["woq_triton.backends"],
    ["woq_triton.ops"],
    ["woq_triton.weight"],
    ["woq_triton.lazy_weight", "woq_triton.deepspeed_format"],
    ["woq_triton.modules"],
    ["woq_triton.model", "woq_triton.warmup"],
    ["woq_triton.autotp"],
    ["woq_triton.api"],
    ["woq_triton"],
    ["woq_triton.serving", "woq_triton.audit"],
    ["woq_triton.commands"],
    ["woq_triton.cli"],
    ["woq_triton.__main__"],
]
STEP = {name: step for step, names in enumerate(CHAIN) for name in names}

# Who may import a package that not every user has.
USERS = {
    "triton": ["woq_triton_kernels", "woq_triton.backends.triton", "woq_triton.audit"],
    "deepspeed": ["woq_triton.autotp", "woq_triton.serving"],
    "transformers": ["woq_triton.serving"],
    "huggingface_hub": ["woq_triton.serving"],
    "tqdm": ["woq_triton.commands", "woq_triton.warmup", "woq_triton.serving"],
    "typer": ["woq_triton.cli", "woq_triton.commands"],
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> set[str]:
    """Every module that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module; `from module import name` the module.
            found |= {name if name in MODULES else node.module for name in submodules}
    return found


def within(module: str, names: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def step_of(module: str) -> int | None:
    """The step of the longest name in the chain that covers a module; `woq_triton` covers only itself."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in STEP and (name != "woq_triton" or module == name):
            return STEP[name]
    return None


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_place_in_the_chain(module: str) -> None:
    assert step_of(module) is not None, f"{module}: add it to CHAIN in {Path(__file__).name}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_that_stands_above_it(module: str) -> None:
    step = step_of(module)
    assert step is not None
    above = {name: step_of(name) for name in imports(module) if name.split(".")[0] in PACKAGES}
    assert {name for name, other in above.items() if other is None or other > step} == set()


@pytest.mark.parametrize("package", USERS)
def test_an_optional_package_is_imported_only_where_it_belongs(package: str) -> None:
    users = {module for module in MODULES if any(name.split(".")[0] == package for name in imports(module))}
    assert {module for module in users if not within(module, USERS[package])} == set()


def test_the_kernel_package_imports_torch_and_triton_and_nothing_else_that_is_installed() -> None:
    allowed = {"torch", "triton", "woq_triton_kernels"}
    standard = sys.stdlib_module_names
    kernels = [module for module in MODULES if within(module, ["woq_triton_kernels"])]
    roots = {name.split(".")[0] for module in kernels for name in imports(module)}
    assert roots - allowed - standard == set()


def test_the_layout_needs_no_triton() -> None:
    assert all(name.split(".")[0] != "triton" for name in imports("woq_triton_kernels.layout"))
