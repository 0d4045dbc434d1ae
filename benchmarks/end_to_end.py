"""A whole model, dense and int4: `python -m benchmarks.end_to_end`.

A random Llama of about 1 B parameters goes through `woq-triton generate` at tp 1 and 2, with a prompt of 128
tokens and 64 new ones; then, without DeepSpeed, through decoding steps of growing batches.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure, results
from woq_triton import quantize_model
from woq_triton.serving.options import DEMO_MODEL

PROMPT_TOKENS, NEW_TOKENS = 128, 64
BATCHES = (1, 4, 16, 64)
SETTINGS = {"num_bits": 4, "group_size": 128, "group_dim": 1, "symmetric": False}


def main(arguments: list[str] | None = None) -> int:
    """Measure and leave the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=measure.positive_int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--hidden", type=measure.positive_int, default=2048, help="hidden size of the model")
    parser.add_argument("--layers", type=measure.positive_int, default=16, help="its layers")
    parser.add_argument("--steps", type=measure.positive_int, default=6, help="decoding steps a batch")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.hidden % 256:
        parser.error(f"argument --hidden: {options.hidden} is no multiple of 256, four heads of 64")
    try:
        path = results.new_file(options.results, "end-to-end", "cpu")
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="woq-triton-bench-") as scratch:
        titles = ["model", *(f"generate, tp {tp}" for tp in options.tp), "batches"]
        steps = measure.progress(titles, "end to end")
        next(steps)
        folder = Path(scratch) / "model"
        model, prompt = make_model(options.hidden, options.layers, folder)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        runs = []
        for tp in options.tp:
            next(steps)
            runs.append(generate(folder, prompt, tp))
        next(steps)
        batches = measure_batches(folder, options.steps)
        list(steps)
    body = {"parameters": parameters, "settings": SETTINGS, "generate": runs, "batches": batches}
    results.write(path, "end-to-end", "cpu", body)
    print(section(body))
    print(f"\n{path}")
    return 0


def make_model(hidden: int, layers: int, folder: Path) -> tuple[nn.Module, str]:
    """Save a random Llama with the tokenizer of the model that the package ships.

    Returns:
        The model, and a prompt of `PROMPT_TOKENS` tokens.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    ids = tokenizer((DEMO_MODEL / "eval.txt").read_text(encoding="utf-8"))["input_ids"]
    return model, tokenizer.decode(ids[:PROMPT_TOKENS], skip_special_tokens=True)


def generate(folder: Path, prompt: str, tp: int) -> dict[str, Any]:
    """What `woq-triton generate` measures at a number of ranks."""
    command = [sys.executable, "-m", "woq_triton", "generate", "--model", str(folder), "--tp", str(tp)]
    command += ["--group-size", str(SETTINGS["group_size"]), "--dtype", "bfloat16", "--device", "cpu"]
    command += ["--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS), "--eval-tokens", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[2:6])} failed:\n{done.stderr}")
    summary = json.loads(done.stdout)
    return {
        "tp": tp,
        "prompt_tokens": summary["prompt_tokens"],
        "new_tokens": len(summary["dense"]["tokens"]),
        **{
            phase: {
                "prefill_tokens_per_second": summary[phase]["prefill_tokens_per_second"],
                "decode_tokens_per_second": summary[phase]["decode_tokens_per_second"],
                "weight_bytes": [rank[phase]["weight_bytes"] for rank in summary["memory"]],
                **{
                    name: [rank[phase][name] for rank in summary["memory"]]
                    for name in ("resident_bytes", "peak_bytes")
                },
            }
            for phase in ("dense", "quantized")
        },
        **{
            name: [rank[name] for rank in summary["memory"]]
            for name in ("start_bytes", "quantize_peak_bytes")
        },
    }


def measure_batches(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Median seconds of a decoding step by batch, of the dense model and then of the quantized one."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = [{"batch": batch, "dense_seconds": _step_seconds(model, batch, steps)} for batch in BATCHES]
    quantize_model(model, {"weight_quantization": {"post_init_quant": {"*": SETTINGS}}})
    for record in found:
        record["quantized_seconds"] = _step_seconds(model, int(record["batch"]), steps)
    return found


@torch.no_grad()
def _step_seconds(model: nn.Module, batch: int, steps: int) -> float:
    ids = torch.randint(0, 256, (batch, 8), generator=torch.Generator().manual_seed(batch))
    out = model(ids, use_cache=True)
    times = []
    for _ in range(steps + 1):
        token: Tensor = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def section(body: dict[str, Any]) -> str:
    """The results as Markdown."""
    titles = ("prefill, tokens/s", "decode, tokens/s", "weights", "process after generating", "at its peak")
    starts = [start for run in body["generate"] for start in run["start_bytes"]]
    quantizing = max(peak for run in body["generate"] for peak in run["quantize_peak_bytes"])
    lines = [
        "### A whole model",
        "",
        f"A random Llama of {body['parameters'] / 1e9:.2f} B parameters, bf16 and int4 g128, through "
        f"`woq-triton generate`: {PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new ones.",
        "",
        f"| ranks | {' | | '.join(titles)} | |",
        f"| --- |{' --- | --- |' * len(titles)}",
        f"| |{' dense | int4 |' * len(titles)}",
    ]
    for run in body["generate"]:
        cells = [str(run["tp"])]
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            cells += [f"{run[phase][key]:.1f}" for phase in ("dense", "quantized")]
        for key in ("weight_bytes", "resident_bytes", "peak_bytes"):
            cells += [f"{max(run[phase][key]) / 2**30:.2f} GiB" for phase in ("dense", "quantized")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Memory is that of the largest rank's process, {min(starts) / 2**30:.2f} GiB of it before the model "
        f"is loaded, and its peak that while generating; quantizing itself took {quantizing / 2**30:.2f} GiB "
        "at most, the dense model included.",
        "",
        "A decoding step of the same model without DeepSpeed, by batch:",
        "",
        f"| batch | {' | '.join(str(record['batch']) for record in body['batches'])} |",
        f"| --- | {' | '.join('---' for _ in body['batches'])} |",
    ]
    for name, key in (("dense bf16", "dense_seconds"), ("int4 g128", "quantized_seconds")):
        lines.append(f"| {name}, ms | {' | '.join(f'{1e3 * r[key]:.0f}' for r in body['batches'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
