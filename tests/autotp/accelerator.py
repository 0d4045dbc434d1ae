"""A third-party accelerator made of Python: torch's privateuse1 device, and DeepSpeed's idea of it.

Tensors of the device keep their values in a CPU tensor, on which every operation runs. It has to be
set up in a process of its own, as the device stays registered.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import woq_triton
from tests.autotp.cases import config, relative
from woq_triton import backends, reference

_keep: list[Any] = []


class FakeTensor(torch.Tensor):
    """A tensor on the fake device."""

    raw: Tensor

    @staticmethod
    def of(raw: Tensor) -> "FakeTensor":
        """Put a CPU tensor's values on the device."""
        tensor = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        tensor.__class__ = FakeTensor
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl


def run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU tensors behind the device's."""
    inputs: dict[int, FakeTensor] = {}

    def enter(tensor: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            inputs[id(tensor.raw)] = tensor
            return tensor.raw
        if isinstance(tensor, torch.device) and tensor.type == "fake":
            return torch.device("cpu")
        return tensor

    to_host = op is torch.ops.aten._to_copy.default and str(kwargs.get("device", "fake")) == "cpu"
    args, kwargs = pytree.tree_map(enter, (args, kwargs))
    result = op(*args, **kwargs)

    def leave(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or to_host:
            return tensor
        same = inputs.get(id(tensor))
        return FakeTensor.of(tensor) if same is None else same

    return pytree.tree_map(leave, result)


def set_up(**ops: Any) -> None:
    """Register the device with torch, and an accelerator with these quantizer ops with DeepSpeed."""
    _setup_privateuseone_for_python_backend("fake")
    library = torch.library.Library("_", "IMPL")
    library.fallback(run_on_cpu, "PrivateUse1")
    # A fallback does not reach what torch implements for every device at once, views above all.
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"):
        space, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, packet):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(op, functools.partial(run_on_cpu, op), "PrivateUse1")
    _keep.extend([library, aten])

    class Accelerator(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "fake"

        def create_op_builder(self, class_name: str) -> Any:
            assert class_name == "QuantizerBuilder"
            return SimpleNamespace(load=lambda: SimpleNamespace(**ops))

    set_accelerator(Accelerator())


calls: list[str] = []


def dequantize_int8(data: Tensor, scale: Tensor, minimum: Tensor, groups: int, size: int) -> Tensor:
    """The accelerator's own kernel, as DeepSpeed's interface has it."""
    calls.append("int8")
    assert tuple(data.shape) == (groups, size)
    return (data.to(torch.float32) / scale.to(torch.float32) + minimum.to(torch.float32)).to(torch.float16)


def dequantize_int4(*args: Any) -> Tensor:
    """There by name only."""
    raise NotImplementedError("int4 is planned")


def some_ops() -> dict[str, Any]:
    """Layers on an accelerator that implements int8, has int4 by name only, and nothing else."""
    set_up(
        dequantize_int8_to_half_experimental=dequantize_int8,
        dequantize_int4_to_half_experimental=dequantize_int4,
    )
    torch.manual_seed(0)
    x = torch.randn(3, 128)
    result: dict[str, Any] = {"served by": {}, "errors": {}, "calls": {}}
    cases = {
        "int8": {"num_bits": 8},
        "int8 symmetric": {"num_bits": 8, "symmetric": True},
        "int8 ragged": {"num_bits": 8, "group_size": 24},
        "int8 dim 0": {"num_bits": 8, "group_dim": 0},
        "int4": {"num_bits": 4},
    }
    for name, scheme in cases.items():
        model = nn.Sequential(nn.Linear(128, 96)).half()
        woq_triton.quantize_model(model, config(**scheme))
        want = reference.linear(
            x.half(), *tensors(model[0]), model[0].bias, *model[0].qweight.op_scheme, None
        )
        layer = on_device(model[0])
        calls.clear()
        with torch.no_grad():
            got = [layer(FakeTensor.of(x.half())) for _ in range(2)][-1]
        result["served by"][name] = layer.implementation
        result["errors"][name] = relative(got.raw, want)
        result["calls"][name] = len(calls)
    return result


def tensors(layer: woq_triton.QuantizedLinear) -> tuple[Any, ...]:
    """The tensors of a layer's weight."""
    qweight = layer.qweight
    return qweight.packed, qweight.scale, qweight.min


def on_device(layer: woq_triton.QuantizedLinear) -> woq_triton.QuantizedLinear:
    """The layer with its tensors on the fake device."""
    packed, scale, minimum = tensors(layer)
    moved = woq_triton.QuantizedWeight(
        nn.Parameter(FakeTensor.of(packed.detach()), requires_grad=False),
        FakeTensor.of(scale),
        None if minimum is None else FakeTensor.of(minimum),
        layer.scheme,
        layer.weight_shape,
    )
    bias = layer.bias
    made = woq_triton.QuantizedLinear(moved)
    made.bias = None if bias is None else nn.Parameter(FakeTensor.of(bias.detach()), requires_grad=False)
    return made


def own_kernel() -> dict[str, Any]:
    """The example of the documentation: a device registers its own kernel and is served from then on."""
    set_up()
    layer = nn.Sequential(nn.Linear(128, 96))
    woq_triton.quantize_model(layer, config())
    x = torch.randn(3, 128)
    with torch.no_grad():
        want = layer(x)
    moved = on_device(layer[0])
    before = moved.implementation

    def my_linear(x: Tensor, packed: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        calls.append("my_linear")
        bias = rest[1]
        raw = [None if t is None else t.raw for t in (packed, scale, rest[0], bias)]
        return FakeTensor.of(reference.linear(x.raw, *raw, *rest[2:7], None))

    library = torch.library.Library("woq_triton", "IMPL")
    library.impl("linear", my_linear, "PrivateUse1")
    with torch.no_grad():
        got = moved(FakeTensor.of(x))
    return {
        "before": before,
        "after": moved.implementation,
        "calls": calls,
        "error": relative(got.raw, want),
        "cpu": backends.name_for("cpu"),
    }
