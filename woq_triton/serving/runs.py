"""The run that was asked for and, if wanted, the same on one rank, put together into one summary."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from woq_triton import __version__
from woq_triton.serving.launcher import RankFailed, launch
from woq_triton.serving.measure import relative_difference
from woq_triton.serving.options import GenerateOptions
from woq_triton.serving.ranks import PHASES, Phase, RankResult, run_rank

Summary = dict[str, Any]
"""What `--json` prints."""


def run_and_compare(options: GenerateOptions, scratch: Path, verbose: bool) -> tuple[Summary, str]:
    """Run the model on its ranks, and on one rank as well if the options ask for it.

    Args:
        options: Checked options.
        scratch: An empty folder.
        verbose: Let ranks log to standard error.

    Returns:
        The summary, and rank 0's quantization report as text.

    Raises:
        RankFailed: A rank failed.
        woq_triton.serving.launcher.Interrupted: The user stopped it.
    """
    results = _run(options, scratch, verbose)
    summary = _summarize(options, results)
    if options.compare_tp:
        alone = _run(replace(options, tp=1), scratch, verbose)[0]
        summary["tp_comparison"] = _compare_tp(options, results[0], alone, scratch)
    return summary, str(results[0].report)


def _run(options: GenerateOptions, scratch: Path, verbose: bool) -> list[RankResult]:
    folder = scratch / f"ranks-{options.tp}"
    saved = _saved(scratch, options.tp)
    folder.mkdir(exist_ok=True)
    saved.mkdir(exist_ok=True)
    results: list[RankResult] = launch(run_rank, (options, str(saved)), options.tp, folder, verbose)
    for rank, result in enumerate(results):
        for phase in PHASES:
            if _phase(result, phase).generation.tokens != _phase(results[0], phase).generation.tokens:
                raise RankFailed(
                    rank, f"its {phase} text is not that of rank 0; the ranks have come apart", ""
                )
    return results


def _saved(scratch: Path, tp: int) -> Path:
    return scratch / f"logits-{tp}"


def _phase(result: RankResult, name: str) -> Phase:
    phase: Phase = getattr(result, name)
    return phase


def _summarize(options: GenerateOptions, results: list[RankResult]) -> Summary:
    first = results[0]
    return {
        "woq_triton": __version__,
        "model": options.model,
        "tp": options.tp,
        "device": options.device,
        "dtype": options.dtype,
        "scheme": options.scheme.to_dict(),
        "prompt": options.prompt,
        "prompt_tokens": first.dense.generation.prompt_tokens,
        **{phase: _summarize_phase(_phase(first, phase)) for phase in PHASES},
        "first_difference": first_difference(first.dense, first.quantized),
        "text_file": options.text_file,
        "eval_tokens": first.eval_tokens,
        "kl_divergence_nats": _finite(first.kl),
        "perplexity_change": _finite(_exp(first.quantized.nll - first.dense.nll) - 1),
        "memory": [
            {
                "rank": rank,
                "start_bytes": result.start_bytes,
                **{
                    phase: {
                        "weight_bytes": _phase(result, phase).weight_bytes,
                        "resident_bytes": _phase(result, phase).resident_bytes,
                        "peak_bytes": _phase(result, phase).peak_bytes,
                    }
                    for phase in PHASES
                },
                "quantize_peak_bytes": result.quantize_peak_bytes,
            }
            for rank, result in enumerate(results)
        ],
        "report": first.report.to_dict(),
    }


def _summarize_phase(phase: Phase) -> Summary:
    return {
        "text": phase.text,
        "tokens": phase.generation.tokens,
        "prefill_tokens_per_second": phase.generation.prefill_tokens_per_second,
        "decode_tokens_per_second": phase.generation.decode_tokens_per_second,
        "perplexity": _finite(_exp(phase.nll)),
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def first_difference(phase: Phase, other: Phase) -> Summary | None:
    """The first token at which two texts part, or None if they are equal."""
    a, b = phase.generation.tokens, other.generation.tokens
    for position in range(max(len(a), len(b))):
        if a[position : position + 1] != b[position : position + 1]:
            pieces = [(p.pieces[position] if position < len(p.pieces) else None) for p in (phase, other)]
            return {"position": position, "pieces": pieces}
    return None


def _compare_tp(options: GenerateOptions, sharded: RankResult, alone: RankResult, scratch: Path) -> Summary:
    comparison: Summary = {}
    for phase in PHASES:
        paths, references = (sorted(_saved(scratch, tp).glob(f"{phase}-*.pt")) for tp in (options.tp, 1))
        comparison[phase] = {
            "first_difference": first_difference(_phase(sharded, phase), _phase(alone, phase)),
            "logits_relative_difference": relative_difference(paths, references),
            "text_at_tp_1": _phase(alone, phase).text,
        }
    return comparison
