"""The benchmarks' scripts for a CPU: what they refuse, leave behind and say. No speed is judged."""

import json

import pytest

from benchmarks import cpu_goals, cpu_goals_table, end_to_end, results


@pytest.mark.parametrize("script", [cpu_goals, end_to_end], ids=["cpu_goals", "end_to_end"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(script, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SystemExit) as ended:
        script.main(["--results", str(tmp_path / "file" / "here")])
    assert ended.value.code == 2
    assert "cannot be written to (Not a directory); choose another" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (cpu_goals, ["--seconds", "0"], "'0' is not a positive number"),
        (cpu_goals, ["--seconds", "nan"], "'nan' is not a positive number"),
        (cpu_goals, ["--seconds", "long"], "'long' is not a positive number"),
        (end_to_end, ["--tp", "0"], "'0' is not a positive whole number"),
        (end_to_end, ["--steps", "-1"], "'-1' is not a positive whole number"),
        (end_to_end, ["--hidden", "100"], "100 is no multiple of 256"),
    ],
)
def test_what_cannot_be_measured_is_refused(script, options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main([*options, "--results", str(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_goals_come_with_what_bounds_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_goals, "SHAPES", ((128, 256),))
    monkeypatch.setattr(cpu_goals, "memory", lambda: dict.fromkeys(MEMORY, 1 << 20))
    limited = [{"num_bits": 4, "tokens": 16, "ratio": ratio} for ratio in (2.0, 3.0)]
    monkeypatch.setattr(cpu_goals, "_without_bf16", lambda seconds: limited)
    earlier = tmp_path / "cpu-goals-somewhere-20200101-000000.json"
    earlier.write_text("{}")
    assert cpu_goals.main(["--seconds", "0.01", "--results", str(tmp_path)]) == 0
    assert earlier.read_text() == "{}"
    body = results.latest(tmp_path, "cpu-goals")
    goals = {(g.num_bits, tokens, g.beside) for g in cpu_goals.GOALS for tokens in g.tokens}
    assert {(r["num_bits"], r["tokens"], r["beside"]) for r in body["records"]} == goals
    for record in body["records"]:
        assert record["ratio"] == pytest.approx(record["beside_seconds"] / record["seconds"])
        assert record["met"] == (record["ratio"] >= record["goal"])
    alone = [t for t in body["timings"] if t["provider"] == cpu_goals_table.ALONE]
    assert [t["tokens"] for t in alone] == [1, 16]
    text = capsys.readouterr().out
    assert "int4 128×256 | 1 | dense bf16" in text
    assert "The int4 weight is 3.6 times smaller than the bf16 one" in text
    assert "times as fast as dense bf16: int4 at 16 tokens 2.0 to 3.0." in text


MEMORY = (
    "dense_weight_bytes",
    "quantized_weight_bytes",
    "resident_dense",
    "resident_quantized",
    "resident_after_use",
)


def test_only_the_goals_beside_dense_bf16_are_printed_for_the_process_without_its_instructions(
    monkeypatch, capsys
):
    monkeypatch.setattr(cpu_goals, "SHAPES", ((128, 256),))
    assert cpu_goals.main(["--dense-bf16", "--seconds", "0.01"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["beside"] for record in records} == {"dense bf16"}
    assert {(record["num_bits"], record["tokens"]) for record in records} == {(4, 1), (4, 16), (8, 1)}


def test_a_whole_model_is_measured_and_its_memory_stated(tmp_path, capsys):
    options = ["--tp", "1", "--hidden", "256", "--layers", "1", "--steps", "1", "--results", str(tmp_path)]
    assert end_to_end.main(options) == 0
    body = results.latest(tmp_path, "end-to-end")
    (run,) = body["generate"]
    for phase in ("dense", "quantized"):
        assert run[phase]["peak_bytes"][0] >= run[phase]["resident_bytes"][0] > run["start_bytes"][0]
    assert run["quantized"]["weight_bytes"][0] < run["dense"]["weight_bytes"][0] / 2
    assert [record["batch"] for record in body["batches"]] == [1, 4, 16, 64]
    text = capsys.readouterr().out
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table[:4]}) == 1
    assert "GiB of it before the model is loaded" in text


def test_results_that_cannot_be_written_are_printed(tmp_path, capsys):
    earlier = tmp_path / "results" / "linear-x-20260101-000000.json"
    path = results.new_file(tmp_path / "results", "linear", "cpu")
    earlier.write_text("{}")
    results.write(path, "linear", "cpu", {"records": [1]})
    path.with_suffix(".partial").mkdir()  # root may write to any folder, but not to a folder itself
    with pytest.raises(SystemExit, match="they are printed instead"):
        results.write(path, "linear", "cpu", {"records": [2]})
    assert json.loads(capsys.readouterr().out)["records"] == [2]
    assert json.loads(path.read_text())["records"] == [1]
    assert earlier.read_text() == "{}"
