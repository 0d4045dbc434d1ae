"""Memory that launches use besides their output: made once for each device and stream, then kept.

Launches on one stream follow each other and may share it; launches on two may overlap. A CUDA graph keeps
the workspace of the stream that it was captured on, as it keeps cuBLAS's: graphs captured on one stream
must not be replayed at the same time on several.

A stream that is being captured cannot be given counters that are zero, since filling them would only be
recorded. So `reserve` sets one more aside, for the first stream that is captured before it launched anything.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from woq_triton_kernels.tiles import COUNTERS, PARTIAL_ELEMENTS

DENSE_BYTES = 64 << 20
"""Most memory that dequantized rows of a weight take at a time."""


class Scratch(NamedTuple):
    """What split decode kernels need: fp32 partial tiles, int32 counters that are 0 between launches."""

    partials: Tensor
    counters: Tensor
    pointers: tuple[int, int]


_scratch: dict[torch.device, dict[int, Scratch]] = {}
_spare: dict[torch.device, Scratch] = {}
_dense: dict[tuple[torch.device, int], Tensor] = {}


def table(device: torch.device) -> dict[int, Scratch]:
    """The scratch that is kept for a device, by stream."""
    return _scratch.setdefault(device, {})


def scratch_for(device: torch.device, stream: int) -> Scratch:
    """The scratch of a stream, which must be the current one.

    Args:
        device: Of the stream.
        stream: Its handle.
    """
    kept = table(device)
    scratch = kept.get(stream)
    if scratch is not None:
        return scratch
    if not _capturing(device):
        scratch = kept[stream] = _new_scratch(device)
    elif device in _spare:
        scratch = kept[stream] = _spare.pop(device)
    else:
        # Belongs to the graph alone, which fills the counters with zeros at every replay.
        scratch = _new_scratch(device)
    return scratch


def reserve(device: torch.device, stream: int) -> None:
    """Make the scratch of the current stream, and one for the first stream that is captured.

    Args:
        device: Of the stream.
        stream: Its handle.
    """
    scratch_for(device, stream)
    if device.type == "cuda" and device not in _spare:
        _spare[device] = _new_scratch(device)
        torch.cuda.current_stream(device).synchronize()  # whichever stream takes it finds zeros


def dense_for(device: torch.device, stream: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Memory for dequantized weights ``[rows, columns]``, uninitialized; the next call gives it again.

    Args:
        device: Of the stream.
        stream: Its handle; it must be the current one.
        rows: At most so many that the result has `DENSE_BYTES`, to be kept for the next call.
        columns: Likewise.
        dtype: Of the weights.
    """
    nbytes = rows * columns * dtype.itemsize
    memory = _dense.get((device, stream))
    if memory is None or memory.numel() < nbytes:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes <= DENSE_BYTES and not _capturing(device):
            _dense[device, stream] = memory
    return memory[:nbytes].view(dtype).view(rows, columns)


def forget() -> None:
    """Free all of it. Nothing that uses it may be running, and no graph may be replayed afterwards."""
    for kept in (_scratch, _spare, _dense):
        kept.clear()


def _new_scratch(device: torch.device) -> Scratch:
    partials = torch.empty(PARTIAL_ELEMENTS, dtype=torch.float32, device=device)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return Scratch(partials, counters, (partials.data_ptr(), counters.data_ptr()))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
