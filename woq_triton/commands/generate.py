"""`woq-triton generate`: shard a model, generate text, quantize it, generate again, and compare."""

import json
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from woq_triton.scheme import QuantScheme
from woq_triton.serving.launcher import Interrupted, RankFailed
from woq_triton.serving.model_check import check_model
from woq_triton.serving.options import DEMO_MODEL, GenerateOptions, check_options
from woq_triton.serving.runs import run_and_compare
from woq_triton.serving.summary import render


class Dtype(str, Enum):
    """What activations and dense weights are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """Where the ranks run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def generate(
    model: Annotated[
        str,
        typer.Option(
            help="A folder, or a model id of the Hugging Face Hub.", show_default="the shipped model"
        ),
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks to shard over, each a process on this machine.")] = 1,
    num_bits: Annotated[int, typer.Option(help="Bits a weight: 4 or 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Weights that share a scale; -1: all of a row or column.")
    ] = 64,
    group_dim: Annotated[int, typer.Option(help="Groups along in_features (1) or out_features (0).")] = 1,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Groups without a minimum.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(help="auto: GPUs where there are any.")] = Device.auto,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "And the LORD said unto Moses,",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate, greedily.")] = 32,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure perplexity on.", show_default="the shipped one")
    ] = None,
    eval_tokens: Annotated[int, typer.Option(help="Tokens of that text to use.")] = 512,
    compare_tp: Annotated[
        bool, typer.Option("--compare-tp", help="Run on one rank too, and compare texts and logits.")
    ] = False,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than there are CPU cores.")
    ] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave out the table of layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what the ranks log, and the traceback of one that fails.")
    ] = False,
) -> None:
    """Shard a model over local ranks, quantize it, and compare text, quality, speed and memory.

    Standard output holds the result alone; progress and messages go to standard error.
    """
    try:
        options = check_options(
            GenerateOptions(
                model=model or str(DEMO_MODEL),
                tp=tp,
                scheme=QuantScheme(num_bits, group_size, group_dim, symmetric),
                dtype=dtype.value,
                device=device.value,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                text_file=str(text) if text is not None else str(DEMO_MODEL / "eval.txt"),
                eval_tokens=eval_tokens,
                compare_tp=compare_tp,
                oversubscribe=oversubscribe,
            )
        )
        check_model(options)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        with tempfile.TemporaryDirectory(prefix="woq-triton-") as scratch:
            summary, report = run_and_compare(options, Path(scratch), verbose)
    except RankFailed as error:
        typer.echo(error.describe(verbose), err=True)
        raise typer.Exit(1) from None
    except Interrupted:
        typer.echo("interrupted; all ranks have ended", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        typer.echo(render(summary, None if brief else report))
