"""Triton's real CUDA driver and launcher on a CUDA library that does nothing.

`active` compiles ``libcuda.c`` once and makes Triton use it as its driver, for an architecture of choice.
Tensors live on the CPU, which is "device -1" (`Tensor.get_device`), the stub's current device. Kernels are
compiled by Triton's real compiler and never run.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_MAX_PARAMS = 32


class Record(ctypes.Structure):
    """What the library remembers of launches; see ``libcuda.c``."""

    _fields_ = (
        ("launches", ctypes.c_ulonglong),
        ("modules", ctypes.c_ulonglong),
        ("grid", ctypes.c_ulonglong * 3),
        ("threads", ctypes.c_ulonglong),
        ("shared", ctypes.c_ulonglong),
        ("stream", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong),
        ("params", ctypes.c_ulonglong * _MAX_PARAMS),
    )


class Stub:
    """The library, and what Triton shall take for the current device and stream.

    Attributes:
        record: The last launch and the counts.
        device: The current device; -1 is that of CPU tensors.
        stream: The current stream.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.record = Record.in_dll(library, "stub_record")
        self.device = -1
        self.stream = 7
        self._params = ctypes.c_int.in_dll(library, "stub_params")
        self._sizes = (ctypes.c_int * _MAX_PARAMS).in_dll(library, "stub_sizes")

    def watch(self, sizes: list[int]) -> None:
        """Copy the parameters of launches from now on, given their sizes in bytes; none if empty."""
        self._sizes[: len(sizes)] = sizes
        self._params.value = len(sizes)


def unusable() -> str:
    """Why the stub cannot be used here; empty if it can."""
    if torch.cuda.is_available():
        return "the real CUDA library is loaded; benchmarks/device.py checks launches there"
    return "" if shutil.which("cc") else "needs a C compiler, as Triton does on a GPU"


@functools.cache
def _library() -> ctypes.CDLL:
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    folder = tempfile.mkdtemp(prefix="stub_cuda")
    path = os.path.join(folder, "libcuda.so.1")
    source = Path(__file__).with_name("libcuda.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run([*command, f"-I{sysconfig.get_path('include')}", str(source), "-o", path], check=True)
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # modules linked with it find it loaded
    triton.knobs.nvidia.libcuda_path = folder
    return library


@functools.cache
def _stub_and_driver() -> tuple[Stub, Any]:
    library = _library()
    from triton.backends.nvidia.driver import CudaDriver

    stub = Stub(library)
    driver = CudaDriver()
    driver.get_current_device = lambda: stub.device
    driver.get_current_stream = lambda device: stub.stream
    return stub, driver


@contextlib.contextmanager
def active(arch: int = 90) -> Iterator[Stub]:
    """Make Triton use the stub.

    Args:
        arch: Compute capability times ten that the stub's device has.
    """
    from triton.runtime.driver import driver as config

    from woq_triton.backends import triton as backend

    stub, driver = _stub_and_driver()
    driver.get_device_capability = lambda device=None: divmod(arch, 10)
    earlier, architecture, stream = config._active, backend._architecture, backend._stream
    config.set_active(driver)
    backend._architecture = lambda device: (f"sm_{arch}", 132)
    backend._stream = lambda device: stub.stream
    backend.forget()
    stub.device = -1
    stub.watch([])
    try:
        yield stub
    finally:
        config._active, backend._architecture, backend._stream = earlier, architecture, stream
        backend.forget()
        _forget_compiled()


def _forget_compiled() -> None:
    """Drop Triton's per-device caches, which another driver's device of the same index must not see."""
    from woq_triton_kernels import decode, dequantize, gemm

    for kernel in (decode._decode_kernel, gemm._gemm_kernel, dequantize._dequantize_kernel):
        kernel.device_caches.clear()
