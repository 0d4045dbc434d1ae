"""The ops on a GPU: check, allocate, pick a tile, launch a kernel.

Serves CUDA, ROCm and XPU tensors, and with ``TRITON_INTERPRET=1`` CPU tensors. Shapes and conventions
are those of `woq_triton.ops`.

All that depends on the kind of a request alone is settled at the first one: the checks, the tile, the grid,
the compiled kernel. It is kept twice: a launch's handle by what Triton compiles for
(`woq_triton_kernels.launch`), and before it a request as a whole by all that can be seen of it without
reading its values (shapes, dtypes, devices, contiguity, alignment of pointers). A request that was seen
before costs one look-up, one allocation and one launch.
"""

import builtins
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver

from woq_triton.backends import workspace
from woq_triton.checks import check_contiguous, check_embedding, check_linear, check_weight
from woq_triton_kernels.decode import decode_launch
from woq_triton_kernels.dequantize import dequantize_launch
from woq_triton_kernels.gemm import gemm_launch
from woq_triton_kernels.launch import Handle, Launch, Send, in_reach, prepare
from woq_triton_kernels.tiles import DEQUANTIZE_ROWS, FUSED_MAX_M, TileConfig, pick_tile

CHECKS_REQUESTS = True
"""That `woq_triton.ops` need not check a request before it comes here."""

_MOST_REQUESTS = 1 << 14
_HIP = torch.version.hip is not None


@dataclass(frozen=True)
class _Request:
    """How a request of one kind is served.

    Attributes:
        send: As in `Handle`.
        programs: Size of the grid.
        tail: Runtime arguments after the pointers.
        shape: Shape of the result.
        scratch: Scratch of the device by stream, where the kernel shares K ranges; None otherwise.
        device: Index of the tensors' device, which has to be the current one.
        current_device: Gives the current device.
        current_stream: Gives a device's current stream.
    """

    send: Send
    programs: int
    tail: tuple[int | None, ...]
    shape: tuple[int, ...]
    scratch: dict[int, workspace.Scratch] | None
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


_requests: dict[tuple[Any, ...], _Request] = {}
_handles: dict[tuple[Any, ...], Handle] = {}


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` with fp32 sums: ``[..., in_features] -> [..., out_features]``."""
    x_pointer, pointer, scale_pointer = x.data_ptr(), packed.data_ptr(), scale.data_ptr()
    low_bits = x_pointer | pointer | scale_pointer
    min_pointer = bias_pointer = min_kind = bias_kind = None
    if min is not None:
        min_pointer = min.data_ptr()
        low_bits |= min_pointer
        min_kind = (min.shape, min.dtype, min.device, min.is_contiguous())
    if bias is not None:
        bias_pointer = bias.data_ptr()
        low_bits |= bias_pointer
        bias_kind = (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    key = (
        x.shape, x.dtype, x.device, x.is_contiguous() or x.stride(),
        packed.shape, packed.dtype, packed.device, packed.is_contiguous(),
        scale.shape, scale.dtype, scale.device, scale.is_contiguous(),
        min_kind, bias_kind, num_bits, group_size, group_dim, out_features, in_features, out_dtype,
        low_bits & 15 and _alignment(x_pointer, pointer, scale_pointer, min_pointer, bias_pointer),
        _HIP and tuple(map(in_reach, (x, packed, scale, min, bias))),
    )  # fmt: skip
    request = _requests.get(key)
    if request is None:
        return _first_linear(
            x, packed, scale, min, bias, num_bits, group_size, group_dim, out_features, in_features,
            out_dtype, key,
        )  # fmt: skip
    device = request.device
    if request.current_device() != device:
        with _device_guard(x.device):
            arguments = (
                x, packed, scale, min, bias, num_bits, group_size, group_dim, out_features, in_features,
                out_dtype,
            )  # fmt: skip
            again = request.current_device() == device
            return linear(*arguments) if again else _first_linear(*arguments, key)
    shape = request.shape
    out = x.new_empty(shape) if out_dtype is None else x.new_empty(shape, dtype=out_dtype)
    stream = request.current_stream(device)
    pointers = (x_pointer, pointer, scale_pointer, min_pointer, bias_pointer, out.data_ptr())
    if request.scratch is None:
        request.send(request.programs, stream, pointers + request.tail)
    else:
        scratch = request.scratch.get(stream) or workspace.scratch_for(x.device, stream)
        request.send(request.programs, stream, pointers + scratch.pointers + request.tail)
    return out


def _first_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None,
    key: tuple[Any, ...],
) -> Tensor:
    """`linear` for a request that is new, or that no `_Request` can serve."""
    scheme = (num_bits, group_size, group_dim)
    check_linear(x, packed, scale, min, bias, *scheme, out_features, in_features, out_dtype)
    check_contiguous(packed=packed, scale=scale, min=min, bias=bias)
    tokens = x.reshape(math.prod(x.shape[:-1]), in_features)
    if in_features > 1 and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    M, shape = tokens.shape[0], (*x.shape[:-1], out_features)
    out = x.new_empty(M, out_features, dtype=out_dtype)
    weight = (packed, scale, min)
    if out.numel() == 0:
        pass
    elif in_features == 0:
        out.copy_(torch.zeros_like(out) if bias is None else bias)
    elif is_dense(M, x.dtype, out.dtype):
        with _device_guard(x.device):
            _dense_linear(tokens, *weight, bias, out, *scheme)
    else:
        with _device_guard(x.device):
            launch, scratch = _fused(tokens, *weight, bias, out, *scheme)
            handle = _run(launch, x.device)
        if handle is not None and tokens.data_ptr() == x.data_ptr():
            pointers = launch.tensors[6:] if scratch is None else ()
            tail = (*(None for _ in pointers), M, *launch.numbers)
            _remember(key, handle, launch.programs, tail, shape, scratch, x)
    return out.view(shape)


def is_dense(M: int, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether weights are dequantized for the vendor's GEMM, which returns its operands' dtype.

    Args:
        M: Rows of x.
        dtype: Of x.
        out_dtype: Of the result.
    """
    return M > FUSED_MAX_M and out_dtype == dtype


def _fused(
    tokens: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
) -> tuple[Launch, dict[int, workspace.Scratch] | None]:
    """The launch of the kernel that serves a product, and the table that its scratch is from."""
    arch, processors = _architecture(tokens.device)
    (M, K), N = tokens.shape, out.shape[1]
    config = pick_tile(M, N, K, num_bits, group_size, group_dim, tokens.dtype, arch, processors)
    arguments = (tokens, packed, scale, min, bias, out, num_bits, group_size, group_dim, config)
    return _launch_of(*arguments), workspace.table(tokens.device) if config.split_k > 1 else None


def _launch_of(
    tokens: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
    config: TileConfig,
) -> Launch:
    build = gemm_launch if config.kernel == "gemm" else decode_launch
    partials = counters = None
    if config.split_k > 1:
        partials, counters, _ = workspace.scratch_for(tokens.device, _stream(tokens.device))
    scheme = (num_bits, group_size, group_dim, config)
    return build(tokens, packed, scale, min, bias, out, partials, counters, *scheme)


def launch(
    tokens: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
    config: TileConfig,
) -> None:
    """Run the kernel that `config` names: tokens ``[M, in_features]`` into out ``[M, out_features]``."""
    with _device_guard(tokens.device):
        _launch_of(tokens, packed, scale, min, bias, out, num_bits, group_size, group_dim, config).run()


def _dense_linear(
    tokens: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
) -> None:
    """Dequantize and multiply with the vendor's GEMM, a block of weight rows at a time."""
    weight = (packed, scale, min, num_bits, group_size, group_dim, out.shape[1], tokens.shape[1])
    for launch, rows in _dense_blocks(*weight, tokens.dtype):
        _run(launch, tokens.device)
        dense = launch.tensors[-1]
        assert dense is not None
        torch.mm(tokens, dense.T, out=out[:, rows])
    if bias is not None:
        out += bias


def _dense_blocks(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Launch, slice]]:
    """Launches that dequantize a weight block by block into the same memory, and each block's rows.

    Along group_dim 0 a block is made of whole groups, or lies in one.
    """
    most = workspace.DENSE_BYTES // (in_features * dtype.itemsize)
    most = max(DEQUANTIZE_ROWS, most // DEQUANTIZE_ROWS * DEQUANTIZE_ROWS)
    span = out_features if group_dim == 1 or group_size <= most else group_size
    step = most if group_dim == 1 or group_size > most else most // group_size * group_size
    memory = packed.new_empty(builtins.min(step, out_features) * in_features, dtype=dtype)
    for first in range(0, out_features, span):
        last = builtins.min(first + span, out_features)
        for start in range(first, last, step):
            stop = builtins.min(start + step, last)
            rows = slice(start, stop)
            groups = rows if group_dim == 1 else slice(start // group_size, -(-stop // group_size))
            dense = memory[: (stop - start) * in_features].view(stop - start, in_features)
            low = None if min is None else min[groups]
            yield (
                dequantize_launch(
                    None, packed[rows], scale[groups], low, dense, num_bits, group_size, group_dim
                ),
                rows,
            )


def embedding(
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows ``ids`` of the weight: ``[*ids.shape, in_features]``; an id outside gives a row of NaN."""
    weight = (packed, scale, min, num_bits, group_size, group_dim)
    check_embedding(ids, *weight, out_features, in_features, out_dtype)
    check_contiguous(packed=packed, scale=scale, min=min)
    flat = ids.reshape(-1).contiguous()
    out = scale.new_empty(flat.shape[0], in_features, dtype=out_dtype)
    if out.numel() and out_features == 0:
        out.fill_(float("nan"))
    elif out.numel():
        with _device_guard(packed.device):
            _run(dequantize_launch(flat, packed, scale, min, out, *weight[3:]), packed.device)
    return out.view(*ids.shape, in_features)


def dequantize(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Dense weight ``[out_features, in_features]``, in `out_dtype` or else the scale's dtype."""
    weight = (packed, scale, min, num_bits, group_size, group_dim)
    check_weight(*weight, out_features, in_features, out_dtype)
    check_contiguous(packed=packed, scale=scale, min=min)
    out = scale.new_empty(out_features, in_features, dtype=out_dtype)
    if out.numel():
        with _device_guard(packed.device):
            _run(dequantize_launch(None, packed, scale, min, out, *weight[3:]), packed.device)
    return out


def prepare_linear(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    max_tokens: int,
) -> list[Handle]:
    """Compile and load all that `linear` launches for 1 to `max_tokens` rows of x; launch nothing.

    Args:
        packed: As `linear` takes it, like the others.
        scale: Likewise.
        min: Likewise.
        bias: Likewise.
        num_bits: Likewise.
        group_size: Likewise.
        group_dim: Likewise.
        out_features: Likewise.
        in_features: Likewise.
        dtype: Of x and the result.
        max_tokens: Most rows of x.

    Returns:
        A handle for each kernel; none where Triton offers no handles.
    """
    if out_features == 0 or in_features == 0:
        return []
    weight, scheme = (packed, scale, min), (num_bits, group_size, group_dim)
    handles = []
    with _device_guard(packed.device):
        most = builtins.min(max_tokens, FUSED_MAX_M)
        x = packed.new_empty(most, in_features, dtype=dtype)
        out = x.new_empty(most, out_features)
        for M in range(1, most + 1):  # what is no new kind costs no more than a look-up
            handles.append(_handle(_fused(x[:M], *weight, bias, out[:M], *scheme)[0]))
        if is_dense(max_tokens, dtype, dtype):
            for launch, _ in _dense_blocks(*weight, *scheme, out_features, in_features, dtype):
                handles.append(_handle(launch))
    return [handle for handle in handles if handle is not None]


def prepare_embedding(
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    num_bits: int,
    group_size: int,
    group_dim: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> list[Handle]:
    """Compile and load what `embedding` launches for int64 ids; arguments as in `prepare_linear`."""
    if out_features == 0 or in_features == 0:
        return []
    ids = packed.new_empty(1, dtype=torch.int64)
    out = packed.new_empty(1, in_features, dtype=dtype)
    with _device_guard(packed.device):
        handle = _handle(dequantize_launch(ids, packed, scale, min, out, num_bits, group_size, group_dim))
    return [] if handle is None else [handle]


def reserve(device: torch.device) -> None:
    """Make the scratch of a device's current stream, and one for a graph to come."""
    with _device_guard(device):
        workspace.reserve(device, _stream(device))


def forget() -> None:
    """Drop all handles and scratch, as after another driver was made Triton's. No launch may be running."""
    _requests.clear()
    _handles.clear()
    workspace.forget()


def _run(launch: Launch, device: torch.device) -> Handle | None:
    """Launch on the current device, through a handle if there can be one."""
    handle = _handle(launch)
    if handle is None:
        launch.run()
    else:
        handle.run(launch, _stream(device))
    return handle


def _handle(launch: Launch) -> Handle | None:
    """The handle of launches of this kind, made at the first of them; none if their device is not current."""
    index = next(tensor for tensor in launch.tensors if tensor is not None).get_device()
    key = launch.key(index)
    handle = _handles.get(key)
    if handle is not None:
        return handle if driver.active.get_current_device() == index else None
    handle = prepare(launch, index)
    if handle is not None:
        _handles[key] = handle
    return handle


def _remember(
    key: tuple[Any, ...],
    handle: Handle,
    programs: int,
    tail: tuple[int | None, ...],
    shape: tuple[int, ...],
    scratch: dict[int, workspace.Scratch] | None,
    x: Tensor,
) -> None:
    if len(_requests) >= _MOST_REQUESTS:  # of ever new shapes
        _requests.clear()
    current_device, current_stream = driver.active.get_current_device, driver.active.get_current_stream
    _requests[key] = _Request(
        handle.send, programs, tail, shape, scratch, x.get_device(), current_device, current_stream
    )


def _alignment(*pointers: int | None) -> tuple[int, ...]:
    """Of each pointer, the bytes by which it is past a multiple of 16."""
    return tuple(0 if pointer is None else pointer & 15 for pointer in pointers)


@functools.cache
def _architecture(device: torch.device) -> tuple[str, int | None]:
    """Name of a device's architecture as `pick_tile` takes it, and its number of processors."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return properties.gcnArchName.split(":")[0], properties.multi_processor_count
        return f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
    return device.type, None


def _device_guard(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device current: Triton launches on the current device, whatever its arguments' is."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    if device.type == "xpu":
        return torch.xpu.device(device)
    return contextlib.nullcontext()


def _stream(device: torch.device) -> int:
    """Handle of a device's current stream."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).cuda_stream
    if device.type == "xpu":
        return torch.xpu.current_stream(device).sycl_queue
    return 0
