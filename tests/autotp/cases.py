"""What the ranks do in the tests of this folder; each function runs on every rank of a pool."""

from typing import Any

import torch
from torch import Tensor, nn

import woq_triton
from tests.autotp import families


def config(**settings: Any) -> dict[str, Any]:
    """A ds_config that quantizes everything alike."""
    scheme = {"num_bits": 4, "group_size": 32, "group_dim": 1, "symmetric": False, **settings}
    return {"weight_quantization": {"post_init_quant": {"*": scheme}}}


def shard(model: nn.Module, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model after AutoTP."""
    import deepspeed

    options.setdefault("tensor_parallel", {"tp_size": torch.distributed.get_world_size()})
    engine = deepspeed.init_inference(model, dtype=dtype, replace_with_kernel_inject=False, **options)
    module: nn.Module = engine.module
    return module


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's output for a batch, fp32."""
    with torch.no_grad():
        return model(**batch).logits.float()


def relative(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of the difference over that of the second."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def put_dequantized(quantized: nn.Module, dense: nn.Module, report: woq_triton.QuantizationReport) -> None:
    """Give a dense model the weights that a quantized one stands for."""
    for layer in report.layers:
        module = quantized.get_submodule(layer.name)
        weight = dense.get_submodule(layer.name).weight
        weight.data = module.qweight.dequantize(weight.dtype)


def compare(name: str, dtype: str = "float32", alone: bool = False, **scheme: Any) -> dict[str, Any]:
    """Quantize a sharded model and measure how far its logits are from where they should be.

    Args:
        name: The family.
        dtype: Of the weights and activations.
        alone: Whether to compare with one process that holds the whole quantized model.
        scheme: Settings of the quantization.

    Returns:
        ``kernel``: distance from the AutoTP model whose shards hold the dequantized weights;
        ``quantization``: from the AutoTP model with its own weights; ``alone``: from the unsharded
        quantized model; and names of the layers by class and of what was left alone.
    """
    torch_dtype = getattr(torch, dtype)
    batch = families.inputs(name)
    quantized = shard(families.build(name, torch_dtype), torch_dtype)
    before = logits(quantized, batch)
    report = woq_triton.quantize_model(quantized, config(**scheme))
    got = logits(quantized, batch)
    dense = shard(families.build(name, torch_dtype), torch_dtype)
    put_dequantized(quantized, dense, report)
    kinds: dict[str, list[str]] = {}
    for layer in report.layers:
        kinds.setdefault(layer.kind, []).append(layer.name)
    result = {
        "kernel": relative(got, logits(dense, batch)),
        "quantization": relative(got, before),
        "kinds": kinds,
        "skipped": {layer.name: layer.reason for layer in report.skipped},
        "bytes": (report.bytes_before, report.bytes_after, report.bytes_skipped),
        "finite": bool(got.isfinite().all()),
    }
    if alone:
        whole = families.build(name, torch_dtype)
        woq_triton.quantize_model(whole, config(**scheme))
        result["alone"] = relative(got, logits(whole, batch))
    return result
