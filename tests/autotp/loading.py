"""Models that DeepSpeed gets in memory or loads from files, quantized while it shards them and after."""

import gc
import os
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks as module_hooks

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, logits, outcome, relative, shard


def make_engine(name: str, how: str, folder: str, **overrides: Any) -> nn.Module:
    """Shard a model that DeepSpeed gets in one of the ways it knows.

    Args:
        name: The family.
        how: ``memory``, ``host`` (left in host memory by DeepSpeed), or the number of checkpoint files
            from which DeepSpeed loads a model whose own parameters are on the meta device.
        folder: For the checkpoint files, which are made if they are missing.
        overrides: Settings of the configuration.
    """
    if how == "memory":
        return shard(families.build(name, **overrides), torch.float32)
    if how == "host":
        return shard(families.build(name, **overrides), torch.float32, keep_module_on_host=True)
    write_checkpoint(name, int(how), folder, **overrides)
    model = families.build(name, empty=True, **overrides)
    files = sorted(os.listdir(folder))
    checkpoint = {"type": "ds_model", "checkpoints": files, "version": 1.0}
    return shard(model, torch.float32, checkpoint=checkpoint, base_dir=folder)


def write_checkpoint(name: str, files: int, folder: str, **overrides: Any) -> None:
    """Write a family's weights into so many files, once, on rank 0; layers are not cut in two."""
    if torch.distributed.get_rank() == 0 and not os.listdir(folder):
        model = families.build(name, **overrides)
        # As transformers saves it: a weight that has two names once, under the first.
        once = {
            id(parameter): key
            for key, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))
        }
        kept = {*once.values(), *dict(model.named_buffers())}
        weights = {key: value for key, value in model.state_dict().items() if key in kept}
        layers: dict[str, list[str]] = {}
        for key in weights:
            layers.setdefault(key.rpartition(".")[0], []).append(key)
        names = list(layers)
        for index in range(files):
            part = names[len(names) * index // files : len(names) * (index + 1) // files]
            tensors = {key: weights[key].clone() for layer in part for key in layers[layer]}
            save_file(tensors, os.path.join(folder, f"{index:05d}.safetensors"))
        del model, weights
        gc.collect()
    torch.distributed.barrier()


def policy_against_afterwards(name: str, how: str, folder: str, **scheme: Any) -> dict[str, Any]:
    """Quantize while AutoTP shards, and after, and compare the two models."""
    batch = families.inputs(name)
    with woq_triton.autotp.ReplacePolicy(config(**scheme)) as policy:
        model = make_engine(name, how, folder)
    after = shard(families.build(name), torch.float32)
    want = woq_triton.quantize_model(after, config(**scheme))
    theirs = after.state_dict()
    return {
        "logits": relative(logits(model, batch), logits(after, batch)),
        "state": [key for key, value in model.state_dict().items() if not torch.equal(value, theirs[key])],
        "missing": sorted(theirs.keys() ^ model.state_dict().keys()),
        "layers": sorted(map(str, policy.report.layers)) == sorted(map(str, want.layers)),
        "skipped": sorted(map(str, policy.report.skipped)) == sorted(map(str, want.skipped)),
        "heads": [
            name
            for (name, ours), other in zip(model.named_modules(), after.modules(), strict=True)
            if any(
                getattr(ours, a, None) != getattr(other, a, None)
                for a in ("num_heads", "n_heads", "embed_dim")
            )
        ],
    }


def policy_failure(rank: int) -> dict[str, Any]:
    """A weight that is NaN in the shard of one rank, found while AutoTP shards."""
    model = families.build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data[-1 if rank == torch.distributed.get_world_size() - 1 else 0, 0] = float("nan")

    def run() -> None:
        with woq_triton.autotp.ReplacePolicy(config()):
            shard(model, torch.float32)

    return {"raised": outcome(run), "hooks left": len(module_hooks)}


def policy_with_a_gap(name: str, lost: str, folder: str) -> tuple[str, str]:
    """Load a model from a file that lacks a weight, or whose modules DeepSpeed's loader does not all know."""
    write_checkpoint(name, 1, folder)
    torch.distributed.barrier()
    if lost and torch.distributed.get_rank() == 0:
        (file,) = [os.path.join(folder, each) for each in os.listdir(folder)]
        weights = {key: value.clone() for key, value in load_file(file).items() if key != lost}
        save_file(weights, file)
    torch.distributed.barrier()

    def run() -> None:
        with woq_triton.autotp.ReplacePolicy(config()):
            make_engine(name, "1", folder)

    return outcome(run)
