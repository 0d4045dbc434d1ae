"""What a rank holds: after quantizing, and at the peak while DeepSpeed loads a model."""

import ctypes
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch

import woq_triton.autotp
from tests.autotp import families
from tests.autotp.cases import config, shard
from tests.autotp.loading import make_engine, write_checkpoint


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


class Peak:
    """The most memory that the process held inside the block, beyond what it held before.

    Attributes:
        anonymous: Bytes of its own memory.
        resident: With the pages of files that it has mapped, which the system takes back when it needs to.
    """

    def __enter__(self) -> "Peak":
        """Start to watch, from a process without free memory in its allocator."""
        gc.collect()
        resident_bytes()
        self.start = self.most = self.now()
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop to watch."""
        self.running = False
        self.thread.join()
        self.anonymous, self.resident = (
            most - start for most, start in zip(self.most, self.start, strict=True)
        )

    def watch(self) -> None:
        """Look every two milliseconds."""
        while self.running:
            now = self.now()
            self.most = max(self.most[0], now[0]), max(self.most[1], now[1])
            time.sleep(0.002)

    @staticmethod
    def now() -> tuple[int, int]:
        """Bytes of this process's anonymous memory, and of all that is resident."""
        with open("/proc/self/status") as file:
            kinds = {line.split()[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Rss")}
        return kinds["RssAnon:"], kinds["RssAnon:"] + kinds["RssFile:"]


def peak_memory(how: str, folder: str, during: bool, **overrides: Any) -> dict[str, int]:
    """Bytes that loading, sharding and quantizing a model takes at its peak, beyond what was there before.

    Args:
        how: As for `make_engine`.
        folder: For the checkpoint files.
        during: Whether to quantize while DeepSpeed shards, or after.
        overrides: Settings of the configuration, which makes a Llama of 642 MiB in fp32.
    """
    size = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "vocab_size": 8000,
        **overrides,
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
        "peak": peak.anonymous,
        "resident": peak.resident,
        "left": peak.now()[0] - peak.start[0],
        "files mapped": Path("/proc/self/maps").read_text().count(folder),
        "dense": sum(shards) * ranks + sum(x.bytes_before for x in report.layers if x.kind == "Embedding"),
        "dense shards": report.bytes_before,
        "quantized": report.bytes_after,
        "largest": max(layer.bytes_before for layer in report.layers),
    }
