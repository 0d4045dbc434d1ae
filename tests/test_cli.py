"""`woq-triton generate` with real ranks on the shipped model, and everything it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from typer.testing import CliRunner

import woq_triton
from woq_triton.cli import app
from woq_triton.serving.launcher import RankFailed
from woq_triton.serving.options import DEMO_MODEL
from woq_triton.serving.summary import render

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "woq_triton", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def sharded() -> dict[str, Any]:
    """The demo: int4 g64 at tp 2 in fp32, compared with tp 1."""
    result = run(
        *"generate --tp 2 --group-size 64 --dtype float32 --compare-tp --oversubscribe --json".split()
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no terminal, so no bars, and nobody's log
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def test_text_at_tp_2_equals_text_at_tp_1_in_fp32(sharded: dict[str, Any]) -> None:
    for phase in ("dense", "quantized"):
        comparison = sharded["tp_comparison"][phase]
        assert comparison["first_difference"] is None
        assert comparison["text_at_tp_1"] == sharded[phase]["text"]
        assert len(sharded[phase]["tokens"]) == 32
        # Only the order of fp32 sums differs: 256 to 768 terms, through four layers.
        assert comparison["logits_relative_difference"] < 1e-5


def test_the_report_and_the_memory_agree_on_what_became_smaller(sharded: dict[str, Any]) -> None:
    report = sharded["report"]
    assert [memory["rank"] for memory in sharded["memory"]] == [0, 1]
    for memory in sharded["memory"]:
        saved = memory["dense"]["weight_bytes"] - memory["quantized"]["weight_bytes"]
        assert saved == report["bytes_before"] - report["bytes_after"]
        for phase in ("dense", "quantized"):
            assert memory[phase]["peak_bytes"] >= memory[phase]["resident_bytes"] > 0
    kinds = {layer["name"].rpartition(".")[2]: layer["kind"] for layer in report["layers"]}
    assert (kinds["q_proj"], kinds["o_proj"], kinds["lm_head"]) == (
        "LinearLayer",
        "LinearAllreduce",
        "LmHeadLinearAllreduce",
    )


def test_quality_speed_and_text_are_measured(sharded: dict[str, Any]) -> None:
    assert 0 < sharded["kl_divergence_nats"] < 0.1
    dense, quantized = sharded["dense"], sharded["quantized"]
    assert 1 < dense["perplexity"] < 0.1 * 2048  # far below a uniform guess over the vocabulary
    assert quantized["perplexity"] / dense["perplexity"] - 1 == pytest.approx(sharded["perplexity_change"])
    for phase in (dense, quantized):
        assert phase["prefill_tokens_per_second"] > 0 and phase["decode_tokens_per_second"] > 0
        assert any(word in phase["text"] for word in ("LORD", "and", "the"))
    difference = sharded["first_difference"]
    if difference is not None:
        position = difference["position"]
        assert dense["tokens"][:position] == quantized["tokens"][:position]
        assert dense["tokens"][position] != quantized["tokens"][position]


def test_the_text_for_people_has_all_of_it(sharded: dict[str, Any]) -> None:
    text = render(sharded, "THE REPORT")
    for part in (
        "on 2 ranks",
        "THE REPORT",
        "rank 1: weights",
        "rank 1: process memory",
        "rank 1: process peak",
        "what quantization saves is in the rows 'weights'",
        "decode, tokens/s",
        "perplexity",
        "KL divergence",
    ):
        assert part in text
    assert "tp 2 against tp 1:" in text and "all 32 tokens equal" in text
    assert "THE REPORT" not in render(sharded, None)


def test_int8_on_one_rank_in_bf16_prints_a_report_and_changes_perplexity_by_less_than_half_a_percent() -> (
    None
):
    result = run(
        *"generate --num-bits 8 --group-dim 0 --symmetric --max-new-tokens 4 --eval-tokens 64".split()
    )
    assert result.returncode == 0, result.stderr
    assert "int8 g64 dim0 symmetric" in result.stdout
    assert "layers quantized" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("perplexity")]
    assert abs(float(line.split()[3].rstrip("%"))) < 0.5


def test_a_weight_that_cannot_be_quantized_is_one_line_naming_the_layer(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    tensors = safetensors.torch.load_file(DEMO_MODEL / "model.safetensors")
    # Rows of the second rank's shard alone.
    tensors["model.layers.2.mlp.up_proj.weight"][-1, 5] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    options = "--tp 2 --dtype float32 --max-new-tokens 2 --eval-tokens 8 --oversubscribe --json".split()
    result = run("generate", "--model", str(tmp_path), *options)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: rank ") and "model.layers.2.mlp.up_proj" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model /no/such/folder", "/no/such/folder does not exist"),
        ("--model pyproject.toml", "is a file"),
        ("--model tests", "without config.json"),
        ("--model no-such-org/no-such-model", "could not be had from the Hugging Face Hub"),
        ("--tp 0", "--tp is 0, but must be at least 1"),
        ("--tp 1000 --device cpu", "more than the"),
        ("--num-bits 3", "num_bits is 3, but must be 4 or 8"),
        ("--group-size 0", "group_size is 0"),
        ("--group-size -2", "group_size is -2"),
        ("--group-dim 2", "group_dim is 2"),
        ("--dtype int8", "'int8' is not one of"),
        ("--dtype float16 --device cpu", "use bfloat16 or float32"),
        ("--max-new-tokens 0", "--max-new-tokens is 0"),
        ("--eval-tokens 1", "--eval-tokens is 1"),
        ("--text no-such-file.txt", "no-such-file.txt cannot be read"),
        ("--text /dev/null", "/dev/null is empty"),
        ("--prompt=", "--prompt is empty"),
        ("--max-new-tokens 300", "--max-new-tokens is 300, together more than the model's 256 positions"),
    ],
)
def test_a_bad_option_is_refused_before_any_rank_starts(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "woq_triton.commands.generate.run_and_compare", lambda *_: pytest.fail("ranks started")
    )
    result = CliRunner().invoke(app, ["generate", *arguments.split()])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        pytest.param({}, [], "is a folder without a tokenizer", id="no tokenizer"),
        pytest.param(
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            [],
            "there is no tokenizer.json in it",
            id="a class that would make an empty tokenizer",
        ),
        pytest.param({}, ["tokenizer.json"], None, id="all there"),
        pytest.param({"architectures": None}, ["tokenizer.json"], None, id="type alone"),
        pytest.param(
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, ["tokenizer.json"], None, id="gpt2"
        ),
        pytest.param({"architectures": ["LlamaModel"]}, ["tokenizer.json"], "is a LlamaModel", id="no head"),
        pytest.param(
            {"model_type": "bert", "architectures": ["BertModel"]},
            ["tokenizer.json"],
            "is a BertModel",
            id="encoder",
        ),
        pytest.param(
            {"model_type": "bart", "is_encoder_decoder": True, "architectures": ["BartForCausalLM"]},
            ["tokenizer.json"],
            "is a BartForCausalLM",
            id="encoder-decoder",
        ),
        pytest.param(
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            [],
            "is a ViTForImageClassification by its config.json; generate needs a causal language model",
            id="images",
        ),
        pytest.param({"model_type": "zzz"}, [], "has model type `zzz`", id="unknown type"),
    ],
)
def test_a_folder_is_judged_by_its_config_and_tokenizer_alone(
    tmp_path: Path,
    config: dict[str, Any],
    files: list[str],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise RankFailed(0, "ranks started", "")

    monkeypatch.setattr("woq_triton.commands.generate.run_and_compare", stop)
    demo = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**demo, **config}), encoding="utf-8")
    for name in files:
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    result = CliRunner().invoke(app, ["generate", "--model", str(tmp_path)])
    if said is None:
        assert (result.exit_code, result.stderr) == (1, "error: rank 0: ranks started\n")
    else:
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"--model {tmp_path}" in result.stderr and said in result.stderr


def test_more_ranks_than_cores_start_only_when_insisted_on() -> None:
    cores = os.sched_getaffinity(0)
    code = (
        f"import os; os.sched_setaffinity(0, {{{min(cores)}}}); from woq_triton.__main__ import main; "
        "from woq_triton.commands import generate; "
        "generate.run_and_compare = lambda options, *_: exit(f'would start {options.tp} ranks'); main()"
    )
    for flags, said in ((["--oversubscribe"], "would start 2 ranks"), ([], "more than the 1 CPU cores")):
        command = [sys.executable, "-c", code, "generate", "--tp", "2", "--device", "cpu", *flags]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode != 0
        assert said in result.stderr


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{woq_triton.__version__}\n"
