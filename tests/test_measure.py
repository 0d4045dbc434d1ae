"""The measures themselves, against their formulas in fp64."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from woq_triton.serving import measure
from woq_triton.serving.measure import Generation
from woq_triton.serving.ranks import Phase
from woq_triton.serving.runs import first_difference

FP32 = 1e-5  # a few hundred terms of fp32 summed: 1e-7 each, with room


def test_kl_divergence_is_that_of_the_softmax_distributions() -> None:
    torch.manual_seed(0)
    dense, quantized = torch.randn(7, 300) * 3, torch.randn(7, 300) * 3
    p, q = dense.double().softmax(-1), quantized.double().softmax(-1)
    assert measure.sum_kl(dense, quantized) == pytest.approx(float((p * (p / q).log()).sum()), rel=FP32)
    assert measure.sum_kl(dense, dense.clone()) == 0.0


def test_negative_log_likelihood_is_that_of_each_token_given_those_before() -> None:
    torch.manual_seed(0)
    logits, window = torch.randn(6, 50), torch.randint(50, (1, 6))
    p = logits.double().softmax(-1)
    expected = -sum(math.log(p[i, window[0, i + 1]]) for i in range(5))
    assert measure.sum_nll(logits, window) == pytest.approx(expected, rel=FP32)


def test_windows_cover_the_text_within_the_context_and_drop_a_lone_last_token() -> None:
    ids = torch.arange(measure.EVAL_WINDOW * 2 + 3)
    assert [w.shape for w in measure.eval_windows(ids[:33], 16)] == [(1, 16), (1, 16)]
    assert [w.shape for w in measure.eval_windows(ids[:34], 16)] == [(1, 16), (1, 16), (1, 2)]
    assert torch.cat(measure.eval_windows(ids, None), dim=1).tolist() == [ids.tolist()]


def test_relative_difference_takes_all_windows_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(4, 9), torch.randn(4, 9)), (torch.randn(2, 9), torch.randn(2, 9))]
    paths = [[tmp_path / f"{side}{i}.pt" for i in range(2)] for side in "ab"]
    for i, pair in enumerate(pairs):
        for side in range(2):
            torch.save(pair[side], paths[side][i])
    a, b = (torch.cat([pair[side] for pair in pairs]).double() for side in range(2))
    assert measure.relative_difference(*paths) == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)


def test_weight_bytes_count_shared_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    assert measure.weight_bytes(model) == 2 * 10 * 4 * 4
    model[1].weight = model[0].weight
    assert measure.weight_bytes(model) == 10 * 4 * 4


def test_peak_memory_can_start_over_and_then_sees_what_comes_and_goes() -> None:
    memory = measure.Memory("cpu")
    torch.ones(100 << 20, dtype=torch.uint8)
    memory.reset_peak()
    before, peak = memory.resident_and_peak()
    if peak > before + (50 << 20):
        pytest.skip("this system cannot reset a process's peak")
    torch.ones(200 << 20, dtype=torch.uint8)
    after, peak = memory.resident_and_peak()
    assert peak - before > 190 << 20
    assert after - before < 50 << 20


def phase(tokens: list[int]) -> Phase:
    return Phase(Generation(tokens, 3, 1.0, 1.0), "", [f"<{token}>" for token in tokens], 1.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], {"position": 1, "pieces": ["<2>", "<5>"]}),
        ([1, 2], [1, 2, 3], {"position": 2, "pieces": [None, "<3>"]}),
    ],
)
def test_the_first_difference_of_two_texts(
    a: list[int], b: list[int], expected: dict[str, object] | None
) -> None:
    assert first_difference(phase(a), phase(b)) == expected


def test_a_single_token_has_no_decoding_speed() -> None:
    assert Generation([1], 10, 2.0, 0.0).decode_tokens_per_second is None
    assert Generation([1, 2, 3], 10, 2.0, 0.5).decode_tokens_per_second == 4.0
    assert Generation([1, 2, 3], 10, 2.0, 0.5).prefill_tokens_per_second == 5.0
