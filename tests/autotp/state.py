"""What quantized layers carry: copies, pickles, attributes; and DeepSpeed's own call."""

import copy
import pickle
from typing import Any

import torch

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, logits, outcome, relative, shard
from woq_triton.modules import QuantizedModule


def empty_shards(name: str) -> int:
    """How many of this rank's quantized weights have no rows or no columns."""
    model = shard(families.build(name), torch.float32)
    report = woq_triton.quantize_model(model, config())
    return sum(0 in layer.shape for layer in report.layers)


def copies() -> dict[str, Any]:
    """What a copied, a pickled and a reloaded model compute."""
    batch = families.inputs("opt")
    model = shard(families.build("opt"), torch.float32)
    woq_triton.quantize_model(model, config())
    want = logits(model, batch)
    result: dict[str, Any] = {"deepcopy": relative(logits(copy.deepcopy(model), batch), want)}
    other = shard(families.build("opt"), torch.float32)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    woq_triton.quantize_model(other, config())
    other.load_state_dict(model.state_dict())
    result["state_dict"] = relative(logits(other, batch), want)
    layer = model.model.decoder.layers[0].fc2
    unpickled = pickle.loads(pickle.dumps(layer))
    x = torch.randn(3, layer.in_features)
    result["unpickled"] = outcome(unpickled, x)[1]
    unpickled.mp_group = layer.mp_group
    result["with a group"] = relative(unpickled(x), layer(x))
    return result


def attributes() -> list[str]:
    """Names of attributes that a quantized layer answers differently than the layer it replaced."""
    dense = shard(families.build("opt"), torch.float32)
    quantized = shard(families.build("opt"), torch.float32)
    report = woq_triton.quantize_model(quantized, config())
    names = ["mp_group", "tp_world_size", "tp_index", "world_size", "rank", "name", "gather_output"]
    wrong = []
    for layer in report.layers:
        old, new = dense.get_submodule(layer.name), quantized.get_submodule(layer.name)
        wrong += [f"{layer.name}.{n}" for n in names if getattr(old, n, None) != getattr(new, n, None)]
        for attribute in ("shape", "dtype", "device"):
            if getattr(old.weight, attribute) != getattr(new.weight, attribute):
                wrong.append(f"{layer.name}.weight.{attribute}")
        bias = getattr(old, "bias", None)
        if bias is not None and (new.bias is bias or not torch.equal(new.bias, bias)):
            wrong.append(f"{layer.name}.bias")
    return wrong


def sample(dtype: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """DeepSpeed's own call on a sharded model, as users write it.

    Args:
        dtype: Of the model; ``float16`` is cast to after sharding, which DeepSpeed refuses on CPU.
        settings: ``post_init_quant``.
        options: How ``init_inference`` is told the number of ranks.
    """
    woq_triton.autotp.install()
    try:
        from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization

        torch_dtype = getattr(torch, dtype)
        first = torch.float32 if dtype == "float16" else torch_dtype
        batch = families.inputs("llama")
        model = shard(families.build("llama", first), first, **options).to(torch_dtype)
        before = logits(model, batch)
        ds_config = {"weight_quantization": {"post_init_quant": settings}}
        returned = _init_group_wise_weight_quantization(model, ds_config)
        dense = shard(families.build("llama", first), first, **options).to(torch_dtype)
        for name, module in model.named_modules():
            if isinstance(module, QuantizedModule):
                dense.get_submodule(name).weight.data = module.qweight.dequantize(torch_dtype)
        got = logits(model, batch)
        return {
            "returned the model": returned is model,
            "quantized": sum(isinstance(module, QuantizedModule) for module in model.modules()),
            "kernel": relative(got, logits(dense, batch)),
            "quantization": relative(got, before),
        }
    finally:
        woq_triton.autotp.uninstall()
