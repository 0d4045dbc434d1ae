"""Who is measured: this package, dense layers, stock DeepSpeed and other packages, each behind one function.

A provider makes an `nn.Module` from a dense weight. `check` is the gate before any timing: the module's
result must not be further from the exact product with the dense weight than twice what plain rounding to as
many bits costs, so that formats which differ in detail pass and a wrong kernel does not.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem
from woq_triton import quantize

Build = Callable[[Tensor, Problem], nn.Module]


@dataclass(frozen=True)
class Provider:
    """Something that multiplies with a weight.

    Attributes:
        name: As tables show it.
        num_bits: Of its codes; 16 and 32 for dense weights.
        dtype: Of its activations.
        build: Makes a module from a dense weight ``[out_features, in_features]`` on the device.
        needs: Packages that it comes from.
        devices: Where it runs.
        ours: Whether it belongs to this package: then failing the gate is an error of ours.
        note: What a reader has to know to compare.
    """

    name: str
    num_bits: int
    dtype: torch.dtype
    build: Build
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    ours: bool = False
    note: str = ""

    def unavailable(self, device: str) -> str | None:
        """Why it cannot be measured on a device, or None."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        missing = [package for package in self.needs if not _installed(package)]
        return f"needs {', '.join(missing)}, not installed" if missing else None


CHECKED_TOKENS = (1, 3, 16, 130)
"""Rows of x that the gate tries: each provider has several paths."""

_ROUNDING = 0.006
"""Relative error that bf16 activations, weights and results may add: 2**-9 each."""

PROVIDERS: list[Provider] = []
"""All providers, in the order of tables."""


def provider(
    name: str, num_bits: int, dtype: torch.dtype = torch.bfloat16, **options: object
) -> Callable[[Build], Build]:
    """Register a function as a provider; see `Provider` for the options."""

    def register(build: Build) -> Build:
        PROVIDERS.append(Provider(name, num_bits, dtype, build, **options))  # type: ignore[arg-type]
        return build

    return register


def _installed(package: str) -> bool:
    parent, _, _ = package.rpartition(".")
    return (not parent or _installed(parent)) and importlib.util.find_spec(package) is not None


def make(chosen: Provider, problem: Problem, device: str) -> nn.Module:
    """Build a provider's module, keeping what its package prints to itself."""
    with _quiet(), torch.no_grad():
        return chosen.build(problem.weight().to(device), problem).eval()


def check(chosen: Provider, module: nn.Module, problem: Problem, device: str) -> str | None:
    """What is wrong with a module's results for a few numbers of tokens, or None."""
    bound = _ROUNDING + (0.0 if chosen.num_bits >= 16 else 2 * _plain_error(problem))
    for rows in CHECKED_TOKENS:
        x, expected = _expected(problem, rows, chosen.dtype)
        with _quiet(), torch.no_grad():
            out = module(x.to(device)).cpu()
        if out.shape != expected.shape:
            return f"the result for {rows} tokens has shape {tuple(out.shape)}"
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < bound:
            return f"relative error {error:.2g} for {rows} tokens, more than {bound:.2g}"
    return None


@functools.lru_cache(maxsize=16)
def _expected(problem: Problem, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations, and their exact product with the dense weight."""
    x = problem.tokens(rows, dtype)
    return x, x.double() @ problem.weight().double().t()


@functools.lru_cache(maxsize=4)
def _plain_error(problem: Problem) -> float:
    """What rounding the weight to as many bits costs."""
    weight = problem.weight()
    return quantize(weight, problem.scheme).relative_error(weight)


def held_bytes(module: nn.Module) -> int:
    """Bytes of all memory that a module holds, each counted once."""
    found = (tensor for held in (*module.parameters(), *module.buffers()) for tensor in _plain_tensors(held))
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors inside a tensor of a wrapping class."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor.data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def dense_linear(weight: Tensor) -> nn.Linear:
    """An `nn.Linear` without bias that holds a weight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
