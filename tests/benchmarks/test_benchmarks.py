"""The benchmark suite: what it refuses, its gate before timing, its results. No speed is judged."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import benchmarks.ours
import benchmarks.peers  # noqa: F401
from benchmarks import conftest, measure, results
from benchmarks.cpu_goals import GOALS
from benchmarks.device_run import write_table
from benchmarks.problems import MODELS, Problem, problems_of
from benchmarks.providers import PROVIDERS, check, held_bytes, make
from woq_triton import QuantScheme
from woq_triton_kernels import tiles

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = {bits: Problem("tiny", 128, 256, QuantScheme(bits, 128)) for bits in (4, 8)}


def named(name):
    return next(provider for provider in PROVIDERS if provider.name == name)


def run_suite(*options):
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "--benchmark-enable", "--device", "cpu"]
    # What a test process inherits from pytest-xdist would switch pytest-benchmark off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "llama-9"), "unknown model 'llama-9'; the models are llama-3-8b"),
        (("--layers", "o_proj,router"), "llama-2-7b has no layer 'router'; its layers are q_proj"),
        (("--bits", "3"), "num_bits is 3, but must be 4 or 8"),
        (("--group-size", "0"), "group_size is 0, but must be a positive integer"),
        (("--tokens", "1,none"), "--tokens has 'none', but takes positive numbers"),
        (("--tp", "0"), "tp is 0, but must be at least 1"),
        (("--tp", "100000"), "use fewer ranks"),
        (("--providers", "cublas"), "--providers cublas matches none of dense bf16"),
        (("--providers", "GemLite"), "GemLite int4, missing: runs on cuda only"),
        (
            ("--providers", "int8", "--bits", "4"),
            "nothing to measure: no provider that was asked for is here and has",
        ),
        (("--seconds", "0"), "--seconds is 0.0, but must be positive"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--results", str(ROOT / "LICENSE" / "here")), "cannot be written to (Not a directory)"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        conftest.Run(Options("--device", "cpu", "--results", str(tmp_path), *options))
    assert list(tmp_path.iterdir()) == []


class Options(argparse.ArgumentParser):
    """The suite's own options, read as pytest reads them."""

    def __init__(self, *arguments):
        super().__init__()
        conftest.pytest_addoption(self)
        self._values = vars(self.parse_args(arguments))

    def getgroup(self, name):
        return self

    def addoption(self, name, **settings):
        self.add_argument(name, **settings)

    def getoption(self, name):
        return self._values[name.lstrip("-").replace("-", "_")]


def test_a_refusal_is_one_line_and_ends_the_run_before_it_starts():
    done = run_suite("--model", "llama-9")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: unknown model 'llama-9'")


def test_a_run_leaves_its_results_and_keeps_earlier_ones(tmp_path):
    earlier = tmp_path / "linear-somewhere-20200101-000000.json"
    earlier.write_text("{}")
    options = ("--layers", "k_proj", "--model", "llama-3-8b", "--tp", "8", "--bits", "4", "--tokens", "1")
    providers = "dense bf16,woq_triton int4,GemLite"
    done = run_suite(*options, "--seconds", "0.01", "--providers", providers, "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert earlier.read_text() == "{}"
    newest = results.latest(tmp_path, "linear")
    names = [record["provider"] for record in newest["records"]]
    assert names[:2] == ["dense bf16", "woq_triton int4"]
    assert all(record["seconds"] > 0 and record["bytes"] > 0 for record in newest["records"])
    assert newest["left_out"]["GemLite int4"] == "missing: runs on cuda only"
    assert newest["environment"]["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "missing: runs on cuda only" in done.stdout


class Wrong(nn.Linear):
    """A layer that is right for one token, and leaves out an eighth of the columns for more."""

    def forward(self, x):
        return super().forward(x if len(x) == 1 else x.index_fill(1, torch.arange(0, 256, 8), 0.0))


@pytest.mark.parametrize("num_bits", [4, 8, 16])
def test_the_gate_lets_no_wrong_layer_through(num_bits):
    dense = make(named("dense bf16"), TINY[4], "cpu")
    wrong = Wrong(256, 128, bias=False, dtype=torch.bfloat16)
    wrong.weight = dense.weight
    provider = replace(named("dense bf16"), num_bits=num_bits)
    problem = TINY.get(num_bits, TINY[4])
    assert check(provider, dense, problem, "cpu") is None
    assert "for 3 tokens, more than" in check(provider, wrong, problem, "cpu")
    assert "has shape" in check(provider, nn.Linear(256, 3, dtype=torch.bfloat16), problem, "cpu")


def test_a_result_of_nan_does_not_pass_the_gate():
    class Nan(nn.Module):
        def forward(self, x):
            return torch.full((len(x), 128), float("nan"), dtype=x.dtype)

    assert "relative error nan" in check(named("dense bf16"), Nan(), TINY[4], "cpu")


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if not p.unavailable("cpu")], ids=lambda p: p.name)
def test_providers_that_are_here_pass_the_gate(provider):
    if provider.needs and not provider.needs[0] == "deepspeed":
        pytest.skip("a peer's correctness is not this suite's business")
    problem = TINY.get(provider.num_bits, TINY[4])
    module = make(provider, problem, "cpu")
    assert check(provider, module, problem, "cpu") is None
    assert held_bytes(module) >= 128 * 256 * provider.num_bits / 8


def test_a_missing_package_is_named():
    missing = replace(named("dense bf16"), needs=("no_such_package.inner", "torch"))
    assert missing.unavailable("cpu") == "needs no_such_package.inner, not installed"


def test_goals_name_providers():
    assert {goal.beside for goal in GOALS} <= {provider.name for provider in PROVIDERS}


def test_copies_take_turns_and_exceed_the_cache():
    module = nn.Linear(1024, 1024, bias=False)
    copies = measure.copies_of(module, "cpu")
    held = sum(held_bytes(copied) for copied in copies)
    assert held > 2 * measure.last_level_cache("cpu") or len(copies) == 64
    seen = []
    for copied in copies[:3]:
        copied.register_forward_hook(lambda layer, *_: seen.append(layer))
    call = measure.rotating(copies[:3], torch.ones(1, 1024))
    for _ in range(4):
        call()
    assert seen == [*copies[:3], copies[0]]


@pytest.mark.parametrize("model", MODELS)
def test_layers_of_a_rank_are_a_share_of_the_models(model):
    whole = {p.name.split()[-1]: p.shape for p in problems_of(model, [], 4)}
    shard = {p.name.split()[-1]: p.shape for p in problems_of(model, [], 4, tp=2)}
    assert shard["gate_proj"] == (whole["gate_proj"][0] // 2, whole["gate_proj"][1])
    assert shard["down_proj"] == (whole["down_proj"][0], whole["down_proj"][1] // 2)


def record(provider, tokens, seconds, bits=4):
    return {
        "layer": "llama o_proj",
        "out_features": 1000,
        "in_features": 2000,
        "scheme": "int4 g128",
        "num_bits": bits,
        "provider": provider,
        "tokens": tokens,
        "seconds": seconds,
        "bytes": 1 << 20,
    }


@pytest.fixture
def body():
    return {
        "environment": {
            "device": "a CPU",
            "threads": 2,
            "instructions": ["avx2"],
            "date": "2026-01-02T03:04:05",
            "packages": {"torch": "2.13"},
            "load_average": [0.5, 0.5, 0.5],
        },
        "ceilings": {
            "copy_bytes_per_second": 1e10,
            "bf16_flops_per_second": 1e11,
            "fp32_flops_per_second": 5e10,
        },
        "records": [
            record("dense bf16", 1, 4e-3, 16),
            record("dense bf16", 64, 9e-3, 16),
            record("woq_triton int4", 1, 1e-3),
            record("woq_triton int4", 64, 1.25e-2),
        ],
        "left_out": {"GemLite int4": "missing: runs on cuda only"},
    }


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib comes with the extra `bench`"
)


@needs_matplotlib
def test_the_report_goes_between_its_marks_and_says_what_is_missing(tmp_path, body):
    from benchmarks import report

    (tmp_path / "linear-x-20260101-000000.json").write_text(json.dumps(body))
    (tmp_path / "sizes-x-20260101-000000.json").write_text(json.dumps(body))
    readme = tmp_path / "README.md"
    readme.write_text(f"# before\n{report.START}\nold\n{report.END}\nafter\n")
    assert report.main(["--results", str(tmp_path), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("# before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| woq_triton int4 | 1.0 | **1.00** | 12.5 |" in text
    assert "| dense bf16 | 1.0 | 4.00 | **9.00** |" in text
    assert "Not measured:\n\n- GemLite int4: missing: runs on cuda only\n" in text
    assert (tmp_path / "speed.png").stat().st_size > 5000
    assert (tmp_path / "roofline.png").stat().st_size > 5000


@needs_matplotlib
def test_a_table_of_an_interrupted_run_says_so(body):
    from benchmarks import report

    assert "interrupted" not in report._left_out(body)
    assert report._left_out(body | {"interrupted": True}).endswith("the run was interrupted")
    assert report._left_out(body | {"left_out": {}}) == ""


def test_what_an_interrupted_run_measured_is_kept_and_marked(tmp_path, monkeypatch):
    run = conftest.Run(Options("--device", "cpu", "--results", str(tmp_path)))
    run.records.append(record("dense bf16", 1, 1e-3, 16))
    for ceiling in ("copy_bandwidth", "matrix_rate"):
        monkeypatch.setattr(measure, ceiling, lambda *arguments: 1e9)
    session = SimpleNamespace(config=SimpleNamespace(stash={conftest._RUN: run}))
    conftest.pytest_sessionfinish(session, pytest.ExitCode.INTERRUPTED)
    kept = results.latest(tmp_path, "linear")
    assert kept["records"] == run.records
    assert kept["interrupted"] is True


@pytest.mark.parametrize(("seconds", "size"), [(0, 256), (float("inf"), 1024)])
def test_the_product_that_gives_the_ceiling_is_as_large_as_its_time_allows(seconds, size):
    assert measure.affordable_size(torch.float32, most=1024, seconds=seconds) == size
    assert measure.matrix_rate("cpu", torch.float32, seconds=0.01) > 0


@needs_matplotlib
def test_a_provider_has_one_line_for_both_widths():
    from benchmarks import report

    families = {report._family(provider.name) for provider in PROVIDERS}
    assert {"woq_triton", "woq_triton, canonical codes", "torch packed op", "bitsandbytes"} <= families
    assert not [family for family in families if re.search("int[48]|nf4", family)]


@needs_matplotlib
def test_the_report_refuses_a_page_without_marks_and_a_folder_without_results(tmp_path, capsys, body):
    from benchmarks import report

    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path)])
    assert "holds no results" in capsys.readouterr().err
    (tmp_path / "linear-x-20260101-000000.json").write_text(json.dumps(body))
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path), "--readme", str(page)])
    assert "lacks the lines" in capsys.readouterr().err
    assert page.read_text() == "nothing here"


@needs_matplotlib
def test_the_roofline_is_the_slower_of_reading_and_multiplying(body):
    from benchmarks import report

    one, many = (record("x", tokens, 1e-2) for tokens in (1, 1000))
    assert report.share_of_roofline(one, body["ceilings"]) == pytest.approx((1 << 20) / 1e10 / 1e-2)
    assert report.share_of_roofline(many, body["ceilings"]) == pytest.approx(4e9 / 1e11 / 1e-2)


def test_the_device_script_goes_through_everything_without_a_gpu(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "device.py"), "--dry-run", "--results", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("dry run passed\n")
    for part in ("numerics", "determinism", "capture", "compile", "tables", "sweep"):
        assert f"== {part}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_table_that_a_sweep_writes_is_the_one_that_pick_tile_reads(tmp_path, monkeypatch):
    problem = dict(N=4096, K=4096, num_bits=4, group_size=128, group_dim=1)
    chosen = tiles.pick_tile(M=16, **problem, dtype=torch.float16, arch="sm_90")
    measured = replace(chosen, num_stages=chosen.num_stages + 1)
    found = {"M": 16, **problem, "dtype": "float16", "arch": "sm_90", "tile": measured.to_dict()}
    path = write_table([found | {"seconds": 1e-6}], tmp_path)
    assert path.name == "sm_90.json"
    monkeypatch.setattr(tiles, "CONFIGS", tmp_path)
    assert tiles.pick_tile(M=16, **problem, dtype=torch.float16, arch="sm_90") == measured
    assert tiles.pick_tile(M=9, **problem, dtype=torch.float16, arch="sm_90") == measured
    assert tiles.pick_tile(M=8, **problem, dtype=torch.float16, arch="sm_90") != measured
