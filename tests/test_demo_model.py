"""The shipped model: loads offline, has learned its language, shards on group boundaries, quantizes well.

And the script that trains it: what it refuses, and that interrupted training meets the same batches.
"""

import importlib.util
import itertools
import math
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import woq_triton
from woq_triton import QuantScheme, quantize

transformers = pytest.importorskip("transformers")

FOLDER = Path(woq_triton.__file__).parent / "demo_model"
TP_SIZE = 2
# Shards at tp 2, by what AutoTP does with the layer: cut along in_features (an all-reduce follows), or along
# out_features. It keeps the embedding whole; a vocabulary-parallel one would be cut along its rows.
CUT_IN_FEATURES = ("o_proj", "down_proj", "lm_head")
CUT_OUT_FEATURES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer, loaded with connections forbidden."""
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise AssertionError("loading the shipped model opened a connection")

        patch.setattr(socket.socket, "connect", refuse)
        tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def eval_text() -> str:
    return (FOLDER / "eval.txt").read_text(encoding="utf-8")


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """Perplexity of ids ``[tokens]``, each window of the model's context on its own."""
    windows = ids.split(model.config.max_position_embeddings)
    nll = sum(float(model(input_ids=w[None], labels=w[None]).loss) * (len(w) - 1) for w in windows)
    return math.exp(nll / sum(len(w) - 1 for w in windows))


def test_perplexity_of_held_out_text_is_far_below_a_guess(loaded: tuple[Any, Any], eval_text: str) -> None:
    model, tokenizer = loaded
    ids = torch.tensor(tokenizer(eval_text).input_ids)
    assert 2000 < len(ids) < 10000
    # No model that ignores the context beats the text's own token frequencies, whose perplexity this is.
    counts = Counter(ids.tolist())
    without_context = math.exp(-sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values()))
    assert without_context < model.config.vocab_size / 4
    # The context must be worth at least three bits a token.
    assert perplexity(model, ids) < without_context / 2**3


def test_readme_states_the_perplexity_that_the_stored_weights_have(
    loaded: tuple[Any, Any], eval_text: str
) -> None:
    model, tokenizer = loaded
    stated = re.search(r"\| bfloat16, as stored \| ([\d.]+) \|", (FOLDER / "README.md").read_text())
    assert stated is not None
    measured = perplexity(model, torch.tensor(tokenizer(eval_text).input_ids))
    # fp32 sums differ by their order from machine to machine, by far less than one part in a thousand.
    assert measured == pytest.approx(float(stated[1]), rel=1e-3)


@pytest.mark.parametrize(
    ("scheme", "limit"),
    # What the package promises of this model. Around a minimum the loss rises with the square of the step,
    # so int8 costs about (15/255)**2, 1/289, of int4; its limit mostly leaves room for chance.
    [(QuantScheme(8, 64), 0.005), (QuantScheme(4, 32), 0.10), (QuantScheme(4, 64), 0.10)],
    ids=str,
)
def test_quantizing_every_matrix_keeps_the_perplexity(
    eval_text: str, scheme: QuantScheme, limit: float
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    ids = torch.tensor(tokenizer(eval_text).input_ids)
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = perplexity(model.float(), ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(quantize(dense[name], scheme).dequantize(torch.float32))
    after = perplexity(model, ids)
    assert after != before
    assert abs(after / before - 1) < limit


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_shards_of_two_ranks_are_whole_groups(loaded: tuple[Any, Any], group_size: int) -> None:
    for name, weight in loaded[0].named_parameters():
        if weight.dim() != 2:
            continue
        out_features, in_features = weight.shape
        layer = name.split(".")[-2]
        assert in_features % group_size == 0, name
        if layer in CUT_IN_FEATURES:
            assert in_features // TP_SIZE % group_size == 0, name
        else:
            assert layer in CUT_OUT_FEATURES
            # Two KV heads of 64 leave one a rank: along out_features k and v are whole up to groups of 64.
            group_rows = min(group_size, 64) if layer in ("k_proj", "v_proj") else group_size
            assert out_features // TP_SIZE % group_rows == 0, name


def test_model_is_a_small_llama_with_grouped_queries_and_its_own_head(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    config = model.config
    assert config.model_type == "llama"
    assert config.num_attention_heads > config.num_key_value_heads >= TP_SIZE
    assert config.num_key_value_heads % TP_SIZE == 0
    assert config.vocab_size == len(tokenizer) and config.vocab_size % 128 == 0
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 5e6
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10e6


def test_tokenizer_is_fast_opens_with_the_start_token_and_loses_no_byte(
    loaded: tuple[Any, Any], eval_text: str
) -> None:
    model, tokenizer = loaded
    assert tokenizer.is_fast
    for text in (eval_text, "Zürich\n\t 日本 🙂  two  spaces", ""):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
        assert max(ids) < model.config.vocab_size
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("prompt", ["And the king said unto", "In the beginning", "Now it came to pass"])
def test_greedy_text_is_mostly_words_of_the_held_out_text(
    loaded: tuple[Any, Any], eval_text: str, prompt: str
) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs.input_ids.shape[1] :]
    words = re.findall(r"[a-z']+", tokenizer.decode(ids, skip_special_tokens=True).lower())
    known = set(re.findall(r"[a-z']+", eval_text.lower()))
    # 48 tokens are some 35 words. Eight chapters do not hold every word there is, hence "mostly"; pieces of
    # words put together wrongly would hardly ever be among them.
    assert len(words) >= 20
    assert sum(word in known for word in words) > 0.8 * len(words)
    # Not one phrase over and over.
    assert len(set(words)) >= 8


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("typer")
    path = FOLDER.parent.parent / "scripts" / "train_demo_model.py"
    spec = importlib.util.spec_from_file_location("train_demo_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def test_training_text_without_references_is_refused_by_line(script: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "kjv.txt"
    text.write_text("Ge1:1 In the beginning\nGod created\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"line 2: expected .* found 'God created'.*bible -f"):
        script.read_chapters(text)


def test_training_text_without_a_held_out_book_is_refused(script: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "kjv.txt"
    text.write_text("Ge1:1 In the beginning\nRuth1:1 Now it came to pass\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"lacks the held-out books \['Jonah', 'Jas', 'Joel'\]"):
        script.read_chapters(text)


def test_interrupted_training_meets_the_batches_it_would_have_met(script: ModuleType) -> None:
    recipe = script.Recipe(batch_size=2)
    stream = torch.arange(10 * script.CONTEXT)  # nine windows, hence four batches a pass
    whole = list(itertools.islice(script.batches(stream, recipe, first_step=0), 8))
    resumed = list(itertools.islice(script.batches(stream, recipe, first_step=3), 5))
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], resumed, strict=True))
    # A pass goes through a window at most once, and the next pass cuts the windows elsewhere.
    first, second = (set(torch.cat(part)[:, 0].tolist()) for part in (whole[:4], whole[4:]))
    assert len(first) == len(second) == 8
    assert first != second
