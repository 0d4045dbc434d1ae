"""Memory that launches use besides their output: made once for each device and stream, then kept.

Launches on one stream follow each other and may share it; launches on two may overlap. A CUDA graph keeps
the workspace of the stream that it was captured on, as it keeps cuBLAS's: graphs captured on one stream
must not be replayed at the same time on several.

A stream that is being captured cannot be given counters that are zero, since filling them would only be
recorded; and where `torch.compile` makes CUDA graphs, even its trial runs must leave nothing behind in its
memory pool. So `reserve` sets scratch aside, for the streams that are the next to need some.

Dequantized weights are not kept: blocks of a weight share one piece of memory, which torch's allocator gives
to the next product on the stream.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from woq_triton_kernels.tiles import COUNTERS, PARTIAL_ELEMENTS

DENSE_BYTES = 64 << 20
"""Most memory that dequantized rows of a weight take at a time."""

_SPARES = 2


class Scratch(NamedTuple):
    """What split decode kernels need: fp32 partial tiles, int32 counters that are 0 between launches."""

    partials: Tensor
    counters: Tensor
    pointers: tuple[int, int]


_scratch: dict[torch.device, dict[int, Scratch]] = {}
_spare: dict[torch.device, list[Scratch]] = {}


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
    if spare := _spare.get(device):
        scratch = kept[stream] = spare.pop()
    elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Belongs to the graph alone, which fills the counters with zeros at every replay.
        scratch = _new_scratch(device)
    else:
        scratch = kept[stream] = _new_scratch(device)
    return scratch


def reserve(device: torch.device, stream: int) -> None:
    """Make the scratch of the current stream, and some for the next ones.

    Args:
        device: Of the stream.
        stream: Its handle.
    """
    scratch_for(device, stream)
    spare = _spare.setdefault(device, [])
    if device.type == "cuda" and len(spare) < _SPARES:
        spare += [_new_scratch(device) for _ in range(_SPARES - len(spare))]
        torch.cuda.current_stream(device).synchronize()  # whichever stream takes them finds zeros


def forget() -> None:
    """Free all of it. Nothing that uses it may be running, and no graph may be replayed afterwards."""
    for kept in (_scratch, _spare):
        kept.clear()


def _new_scratch(device: torch.device) -> Scratch:
    partials = torch.empty(PARTIAL_ELEMENTS, dtype=torch.float32, device=device)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return Scratch(partials, counters, (partials.data_ptr(), counters.data_ptr()))
