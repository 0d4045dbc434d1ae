"""What is measured of a model: greedy text and its speed, next-token distributions, and memory.

Perplexity is ``exp`` of the mean negative log-likelihood of each token given those before it in its window.
The KL divergence is ``sum_v p(v) * (log p(v) - log q(v))`` in nats, p of the dense and q of the quantized
model, averaged over the same positions.
"""

import ctypes
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EVAL_WINDOW = 512
"""Tokens of text in one forward pass at most."""


@dataclass(frozen=True)
class Generation:
    """Greedily generated tokens.

    Attributes:
        tokens: Ids, without the prompt.
        prompt_tokens: Number of ids of the prompt.
        prefill_seconds: Until the first token.
        decode_seconds: From the first to the last.
    """

    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt a second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the first; None if there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


class TokenClock:
    """A streamer for `generate` that notes when each token came."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self.times: list[float] = []
        self._on_token = on_token

    def put(self, value: Tensor) -> None:
        """Note the time; the first call, with the prompt, starts the clock."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self._on_token()

    def end(self) -> None:
        """Nothing is left to do."""


@torch.no_grad()
def generate_greedily(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    pad_token_id: int | None,
    on_token: Callable[[], object],
) -> Generation:
    """Continue a prompt through the model's own `generate` with its key/value cache.

    Args:
        model: A Hugging Face causal language model.
        ids: int64 ``[1, tokens]``, on the model's device.
        max_new_tokens: Fewer come if the model ends its text.
        pad_token_id: What `generate` pads with.
        on_token: Called for each new token.
    """

    def run(new_tokens: int, clock: TokenClock) -> Tensor:
        generate: Any = model.generate
        return generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad_token_id,
            streamer=clock,
        )

    run(2, TokenClock(lambda: None))  # The first call pays for set-up: caches, kernels, thread pools.
    clock = TokenClock(on_token)
    sequence = run(max_new_tokens, clock)
    start, first, last = clock.times[0], clock.times[1], clock.times[-1]
    return Generation(sequence[0, ids.shape[1] :].tolist(), ids.shape[1], first - start, last - first)


def eval_windows(ids: Tensor, context: int | None) -> list[Tensor]:
    """Cut ``[tokens]`` into windows side by side, each at least 2 tokens and within the model's context."""
    length = min(EVAL_WINDOW, context or EVAL_WINDOW)
    return [window[None] for window in torch.split(ids, length) if len(window) > 1]


@torch.no_grad()
def next_token_logits(model: nn.Module, windows: list[Tensor]) -> Iterator[Tensor]:
    """Logits ``[tokens, vocabulary]`` on the CPU, in the model's dtype, for each window ``[1, tokens]``."""
    for window in windows:
        yield model(window, attention_mask=torch.ones_like(window), use_cache=False).logits[0].cpu()


def sum_nll(logits: Tensor, window: Tensor) -> float:
    """Negative log-likelihood in nats of a window's tokens after its first, summed."""
    targets = window[0, 1:].cpu()
    return float(nn.functional.cross_entropy(logits[:-1].float(), targets, reduction="sum"))


def sum_kl(dense_logits: Tensor, logits: Tensor) -> float:
    """KL divergence in nats of the next-token distributions of a window, summed over all positions."""
    p, q = (torch.log_softmax(x.float(), dim=-1) for x in (dense_logits, logits))
    return float(nn.functional.kl_div(q, p, reduction="sum", log_target=True))


def relative_difference(paths: list[Path], reference_paths: list[Path]) -> float:
    """``|a - b| / |b|`` (Frobenius norms) of saved tensors, all taken together."""
    difference, norm = 0.0, 0.0
    for path, reference_path in zip(paths, reference_paths, strict=True):
        a, b = (torch.load(p, weights_only=True).double() for p in (path, reference_path))
        difference += float((a - b).square().sum())
        norm += float(b.square().sum())
    return math.sqrt(difference / norm)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared storage counts once."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Memory:
    """This process's memory: what it took of its GPU where it has one, else of the system."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def resident_and_peak(self) -> tuple[int, int]:
        """Bytes held now, after giving back what can be, and the most since `reset_peak`; never less."""
        self._give_back()
        if self._cuda:
            resident, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        else:
            # Where there is no /proc, only the peak of the whole process can be had.
            unit = 1 if sys.platform == "darwin" else 1024
            peak = _proc_status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            resident = _proc_status("VmRSS") or peak
        return resident, max(resident, peak)

    def reset_peak(self) -> None:
        """Start over; where the system has no way to, the peak stays that of the whole process."""
        self._give_back()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _give_back(self) -> None:
        """Return freed memory to the GPU or the system, which allocators keep for the next use."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _proc_status(field: str) -> int | None:
    """A size from /proc/self/status in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
