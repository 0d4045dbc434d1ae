"""DeepSpeed's own dequantization ops, for accelerators that bring them and no kernel of this package.

An accelerator's op builder loads an object with what it implements as attributes. Having an attribute
is no promise: it may raise when called. So an op is looked for where the weight's device belongs to
DeepSpeed's current accelerator, loaded, tried once on a small weight against `woq_triton.reference`,
and kept or forgotten. DeepSpeed is asked only where the program has imported it already.

The ops, ``dequantize_int{4,8}_to_half_experimental(data, scale, min, groups, group_size)``, give fp16
from DeepSpeed's layout (`woq_triton.deepspeed_format`). `refusal` says which weights they can serve.
Codes are repacked at first use and kept beside the canonical ones as long as those live.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from woq_triton import reference
from woq_triton_kernels import layout

_OP_NAMES = {bits: f"dequantize_int{bits}_to_half_experimental" for bits in (4, 8)}

_Op = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class _Repacked:
    data: Tensor  # uint8 [groups, bytes of a group]
    scale: Tensor  # fp16 [groups, 1], the reciprocal of a step
    min: Tensor  # fp16 [groups, 1]


_repacked: WeakIdKeyDictionary = WeakIdKeyDictionary()
_refused: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refusal(packed: Tensor, scale: Tensor, min: Tensor | None, *op_scheme: int) -> str | None:
    """Why DeepSpeed's ops cannot serve a weight, or None if they can.

    Args:
        packed: As the ops take it, like the others.
        scale: Likewise.
        min: Likewise.
        op_scheme: num_bits, group_size, group_dim, out_features, in_features.
    """
    num_bits, group_size, group_dim, _, in_features = op_scheme
    if _find(packed.device, num_bits) is None:
        return f"DeepSpeed's accelerator has no working {_OP_NAMES[num_bits]} for {packed.device.type}"
    if scale.dtype != torch.float16:
        return f"DeepSpeed's ops take fp16 metadata, not {scale.dtype}"
    if group_dim != 1:
        return "DeepSpeed's ops take groups along in_features (group_dim 1) only"
    if group_size % 8 or in_features % group_size:
        return f"DeepSpeed's ops take whole groups of a multiple of 8, not {group_size} of {in_features}"
    if packed not in _refused:
        step = scale.cpu().float()
        exact = step.reciprocal()
        lost = exact.isfinite() & ~exact.half().isfinite()
        if min is None:
            lost |= ~(step * 2 ** (num_bits - 1)).half().isfinite()
        _refused[packed] = "a step's reciprocal, or a min, is beyond fp16" if bool(lost.any()) else None
    reason: str | None = _refused[packed]
    return reason


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
    """Dense weight ``[out_features, in_features]`` through DeepSpeed's op, which rounds it to fp16.

    Raises:
        NotImplementedError: The op cannot serve the weight.
    """
    op_scheme = (num_bits, group_size, group_dim, out_features, in_features)
    reason = refusal(packed, scale, min, *op_scheme)
    if reason is not None:
        raise NotImplementedError(f"{reason}; WOQ_TRITON_IMPL=reference serves it")
    op = _find(packed.device, num_bits)
    assert op is not None
    if packed.numel() == 0:
        return torch.zeros(out_features, in_features, dtype=out_dtype or scale.dtype, device=packed.device)
    weight = _repacked.get(packed)
    if weight is None:
        weight = _repacked[packed] = _repack(packed, scale, min, num_bits, group_size, in_features)
    dense = op(weight.data, weight.scale, weight.min, weight.data.shape[0], group_size)
    return dense.reshape(out_features, in_features).to(out_dtype or scale.dtype)


def linear(
    x: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, bias: Tensor | None, *rest: Any
) -> Tensor:
    """``x @ weight.T + bias`` with a dense weight made for the call, and the device's own matmul."""
    num_bits, group_size, group_dim, out_features, in_features, out_dtype = rest
    scheme = (num_bits, group_size, group_dim, out_features, in_features)
    weight = dequantize(packed, scale, min, *scheme, x.dtype)
    out = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return out.to(out_dtype or x.dtype)


def embedding(ids: Tensor, packed: Tensor, scale: Tensor, min: Tensor | None, *rest: Any) -> Tensor:
    """Rows of the weight; DeepSpeed has no op for them, so they are the reference's."""
    return reference.embedding(ids, packed, scale, min, *rest)


def _repack(
    packed: Tensor, scale: Tensor, min: Tensor | None, num_bits: int, group_size: int, in_features: int
) -> _Repacked:
    """To DeepSpeed's layout, group by group, on the host and back."""
    codes = layout.unpack(packed.cpu(), num_bits, in_features)
    if num_bits == 4:
        codes = codes[:, 0::2] << 4 | codes[:, 1::2]
    step = scale.cpu()
    minimum = step * -(2 ** (num_bits - 1)) if min is None else min.cpu()
    return _Repacked(
        codes.reshape(step.numel(), -1).to(packed.device),
        step.float().reciprocal().half().reshape(-1, 1).to(packed.device),
        minimum.reshape(-1, 1).to(packed.device),
    )


def _find(device: torch.device, num_bits: int) -> _Op | None:
    """The op of DeepSpeed's accelerator, if that is the device's and the op works."""
    deepspeed = sys.modules.get("deepspeed.accelerator")
    if deepspeed is None:
        return None
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != device.type:
        return None
    return _load(accelerator, device, num_bits)


@functools.cache
def _load(accelerator: Any, device: torch.device, num_bits: int) -> _Op | None:
    try:
        op: _Op = getattr(accelerator.create_op_builder("QuantizerBuilder").load(), _OP_NAMES[num_bits])
        _probe(op, device, num_bits)
    except Exception:  # any kind: third parties raise what they like for what they lack
        return None
    return op


def _probe(op: _Op, device: torch.device, num_bits: int) -> None:
    """Raise if an op does not dequantize two groups of 16 as DeepSpeed's layout says."""
    codes = torch.arange(32, dtype=torch.uint8).mul_(7).bitwise_and_(2**num_bits - 1).view(2, 16)
    scale = torch.tensor([[2.0], [8.0]], dtype=torch.float16)
    minimum = torch.tensor([[-1.0], [0.5]], dtype=torch.float16)
    data = codes if num_bits == 8 else codes[:, 0::2] << 4 | codes[:, 1::2]
    got = op(data.to(device), scale.to(device), minimum.to(device), 2, 16)
    want = codes.float() / scale.float() + minimum.float()
    if got.dtype != torch.float16 or not torch.allclose(got.cpu().float().view(2, 16), want, rtol=2**-9):
        raise ValueError(f"{_OP_NAMES[num_bits]} on {device} gives wrong numbers")
