"""Keeps a checkpoint's mapped pages from staying in memory after their weights were quantized.

Loaded from safetensors, a model's tensors are parts of one mapping of the file. A norm of a few KB, which
stays, keeps that mapping, and with it every page that was ever read: those of weights that were quantized,
and those of weights that AutoTP cut shards from. Such pages can be dropped, as the file still has them: a
tensor that is used after all is read again. Pages that were written to are not the file's any more, and stay.

This is for Linux, which tells the two apart in /proc/self/pagemap (admin-guide/mm/pagemap). Elsewhere, and
where that cannot be read, nothing happens.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

_LINUX = sys.platform == "linux"

_CHUNK = 2 << 20
"""Bytes that are dropped together, or not."""

_PRESENT_OR_SWAPPED, _OF_A_FILE = 0b110, 0b001
"""Bits 63 and 62, and bit 61, of a page's entry."""


def drop_pages(tensor: Tensor) -> None:
    """Drop a tensor's pages from memory where they can be read from a file again.

    Args:
        tensor: On any device; contiguous, or the transpose of what is.
    """
    contiguous = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())
    if _LINUX and tensor.device.type == "cpu" and contiguous:
        with suppress(OSError):
            _drop(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def drop_files(tensors: Iterable[Tensor]) -> None:
    """Drop every page of the files in whose mappings tensors lie; those in use are read again."""
    places = [tensor.data_ptr() for tensor in tensors if tensor.device.type == "cpu"]
    if not _LINUX:
        return
    with suppress(OSError):
        for start, stop in _mapped_files():
            if any(start <= place < stop for place in places):
                _drop(start, stop)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """First address, and the one after the last, of all mappings of files."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, _, _, _, inode = line.split()[:5]
            if inode != "0":
                start, _, stop = addresses.partition("-")
                yield int(start, 16), int(stop, 16)


def _drop(start: int, stop: int) -> None:
    page = mmap.PAGESIZE
    start, stop = -(-start // page) * page, stop // page * page  # what shares a page with others stays
    advise: Callable[..., int] = ctypes.CDLL(None).madvise
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for first in range(start, stop, _CHUNK):
            length = min(_CHUNK, stop - first)
            entries = bytearray(os.pread(pagemap.fileno(), 8 * length // page, 8 * first // page))
            if len(entries) == 8 * length // page and not _has_own_pages(entries):
                advise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _has_own_pages(entries: bytearray) -> bool:
    """Whether some pages are this process's own, and would be lost."""
    bits = torch.frombuffer(entries, dtype=torch.int64) >> 61
    return bool((((bits & _PRESENT_OR_SWAPPED) != 0) & ((bits & _OF_A_FILE) == 0)).any())
