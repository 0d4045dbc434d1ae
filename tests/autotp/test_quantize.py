"""Quantizing what AutoTP made: right results, one verdict on all ranks, and the memory back."""

import time

import pytest

from tests.autotp import ranks

ROOMS = "tests.autotp"
CASES = f"{ROOMS}.cases"

# The quantized model and its dense twin differ in the order of fp32 sums, or in the roundings of bf16
# weights and activations (2**-9 each, some ten of them in a row through two layers).
KERNEL = {"float32": 1e-5, "bfloat16": 2e-2}

REPRESENTATIVES = [
    ("llama", {"group_dim": 1}, "float32"),
    ("llama", {"group_dim": 0}, "bfloat16"),
    ("llama-tied", {"num_bits": 8, "group_dim": 0}, "float32"),
    ("llama-bias", {"group_size": 48}, "float32"),
    ("opt", {"group_dim": 1, "symmetric": True}, "float32"),
    ("bloom", {"group_dim": 0}, "float32"),
    ("gpt_neox", {"num_bits": 8}, "bfloat16"),
    ("glm4", {"group_size": 64}, "float32"),
    ("qwen2_moe", {"group_size": 64}, "float32"),
    ("t5", {"group_size": 64}, "bfloat16"),
]


@pytest.mark.parametrize(
    ("family", "scheme", "dtype"),
    REPRESENTATIVES,
    ids=[f"{f}-{d}-{'-'.join(f'{k}={v}' for k, v in s.items())}" for f, s, d in REPRESENTATIVES],
)
def test_logits_are_those_of_the_dequantized_shards(family: str, scheme: dict, dtype: str) -> None:
    for result in ranks.run(2, f"{CASES}:compare", family, dtype, **scheme):
        assert result["kernel"] < KERNEL[dtype]
        assert result["finite"]
        # What was compared is not the weights as they were.
        assert result["quantization"] > (10 if dtype == "float32" else 1) * result["kernel"]


@pytest.mark.parametrize("group_dim", [0, 1])
def test_two_ranks_give_the_logits_of_one_where_shards_are_whole_groups(group_dim: int) -> None:
    for result in ranks.run(2, f"{CASES}:compare", "llama", "float32", group_size=32, group_dim=group_dim):
        assert result["alone"] is not None
        assert result["alone"] < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "t5"])
def test_greedy_text_is_that_of_the_dequantized_model_and_of_one_rank(family: str) -> None:
    schemes = [{"num_bits": 4, "group_size": 32}, {"num_bits": 8, "group_size": 32}]
    for results in ranks.run(2, f"{CASES}:measure", family, "float32", schemes, True):
        assert all(result["text"] for result in results)


def test_more_ranks_than_kv_heads_leave_shards_without_rows_and_columns() -> None:
    results = ranks.run(4, f"{CASES}:compare", "llama", "float32", group_size=64)
    for result in results:
        assert result["kernel"] < KERNEL["float32"]
        assert result["finite"]
        assert {"LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce"} <= result["kinds"].keys()
    assert ranks.run(4, f"{ROOMS}.state:empty_shards", "llama")[-1] > 0


def test_shards_that_are_no_whole_groups_end_in_a_shorter_one() -> None:
    for result in ranks.run(3, f"{CASES}:compare", "llama-bias", "float32", group_size=128, num_bits=8):
        assert result["kernel"] < KERNEL["float32"]


def test_nan_on_one_rank_makes_every_rank_raise_the_same_error_before_anything_changed() -> None:
    start = time.monotonic()
    results = ranks.run(2, f"{ROOMS}.disagreements:nan_on_rank", 1, timeout=60)
    for kind, message, unchanged in results:
        assert kind == "ValueError"
        assert "rank 1: layer 'model.layers.1.mlp.down_proj' has NaN or infinite values" in message
        assert unchanged
    assert results[0] == results[1]
    assert time.monotonic() - start < 60


def test_a_rank_that_fails_half_way_makes_every_rank_raise() -> None:
    for kind, message in ranks.run(2, f"{ROOMS}.disagreements:failure_while_converting", timeout=60):
        assert kind == "ValueError"
        assert "rank 0" in message and "half-way" in message and "load the model anew" in message


def test_ranks_with_different_settings_raise_the_same_error() -> None:
    results = ranks.run(2, f"{ROOMS}.disagreements:different_settings", timeout=60)
    assert results[0] == results[1]
    assert results[0][0] == "ValueError"
    assert "ranks differ on layer" in results[0][1]
    assert "int4 g32" in results[0][1] and "int8 g32" in results[0][1]


def test_a_layer_left_alone_on_one_rank_is_left_alone_on_all() -> None:
    for own_rank, (converted, reasons) in enumerate(
        ranks.run(2, f"{ROOMS}.disagreements:forward_replaced_on_rank_1")
    ):
        assert not converted
        assert "its forward was replaced on the instance" in reasons[0]
        assert ("on rank 1, " in reasons[0]) == (own_rank == 0)


def test_a_rank_that_dies_makes_the_others_raise_within_30_seconds() -> None:
    pool = ranks.Pool(2)
    try:
        survivor, dead = pool.run(f"{ROOMS}.disagreements:die_on_rank", 1, timeout=90)
    finally:
        pool.close()
    assert dead is None
    seconds, kind = survivor
    assert seconds < 30
    assert kind != "nothing was raised"


def test_dense_shards_are_gone_after_conversion() -> None:
    for report in ranks.run(2, f"{ROOMS}.memory:memory", timeout=200):
        assert report["dense weights alive"] == 0
        # What the process gave back is what quantization saves, up to the allocator's slack.
        assert report["released"] > 0.8 * (report["bytes before"] - report["bytes after"])


def test_copies_share_the_group_and_pickles_ask_for_one() -> None:
    for result in ranks.run(2, f"{ROOMS}.state:copies"):
        assert result["deepcopy"] == 0.0
        assert result["state_dict"] == 0.0
        assert "process group" in result["unpickled"]
        assert result["with a group"] == 0.0


def test_layers_keep_what_other_code_reads() -> None:
    for result in ranks.run(2, f"{ROOMS}.state:attributes"):
        assert result == []
