"""What every test of this folder needs: a sharded model, its logits, and how far off they are.

These functions, and those of the rooms beside, run on every rank of a pool.
"""

from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce, SubParamColumnParallel
from torch import Tensor, nn

import woq_triton.autotp
from tests.autotp import families


def config(**settings: Any) -> dict[str, Any]:
    """A ds_config that quantizes everything alike."""
    scheme = {"num_bits": 4, "group_size": 32, "group_dim": 1, "symmetric": False, **settings}
    return {"weight_quantization": {"post_init_quant": {"*": scheme}}}


def shard(model: nn.Module, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model after AutoTP."""
    import deepspeed

    if "mp_size" not in options:
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


def is_aligned(layer: nn.Module, scheme: woq_triton.QuantScheme) -> bool:
    """Whether the groups of this rank's shard are groups of the whole weight."""
    sizes = getattr(layer, "_partition_sizes", None)
    if sizes is None:  # not sharded
        return True
    split_dim = 1 if isinstance(layer, LinearAllreduce) else 0
    if split_dim != scheme.group_dim:
        return True
    if isinstance(layer, SubParamColumnParallel):  # made of pieces from several places
        return False
    return all(sum(sizes[:rank]) % scheme.group_size == 0 for rank in range(len(sizes)))


def compare(name: str, dtype: str = "float32", **scheme: Any) -> dict[str, Any]:
    """`measure` for one scheme."""
    result: dict[str, Any] = measure(name, dtype, [scheme])[0]
    return result


def measure(name: str, dtype: str, schemes: list[dict[str, Any]], text: bool = False) -> list[dict[str, Any]]:
    """Quantize a sharded model and measure how far its logits are from where they should be.

    Args:
        name: The family.
        dtype: Of the weights and activations.
        schemes: Settings of the quantization; the model is built anew for each.
        text: Whether to generate, too.

    Returns:
        For each scheme, relative distances of logits: ``stock``, AutoTP's from the unsharded model's
        before anything is quantized; ``kernel``, the quantized model's from an AutoTP model whose shards
        hold the dequantized weights; ``alone``, from the whole model quantized by one process, where both
        quantized the same layers and every shard is whole groups (None where not); ``quantization``,
        from the weights' own. ``text``: whether greedy text of the sharded quantized model equals that of
        the dequantized one, and of the whole quantized one where it is comparable. And the names of the
        layers by class, what was left alone, and bytes.
    """
    torch_dtype = getattr(torch, dtype)
    batch = families.inputs(name)
    unsharded = logits(families.build(name, torch_dtype), batch)
    dense = shard(families.build(name, torch_dtype), torch_dtype)
    before = logits(dense, batch)
    weights = {parameter: parameter.data.clone() for parameter in dense.parameters()}
    results = []
    for scheme in schemes:
        quantized = shard(families.build(name, torch_dtype), torch_dtype)
        report = woq_triton.quantize_model(quantized, config(**scheme))
        got = logits(quantized, batch)
        for parameter, data in weights.items():
            parameter.data = data.clone()
        put_dequantized(quantized, dense, report)
        whole = families.build(name, torch_dtype)
        alone = woq_triton.quantize_model(whole, config(**scheme))
        same = {layer.name for layer in alone.layers} == {layer.name for layer in report.layers}
        same = same and all(
            is_aligned(dense.get_submodule(layer.name), layer.scheme) for layer in report.layers
        )
        kinds: dict[str, list[str]] = {}
        for layer in report.layers:
            kinds.setdefault(layer.kind, []).append(layer.name)
        result = {
            "stock": relative(before, unsharded),
            "kernel": relative(got, logits(dense, batch)),
            "alone": relative(got, logits(whole, batch)) if same else None,
            "quantization": relative(got, before),
            "kinds": kinds,
            "skipped": {layer.name: layer.reason for layer in report.skipped},
            "bytes": (report.bytes_before, report.bytes_after, report.bytes_skipped),
            "finite": bool(got.isfinite().all()),
        }
        if text and families.FAMILIES[name].kind != "masked":
            others = [dense, whole] if same else [dense]
            ours = generate(quantized, batch)
            result["text"] = all(torch.equal(ours, generate(other, batch)) for other in others)
        results.append(result)
    return results


def generate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Twelve greedy tokens for each prompt, with a KV cache."""
    batch = {name: tensor for name, tensor in batch.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return model.generate(**batch, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=True)


def outcome(function: Any, *args: Any) -> tuple[str, str]:
    """Type and message of what a call raises."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing was raised", ""
