"""What `woq-triton generate` was asked for, checked before any rank starts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from woq_triton.scheme import QuantScheme

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
"""Folder of the small trained Llama that the package ships."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class GenerateOptions:
    """A request to generate text with a model, dense and quantized.

    Attributes:
        model: A folder, or an id of the Hugging Face Hub.
        tp: Ranks.
        scheme: How to quantize.
        dtype: A key of `DTYPES`.
        device: "cpu" or "cuda"; "auto" until it was checked.
        prompt: Text to continue.
        max_new_tokens: Tokens to generate.
        text_file: Text that perplexity and KL divergence are measured on.
        eval_tokens: Tokens of it to use.
        compare_tp: Run on one rank as well.
        oversubscribe: Allow more ranks than cores.
    """

    model: str
    tp: int
    scheme: QuantScheme
    dtype: str
    device: str
    prompt: str
    max_new_tokens: int
    text_file: str
    eval_tokens: int
    compare_tp: bool = False
    oversubscribe: bool = False


def check_options(options: GenerateOptions) -> GenerateOptions:
    """Refuse what cannot work, and settle the device.

    Raises:
        ValueError: An option cannot be served; the message names it, its value and the way out.
    """
    for option, value, least in (
        ("--tp", options.tp, 1),
        ("--max-new-tokens", options.max_new_tokens, 1),
        ("--eval-tokens", options.eval_tokens, 2),
    ):
        if value < least:
            raise ValueError(f"{option} is {value}, but must be at least {least}")
    if not options.prompt:
        raise ValueError("--prompt is empty; give the text to continue")
    options = replace(options, device=_settle_device(options.device))
    _check_ranks(options)
    if options.device == "cpu" and options.dtype == "float16":
        raise ValueError(
            "--dtype float16 is not possible on CPU: DeepSpeed refuses it there; use bfloat16 or float32"
        )
    _check_text(options.text_file)
    return options


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _settle_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here; use --device cpu")
    return device


def _check_ranks(options: GenerateOptions) -> None:
    tp = options.tp
    if options.device == "cuda":
        if tp > (gpus := torch.cuda.device_count()):
            raise ValueError(
                f"--tp {tp} is more than the {gpus} visible GPUs, and NCCL cannot put two ranks on one; "
                f"use --tp {gpus} or fewer, or --device cpu"
            )
    elif tp > (cores := cpu_cores()) and not options.oversubscribe:
        raise ValueError(
            f"--tp {tp} is more than the {cores} CPU cores; use --tp {cores} or fewer, "
            "or insist with --oversubscribe"
        )


def _check_text(text_file: str) -> None:
    try:
        text = Path(text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {text_file} cannot be read: {error}") from None
    if not text.strip():
        raise ValueError(f"--text {text_file} is empty")
