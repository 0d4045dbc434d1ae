"""What the ranks do in the tests of this folder; each function runs on every rank of a pool."""

import copy
import ctypes
import gc
import os
import pickle
import signal
import threading
import time
import types
import weakref
from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce, SubParamColumnParallel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks as module_hooks

import woq_triton.autotp
from tests.autotp import families
from woq_triton.modules import QuantizedModule


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


def empty_shards(name: str) -> int:
    """How many of this rank's quantized weights have no rows or no columns."""
    model = shard(families.build(name), torch.float32)
    report = woq_triton.quantize_model(model, config())
    return sum(0 in layer.shape for layer in report.layers)


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


def memory() -> dict[str, float]:
    """Quantize a model of some 100 MB a rank and see what of the dense one is left."""
    overrides = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8000}
    model = shard(families.build("llama", **overrides), torch.float32)
    gc.collect()
    watched = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    # A Parameter may outlive its layer; what must not is its storage.
    before = resident_bytes()
    report = woq_triton.quantize_model(model, config(group_size=128))
    alive = [ref() for ref in watched]
    converted = {tuple(layer.shape) for layer in report.layers}
    return {
        "dense weights alive": sum(p is not None and tuple(p.shape) in converted for p in alive),
        "released": before - resident_bytes(),
        "bytes before": report.bytes_before,
        "bytes after": report.bytes_after,
    }


def resident_bytes() -> int:
    """Memory of this process, after the allocator gave back what it does not use."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        weights = families.build(name, **overrides).state_dict()
        layers: dict[str, list[str]] = {}
        for key in weights:
            layers.setdefault(key.rpartition(".")[0], []).append(key)
        names = list(layers)
        for index in range(files):
            part = names[len(names) * index // files : len(names) * (index + 1) // files]
            tensors = {key: weights[key].clone() for layer in part for key in layers[layer]}
            save_file(tensors, os.path.join(folder, f"{index:05d}.safetensors"))
        del weights
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


class Peak:
    """The most anonymous memory (not files' pages) that the process held inside the block."""

    def __enter__(self) -> "Peak":
        """Start to watch, from a process without free memory in its allocator."""
        gc.collect()
        resident_bytes()
        self.start = self.most = self.anonymous()
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop to watch."""
        self.running = False
        self.thread.join()
        self.grown = self.most - self.start

    def watch(self) -> None:
        """Look every two milliseconds."""
        while self.running:
            self.most = max(self.most, self.anonymous())
            time.sleep(0.002)

    @staticmethod
    def anonymous() -> int:
        """Bytes of this process's anonymous memory that are resident."""
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def peak_memory(how: str, folder: str, during: bool, hidden: int = 1024, layers: int = 10) -> dict[str, int]:
    """Bytes that loading, sharding and quantizing a model takes at its peak, beyond what was there before."""
    size = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": 8000,
    }
    if how not in ("memory", "host"):
        write_checkpoint("llama", int(how), folder, **size)
    memory()  # loads and allocates what stays for good
    with Peak() as peak:
        if during:
            with woq_triton.autotp.ReplacePolicy(config(group_size=128)) as policy:
                model = make_engine("llama", how, folder, **size)
            report = policy.report
        else:
            model = make_engine("llama", how, folder, **size)
            report = woq_triton.quantize_model(model, config(group_size=128))
    ranks = torch.distributed.get_world_size()
    shards = [layer.bytes_before for layer in report.layers if layer.kind != "Embedding"]
    return {
        "peak": peak.grown,
        "left": peak.anonymous() - peak.start,
        "dense": sum(shards) * ranks + sum(x.bytes_before for x in report.layers if x.kind == "Embedding"),
        "dense shards": report.bytes_before,
        "quantized": report.bytes_after,
        "largest": max(layer.bytes_before for layer in report.layers),
    }


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
            "conv": layers.Conv_LinearALlreduce(linear(192, 192, False), group, **options),
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

    quantized, dense = make(), make()
    before = {name: apply(layer, name) for name, layer in dense.items() if name not in ("conv", "deferred")}
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
