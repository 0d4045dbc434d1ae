"""Models with DeepSpeed's injected kernels, quantized and compared."""

import types
from typing import Any

import torch
from torch import nn

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, logits, outcome, relative


def injected(name: str, dtype: str, **scheme: Any) -> dict[str, Any]:
    """Quantize a model with DeepSpeed's injected kernels, here in their plain torch form."""
    import deepspeed
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    # The operators look in it for kernels, and find none.
    BaseOp.inference_module = types.SimpleNamespace()
    torch_dtype = getattr(torch, dtype)
    world = torch.distributed.get_world_size()
    # DeepSpeed's injection assumes the ordinary width of the MLP.
    overrides = {"intermediate_size": None} if name == "gpt_neo" else {}

    def make() -> nn.Module:
        return deepspeed.init_inference(
            families.build(name, torch_dtype, **overrides),
            dtype=torch_dtype,
            tensor_parallel={"tp_size": world},
            replace_with_kernel_inject=True,
            return_tuple=name == "gpt_neo",
        ).module

    batch = {"input_ids": families.inputs(name)["input_ids"]}
    whole = logits(families.build(name, torch_dtype, **overrides), batch)
    quantized = make()
    before = logits(quantized, batch)
    report = woq_triton.quantize_model(quantized, config(**scheme))
    got = logits(quantized, batch)
    dense = make()
    for layer in report.layers:
        weight = quantized.get_submodule(layer.name).qweight.dequantize(torch_dtype)
        parent, _, attribute = layer.name.rpartition(".")
        if layer.kind == "InjectedWeight":
            getattr(dense.get_submodule(parent), attribute).data = weight.t().contiguous()
        else:
            dense.get_submodule(layer.name).weight.data = weight
    return {
        "stock": relative(before, whole),
        "kernel": relative(got, logits(dense, batch)),
        "quantization": relative(got, before),
        "injected": sum(layer.kind == "InjectedWeight" for layer in report.layers),
        "dense left": [n for n, p in quantized.named_parameters() if p.dim() == 2 and p.is_floating_point()],
        "skipped": {layer.name: layer.reason for layer in report.skipped},
    }


def injected_failure() -> dict[str, Any]:
    """A model with injected kernels is as it was when it cannot be quantized, or is in part."""
    import deepspeed
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    BaseOp.inference_module = types.SimpleNamespace()
    world = torch.distributed.get_world_size()
    model = deepspeed.init_inference(
        families.build("gpt2"),
        dtype=torch.float32,
        tensor_parallel={"tp_size": world},
        replace_with_kernel_inject=True,
        return_tuple=False,
    ).module
    batch = {"input_ids": families.inputs("gpt2")["input_ids"]}
    before, names = logits(model, batch), sorted(model.state_dict())
    weight = model.transformer.h[1].mlp.output_w
    weight.data[0, 0] = float("nan")
    raised = outcome(woq_triton.quantize_model, model, config())
    weight.data[0, 0] = 0.0
    unchanged = sorted(model.state_dict()) == names and model.transformer.h[1].mlp.output_w is weight
    scheme = config()["weight_quantization"]["post_init_quant"]["*"]
    part = {"weight_quantization": {"post_init_quant": {"inter_w": scheme}}}
    report = woq_triton.quantize_model(model, part)
    return {
        "raised": raised,
        "unchanged": unchanged,
        "part": sorted(layer.name for layer in report.layers),
        "runs": relative(logits(model, batch), before),
    }
