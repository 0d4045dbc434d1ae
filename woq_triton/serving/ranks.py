"""What one rank does: load, shard with DeepSpeed AutoTP, measure, quantize, measure again."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from tqdm import tqdm

from woq_triton import mapped_memory, quantize_model, warmup
from woq_triton.report import QuantizationReport
from woq_triton.serving import measure
from woq_triton.serving.model_check import tokenize
from woq_triton.serving.options import DTYPES, GenerateOptions, cpu_cores

PHASES = ("dense", "quantized")


@dataclass(frozen=True)
class Phase:
    """A model measured once.

    Attributes:
        generation: Greedy text as tokens, and its speed.
        text: The same, decoded.
        pieces: Each token decoded alone.
        nll: Mean negative log-likelihood of the evaluation text, in nats a token.
        weight_bytes: Parameters and buffers of this rank.
        resident_bytes: Memory of this rank's process, or that it took of its GPU, once it has generated.
        peak_bytes: The most of it while generating.
    """

    generation: measure.Generation
    text: str
    pieces: list[str]
    nll: float
    weight_bytes: int
    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RankResult:
    """What one rank measured.

    Attributes:
        start_bytes: Its memory before the model was loaded.
        dense: Before quantization.
        quantized: After it.
        kl: Mean KL divergence in nats between the two; on rank 0 only.
        eval_tokens: Tokens that perplexity is a mean over.
        quantize_peak_bytes: The most memory during quantization.
        report: What was quantized on this rank.
    """

    start_bytes: int
    dense: Phase
    quantized: Phase
    kl: float | None
    eval_tokens: int
    quantize_peak_bytes: int
    report: QuantizationReport


class Progress:
    """Progress bars on a terminal: the stages of a run, and below the steps of a stage."""

    def __init__(self, stream: TextIO, shown: bool, stages: int, title: str) -> None:
        # tqdm's own lock is a semaphore of the system, which a rank that is ended would leave behind.
        tqdm.set_lock(threading.RLock())
        # None has tqdm stay silent where the stream is no terminal.
        self._hidden: bool | None = None if shown else True
        self._stream = stream
        self._stages = self._bar(stages, title, "stage", position=0)

    def _bar(self, total: int, title: str, unit: str, position: int) -> Any:
        return tqdm(
            total=total,
            desc=title,
            unit=unit,
            position=position,
            leave=False,
            file=self._stream,
            disable=self._hidden,
        )

    @contextmanager
    def stage(self, title: str, steps: int = 1, unit: str = "model") -> Iterator[Callable[..., None]]:
        """One stage; the function it gives counts a step, or sets (steps done, steps in all)."""
        self._stages.set_postfix_str(title)
        bar = self._bar(steps, title, unit, position=1)

        def step(done: int | None = None, total: int | None = None) -> None:
            if total is not None and bar.total != total:
                bar.reset(total)
            bar.update(1 if done is None else done - bar.n)

        try:
            yield step
        finally:
            bar.close()
            self._stages.update()

    def close(self) -> None:
        """Take the bars off the terminal."""
        self._stages.close()


def run_rank(terminal: TextIO, options: GenerateOptions, saved: str) -> RankResult:
    """Measure a model dense and quantized on this rank.

    Args:
        terminal: Where rank 0 shows progress.
        options: The request.
        saved: A folder in which rank 0 leaves the evaluation's logits, ``dense-0.pt`` and so on.

    Raises:
        ValueError: The prompt or the text does not fit the model, or quantization refuses.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _prepare_environment(options.device, ranks)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages = 7 if options.device == "cpu" else 8
    progress = Progress(terminal, rank == 0, stages, title=f"tp {ranks}")
    memory = measure.Memory(options.device)
    with progress.stage("loading"):
        deepspeed = _start_deepspeed(options.device)
        start_bytes, _ = memory.resident_and_peak()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=DTYPES[options.dtype]).eval()
        prompt_ids, windows = tokenize(options, tokenizer, model.config)
    with progress.stage("sharding"):
        # Without a second variable for the model, whose dense layers would then never go.
        engine = deepspeed.init_inference(
            model,
            tensor_parallel={"tp_size": ranks},
            dtype=DTYPES[options.dtype],
            replace_with_kernel_inject=False,
        )
        del model
        # The whole weights that shards were cut from, which the dense model does not need either.
        mapped_memory.drop_files(engine.module.parameters())
    device = next(engine.module.parameters()).device
    prompt_ids, windows = prompt_ids.to(device), [window.to(device) for window in windows]

    def measure_phase(name: str) -> tuple[Phase, float]:
        memory.reset_peak()
        with progress.stage(f"{name}: text", options.max_new_tokens, "token") as step:
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            generation = measure.generate_greedily(
                engine.module, prompt_ids, options.max_new_tokens, pad, step
            )
        # Before the evaluation, whose logits in fp32 belong to the measuring and not to the model.
        resident, peak = memory.resident_and_peak()
        with progress.stage(f"{name}: perplexity", len(windows), "window") as step:
            nll, kl = _evaluate(engine.module, windows, Path(saved) if rank == 0 else None, name, step)
        phase = Phase(
            generation,
            tokenizer.decode(generation.tokens, skip_special_tokens=True),
            [tokenizer.decode([token]) for token in generation.tokens],
            nll,
            measure.weight_bytes(engine.module),
            resident,
            peak,
        )
        return phase, kl

    dense, _ = measure_phase("dense")
    memory.reset_peak()
    with progress.stage("quantizing", unit="layer") as on_layer:
        report = quantize_model(engine.module, _ds_config(options), on_layer=on_layer)
    _, quantize_peak = memory.resident_and_peak()
    if options.device != "cpu":
        longest = max(prompt_ids.shape[1], *(window.shape[1] for window in windows))
        with progress.stage("compiling kernels"):
            print(warmup(engine.module, max_tokens=longest, progress=False), flush=True)
    quantized, kl = measure_phase("quantized")
    progress.close()
    return RankResult(
        start_bytes,
        dense,
        quantized,
        kl if rank == 0 else None,
        sum(window.shape[1] - 1 for window in windows),
        quantize_peak,
        report,
    )


def _prepare_environment(device: str, ranks: int) -> None:
    """What DeepSpeed and gloo read when they start."""
    os.environ["LOCAL_SIZE"] = str(ranks)
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cpu_cores() // ranks))


def _start_deepspeed(device: str) -> Any:
    """Import DeepSpeed and join the process group."""
    import deepspeed

    # Its shared-memory all-reduce is compiled on first use, and does not reduce non-contiguous fp32 tensors.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False)
    return deepspeed


def _ds_config(options: GenerateOptions) -> dict[str, Any]:
    return {"weight_quantization": {"post_init_quant": {"*": options.scheme.to_dict()}}}


def _evaluate(
    model: nn.Module, windows: list[Tensor], saved: Path | None, phase: str, step: Callable[[], object]
) -> tuple[float, float]:
    """Mean negative log-likelihood and, of the quantized model, mean KL divergence from the dense one.

    Logits go to files and come from there, since those of a large vocabulary would fill the memory that is
    being measured. A rank without a folder takes part in the model's collectives, and returns zeros.
    """
    nll, kl = 0.0, 0.0
    for index, logits in enumerate(measure.next_token_logits(model, windows)):
        if saved is not None:
            nll += measure.sum_nll(logits, windows[index])
            if phase == "quantized":
                kl += measure.sum_kl(torch.load(saved / f"dense-{index}.pt", weights_only=True), logits)
            torch.save(logits, saved / f"{phase}-{index}.pt")
        step()
    return nll / sum(w.shape[1] - 1 for w in windows), kl / sum(w.shape[1] for w in windows)
