"""The ops on a GPU: allocate, pick a tile, launch a kernel.

Serves CUDA, ROCm and XPU tensors, and with ``TRITON_INTERPRET=1`` CPU tensors. Shapes and conventions
are those of `woq_triton.ops`.

The decode kernel's scratch is kept, one set a device and stream: launches on one stream follow each
other, launches on two may overlap. As with cuBLAS's workspace, CUDA graphs that were captured on one
stream share its scratch and must not be replayed at the same time on several.
"""

import contextlib
import functools
import math

import torch
from torch import Tensor

from woq_triton_kernels.decode import launch_decode
from woq_triton_kernels.dequantize import launch_dequantize
from woq_triton_kernels.gemm import launch_gemm
from woq_triton_kernels.tiles import COUNTERS, FUSED_MAX_M, PARTIAL_ELEMENTS, TileConfig, pick_tile

_scratch: dict[tuple[str, int | None, int], tuple[Tensor, Tensor]] = {}


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
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``x @ weight.T + bias`` with fp32 sums: ``[..., in_features] -> [..., out_features]``."""
    tokens = x.reshape(math.prod(x.shape[:-1]), in_features)
    if in_features > 1 and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    M = tokens.shape[0]
    out_dtype = out_dtype or x.dtype
    out = torch.empty(M, out_features, dtype=out_dtype, device=x.device)
    if M == 0 or out_features == 0:
        pass
    elif in_features == 0:
        out.copy_(torch.zeros_like(out) if bias is None else bias)
    elif M > FUSED_MAX_M and out_dtype == x.dtype:
        weight = dequantize(
            packed, scale, min, num_bits, group_size, group_dim, out_features, in_features, x.dtype
        )
        torch.mm(tokens, weight.T, out=out)
        if bias is not None:
            out += bias
    else:
        arch, processors = _architecture(x.device)
        config = pick_tile(
            M, out_features, in_features, num_bits, group_size, group_dim, x.dtype, arch, processors
        )
        launch(tokens, packed, scale, min, bias, out, num_bits, group_size, group_dim, config)
    return out.view(*x.shape[:-1], out_features)


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
    scheme = (num_bits, group_size, group_dim, config)
    with _device_guard(tokens.device):
        if config.kernel == "gemm":
            launch_gemm(tokens, packed, scale, min, bias, out, *scheme)
            return
        partials, counters = _scratch_for(tokens.device) if config.split_k > 1 else (None, None)
        launch_decode(tokens, packed, scale, min, bias, out, partials, counters, *scheme)


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
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Rows ``ids`` of the weight: ``[*ids.shape, in_features]``; an id outside gives a row of NaN."""
    flat = ids.reshape(-1).contiguous()
    out = torch.empty(flat.shape[0], in_features, dtype=out_dtype or scale.dtype, device=packed.device)
    if out.numel() and out_features == 0:
        out.fill_(float("nan"))
    elif out.numel():
        with _device_guard(packed.device):
            launch_dequantize(flat, packed, scale, min, out, num_bits, group_size, group_dim)
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
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Dense weight ``[out_features, in_features]``, in `out_dtype` or else the scale's dtype."""
    dtype = out_dtype or scale.dtype
    out = torch.empty(out_features, in_features, dtype=dtype, device=packed.device)
    if out.numel():
        with _device_guard(packed.device):
            launch_dequantize(None, packed, scale, min, out, num_bits, group_size, group_dim)
    return out


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


def _scratch_for(device: torch.device) -> tuple[Tensor, Tensor]:
    """The decode kernel's partials and counters for the current stream."""
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    elif device.type == "xpu":
        stream = torch.xpu.current_stream(device).sycl_queue
    key = (device.type, device.index, stream)
    scratch = _scratch.get(key)
    if scratch is None:
        scratch = (
            torch.empty(PARTIAL_ELEMENTS, dtype=torch.float32, device=device),
            torch.zeros(COUNTERS, dtype=torch.int32, device=device),
        )
        # In a capture the zeros are only recorded: a later launch outside of the graph must not see them.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _scratch[key] = scratch
    return scratch
