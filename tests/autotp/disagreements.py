"""What ranks do that fail, differ or die while they quantize."""

import os
import signal
import time

import torch

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, logits, outcome, shard


def nan_on_rank(rank: int) -> tuple[str, str, bool]:
    """Quantize a model whose weights are broken on one rank."""
    model = shard(families.build("llama"), torch.float32)
    if torch.distributed.get_rank() == rank:
        model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    kinds = [type(module) for module in model.modules()]
    kind, message = outcome(woq_triton.quantize_model, model, config())
    return kind, message, kinds == [type(module) for module in model.modules()]


def failure_while_converting() -> tuple[str, str]:
    """Let rank 0 run into an error after the ranks agreed."""
    model = shard(families.build("llama"), torch.float32)

    def fail(done: int, total: int) -> None:
        if torch.distributed.get_rank() == 0 and done == 3:
            raise ValueError("no space left for progress")

    return outcome(lambda: woq_triton.quantize_model(model, config(), on_layer=fail))


def different_settings() -> tuple[str, str]:
    """Quantize with another width on rank 1."""
    model = shard(families.build("llama"), torch.float32)
    bits = 8 if torch.distributed.get_rank() == 1 else 4
    return outcome(woq_triton.quantize_model, model, config(num_bits=bits))


def forward_replaced_on_rank_1() -> tuple[bool, list[str]]:
    """Quantize where one rank cannot convert one layer."""
    model = shard(families.build("llama"), torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    if torch.distributed.get_rank() == 1:
        layer.forward = layer.forward
    report = woq_triton.quantize_model(model, config())
    logits(model, families.inputs("llama"))
    name = "model.layers.0.mlp.up_proj"
    reasons = [layer.reason for layer in report.skipped if layer.name == name]
    return any(layer.name == name for layer in report.layers), reasons


def die_on_rank(rank: int) -> tuple[float, str]:
    """Quantize while one rank is killed before it can agree."""
    model = shard(families.build("llama"), torch.float32)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, _ = outcome(woq_triton.quantize_model, model, config())
    return time.monotonic() - start, kind
