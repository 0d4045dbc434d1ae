"""Every layer class that AutoTP can make, and the ways to get them, quantized and compared."""

from typing import Any

import torch
from torch import Tensor, nn

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, logits, put_dequantized, relative, shard


def layer_classes(group_dim: int, num_bits: int) -> dict[str, Any]:
    """Quantize one of each layer that AutoTP's classes can make, and compare with dequantized shards."""
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    group = torch.distributed.group.WORLD
    options = {"tp_meta": AutoTPMeta(num_kv_heads=4), "name": "layer"}

    def linear(columns: int, rows: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(columns, rows, bias)

    def make() -> nn.ModuleDict:
        torch.manual_seed(5)
        column = layers.VocabParallelLinear(linear(192, 300, False), group, **options)
        row = layers.LinearAllreduceWithReplicatedInput(linear(192, 300), group, **options)
        made = {
            "gathered": layers.LinearLayer(linear(192, 300), group, gather_output=True, **options),
            "vocab_parallel": column,
            "replicated_input": row,
            "sub_column": layers.SubParamLinearLayer(linear(192, 384), group, shape=(3, -1), **options),
            "sub_uneven": layers.SubParamLinearLayer(
                linear(192, 384), group, shape=((256, 64, 64), -1), partition_dim=0, **options
            ),
            "sub_row": layers.SubParamLinearAllreduce(
                linear(384, 192), group, shape=(-1, 3), partition_dim=1, **options
            ),
            "vocab_table": layers.VocabParallelEmbedding(nn.Embedding(300, 192), group, **options),
            "tied_table": layers.VocabParallelEmbedding(
                nn.Embedding(300, 192), group, tied_vocab_parallel_linear=column, **options
            ),
            "hidden_table": layers.HiddenParallelEmbedding(nn.Embedding(300, 192), group, **options),
            "hidden_tied": layers.HiddenParallelEmbedding(
                nn.Embedding(300, 192), group, tied_row_parallel_linear=row, **options
            ),
            "unsharded": layers.LinearLayer(linear(192, 300), None, **options),
            "plain_table": layers.EmbeddingLayer(weight=nn.Parameter(torch.randn(300, 192))),
            "deferred": layers.LinearLayer(linear(192, 300), group, **options),
            # These two take heads from several places; the second cannot have a bias in DeepSpeed.
            "yuan_column": layers.Yuan_LinearLayer(linear(192, 256), group, **options),
            "yuan_row": layers.Yuan_LinearAllreduce(linear(256, 192, False), group, **options),
            "conv": layers.Conv_LinearALlreduce(linear(192, 192, False), group, **options),
            "conv_column": layers.conv_LinearLayer(linear(192, 192, False), group, **options),
        }
        made["deferred"].defer_collectives_to_compiler = True
        return nn.ModuleDict(made).requires_grad_(False)

    def apply(layer: nn.Module, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        if "table" in name or name == "hidden_tied":
            return layer(torch.randint(0, 300, (2, 7), generator=generator))
        width = layer.weight.shape[1]
        if name == "replicated_input":
            width = 192
        return layer(torch.randn(2, 7, width, generator=generator))

    refused = ("conv", "conv_column", "deferred")
    quantized, dense = make(), make()
    before = {name: apply(layer, name) for name, layer in dense.items() if name not in refused}
    report = woq_triton.quantize_model(quantized, config(group_dim=group_dim, num_bits=num_bits))
    put_dequantized(quantized, dense, report)
    try:
        # Overlapping only moves an all-reduce of the backward pass.
        layers.TensorParallel_Layer.tp_overlap_comm = True
        overlap = relative(apply(quantized["gathered"], "gathered"), apply(dense["gathered"], "gathered"))
    finally:
        layers.TensorParallel_Layer.tp_overlap_comm = False
    return {
        "overlap": overlap,
        "errors": {n: relative(apply(quantized[n], n), apply(dense[n], n)) for n in before},
        "changes": {n: relative(apply(quantized[n], n), want) for n, want in before.items()},
        "tied": quantized["tied_table"].packed is quantized["vocab_parallel"].packed
        and quantized["hidden_tied"].packed is quantized["replicated_input"].packed,
        "skipped": {layer.name: layer.reason for layer in report.skipped},
        "classes": {layer.kind for layer in report.layers},
        "vocab": [
            getattr(quantized["vocab_parallel"], n) for n in ("vocab_size", "is_vocab_parallel_lm_head")
        ],
    }


def partition_config() -> dict[str, float]:
    """Quantize a model that a partition config shards, with sub-parameters and a gathered head."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig

    plan = {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*[qkv]_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*(o|down)_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*gate_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
            {"patterns": [r".*up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
            {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True},
        ],
    }
    world = torch.distributed.get_world_size()

    def make() -> nn.Module:
        model = families.build("llama", intermediate_size=512)
        auto = AutoTP(
            model,
            (),
            "",
            None,
            None,
            None,
            partition_config=AutoTPConfig.from_dict(plan),
            model_config=model.config,
        )
        auto.set_tensor_parallel_config(world, torch.distributed.group.WORLD)
        auto.update_linear_policies()
        return auto._replace_module(model)

    batch = families.inputs("llama")
    quantized, dense = make(), make()
    before = logits(dense, batch)
    report = woq_triton.quantize_model(quantized, config())
    put_dequantized(quantized, dense, report)
    return {
        "kernel": relative(logits(quantized, batch), logits(dense, batch)),
        "quantization": relative(logits(quantized, batch), before),
        "sub-parameter layers": sum(layer.kind == "SubParamLinearLayer" for layer in report.layers),
        "head": quantized.lm_head.gather_output,
    }


def injection_policy() -> dict[str, float]:
    """Quantize a model that an injection policy shards."""
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    batch = families.inputs("opt")
    policy = {OPTDecoderLayer: ("self_attn.out_proj", ".fc2")}
    quantized = shard(families.build("opt"), torch.float32, injection_policy=dict(policy))
    dense = shard(families.build("opt"), torch.float32, injection_policy=dict(policy))
    before = logits(dense, batch)
    report = woq_triton.quantize_model(quantized, config())
    put_dequantized(quantized, dense, report)
    return {
        "kernel": relative(logits(quantized, batch), logits(dense, batch)),
        "quantization": relative(logits(quantized, batch), before),
        "parallel": sum(
            layer.kind.startswith("Linear") and layer.kind != "Linear" for layer in report.layers
        ),
    }
