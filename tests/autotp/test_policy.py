"""Quantizing while AutoTP shards gives the model that quantizing afterwards gives, in less memory."""

from pathlib import Path

import pytest

from tests.autotp import ranks

ROOMS = "tests.autotp"


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", "memory"),
        ("llama", "host"),
        ("llama", "1"),
        ("llama", "3"),
        ("codegen", "memory"),  # reads its head counts from modules that AutoTP shrinks
        ("opt", "memory"),
        ("gpt_neox", "2"),
    ],
)
def test_the_model_is_the_one_that_quantizing_afterwards_gives(family: str, how: str, tmp_path: Path) -> None:
    for result in ranks.run(2, f"{ROOMS}.loading:policy_against_afterwards", family, how, str(tmp_path)):
        assert result["state"] == []
        assert result["missing"] == []
        assert result["heads"] == []
        assert result["layers"] and result["skipped"]
        assert result["logits"] == 0.0


def test_settings_of_keys_reach_the_layers_that_they_name(tmp_path: Path) -> None:
    results = ranks.run(
        2,
        f"{ROOMS}.loading:policy_against_afterwards",
        "llama",
        "memory",
        str(tmp_path),
        num_bits=8,
        group_dim=0,
    )
    assert all(result["logits"] == 0.0 and result["layers"] for result in results)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_that_cannot_be_quantized_makes_every_rank_raise_at_the_end(rank: int) -> None:
    results = ranks.run(2, f"{ROOMS}.loading:policy_failure", rank)
    assert results[0] == results[1]
    kind, message = results[0]["raised"]
    assert kind == "ValueError"
    assert f"rank {rank}: layer 'model.layers.0.mlp.up_proj' has NaN" in message
    assert "load the model anew" in message
    assert results[0]["hooks left"] == 0


@pytest.mark.parametrize(
    ("family", "lost", "said"),
    [
        ("gemma", "", "gave no value to 6 parameters, such as 'model.embed_tokens.weight'"),
        ("llama", "model.norm.weight", "gave no value to 1 parameters, such as 'model.norm.weight'"),
        ("llama", "lm_head.weight", "no weight for the head"),
    ],
)
def test_a_parameter_that_deepspeed_does_not_load_is_an_error(
    family: str, lost: str, said: str, tmp_path: Path
) -> None:
    for kind, message in ranks.run(2, f"{ROOMS}.loading:policy_with_a_gap", family, lost, str(tmp_path)):
        assert kind == "ValueError"
        assert said in message


def test_a_block_without_an_engine_is_an_error() -> None:
    import woq_triton.autotp
    from tests.autotp.cases import config

    with (
        pytest.raises(RuntimeError, match="no DeepSpeed inference engine"),
        woq_triton.autotp.ReplacePolicy(config()),
    ):
        pass
    with pytest.raises(ValueError, match="num_bits is 3"):
        woq_triton.autotp.ReplacePolicy(config(num_bits=3))


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ("44", {}),
        ("1", {"num_hidden_layers": 2}),
        ("9", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    ],
    ids=["642-MiB", "one-file", "tied"],
)
def test_loading_from_files_holds_two_dense_layers_beside_the_quantized_shards(
    files: str, overrides: dict, tmp_path: Path
) -> None:
    results = ranks.run(
        2, f"{ROOMS}.memory:peak_memory", files, str(tmp_path), True, timeout=500, **overrides
    )
    for sizes in results:
        assert sizes["dense"] > (100 if overrides else 500) * 2**20
        assert sizes["peak"] < sizes["quantized"] + 2 * sizes["largest"]
        assert sizes["peak"] < sizes["dense shards"]
        # Norms that lay in the files would keep them mapped.
        assert sizes["files mapped"] == 0
        # What the allocator keeps, and the layers' Python objects.
        assert sizes["left"] < sizes["quantized"] + 16 * 2**20
