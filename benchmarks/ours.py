"""Providers of this package and of torch: dense layers, every implementation that the device has."""

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem
from benchmarks.providers import dense_linear, provider
from woq_triton import QuantizedLinear, quantize
from woq_triton.backends import cpu, cpu_int4
from woq_triton.weight import QuantizedWeight


@provider("dense bf16", 16)
def _dense_bf16(weight: Tensor, problem: Problem) -> nn.Module:
    return dense_linear(weight)


@provider("dense fp16", 16, torch.float16)
def _dense_fp16(weight: Tensor, problem: Problem) -> nn.Module:
    return dense_linear(weight.half())


@provider("dense fp32", 32, torch.float32)
def _dense_fp32(weight: Tensor, problem: Problem) -> nn.Module:
    return dense_linear(weight.float())


class _Canonical(nn.Module):
    """The op on canonical codes, as `woq_triton.linear` calls it."""

    def __init__(self, qweight: QuantizedWeight) -> None:
        super().__init__()
        self.qweight = qweight
        self.register_buffer("packed", qweight.packed)
        self.register_buffer("scale", qweight.scale)
        self.register_buffer("min", qweight.min)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.woq_triton.linear(
            x, self.packed, self.scale, self.min, None, *self.qweight.op_scheme
        )
        return out


class _Reference(_Canonical):
    """The plain torch implementation: rebuild the dense weight, multiply."""

    def forward(self, x: Tensor) -> Tensor:
        from woq_triton import reference

        return reference.linear(x, self.packed, self.scale, self.min, None, *self.qweight.op_scheme, None)


def _layer(weight: Tensor, problem: Problem) -> nn.Module:
    layer = QuantizedLinear.from_linear(dense_linear(weight), problem.scheme)
    layer.rearrange()
    return layer


def _canonical(weight: Tensor, problem: Problem) -> nn.Module:
    return _Canonical(quantize(weight, problem.scheme))


def _reference(weight: Tensor, problem: Problem) -> nn.Module:
    return _Reference(quantize(weight, problem.scheme))


for _bits in (4, 8):
    provider(f"woq_triton int{_bits}", _bits, ours=True, note="a layer of a model that quantize_model made")(
        _layer
    )
    provider(
        f"woq_triton int{_bits}, canonical codes", _bits, devices=("cpu",), ours=True, note="the op `linear`"
    )(_canonical)
    provider(f"woq_triton int{_bits}, reference", _bits, ours=True, note="plain torch, the tests' oracle")(
        _reference
    )
provider("woq_triton int4, fp16 activations", 4, torch.float16, devices=("cuda",), ours=True)(
    lambda weight, problem: _layer(weight.half(), problem)
)


class _TorchInt4(nn.Module):
    """torch's packed int4 op by itself, on this package's codes."""

    def __init__(self, weight: Tensor, problem: Problem) -> None:
        super().__init__()
        qweight = quantize(weight, problem.scheme)
        self.group_size = problem.scheme.group_size
        packed = torch._convert_weight_to_int4pack_for_cpu(qweight.codes().int(), 1)
        self.register_buffer("packed", packed)
        self.register_buffer("metadata", cpu_int4.metadata(qweight.scale, qweight.min, self.group_size)[0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group_size, self.metadata
        )
        return out


@provider("torch int4pack", 4, devices=("cpu",), note="aten::_weight_int4pack_mm_for_cpu at every M")
def _torch_int4(weight: Tensor, problem: Problem) -> nn.Module:
    return _TorchInt4(weight, problem)


class _TorchInt8(nn.Module):
    """torch's packed int8 op: one scale a row, symmetric."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.float().abs().amax(1) / 127
        self.register_buffer("codes", (weight.float() / scale[:, None]).round_().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.scale)


@provider("torch int8pack", 8, devices=("cpu",), note="aten::_weight_int8pack_mm; one scale a row, no groups")
def _torch_int8(weight: Tensor, problem: Problem) -> nn.Module:
    return _TorchInt8(weight)


def multiplies_bf16() -> bool:
    """Whether the CPU has bf16 dot products."""
    return cpu.multiplies_bf16()
