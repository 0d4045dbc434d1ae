"""Models with DeepSpeed's kernel injection: quantized by the same call, computing what they should."""

import pytest

from tests.autotp import ranks

ROOMS = "tests.autotp"


@pytest.mark.parametrize(
    ("family", "tp", "dtype", "scheme"),
    [
        ("gpt2", 1, "float32", {"group_dim": 1}),
        ("gpt2", 2, "float32", {"group_dim": 0, "num_bits": 8}),
        ("gpt2", 2, "bfloat16", {"group_dim": 1}),
        ("gpt_neo", 1, "float32", {"group_dim": 0}),
    ],
)
def test_injected_matmuls_go_through_the_quantized_weights(
    family: str, tp: int, dtype: str, scheme: dict
) -> None:
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for result in ranks.run(tp, f"{ROOMS}.injection:injected", family, dtype, **scheme):
        assert result["kernel"] < tolerance < result["quantization"]
        # DeepSpeed's plain torch form has another approximation of GELU than the models.
        assert result["stock"] < max(tolerance, 1e-3)
        assert result["injected"] == 8
        assert not [name for name in result["dense left"] if "attention" in name or "mlp" in name]


def test_a_model_that_cannot_be_quantized_stays_as_it_was() -> None:
    for result in ranks.run(1, f"{ROOMS}.injection:injected_failure"):
        assert result["raised"][0] == "ValueError"
        assert "transformer.h.1.mlp.output_w" in result["raised"][1]
        assert result["unchanged"]
        assert result["part"] == ["transformer.h.0.mlp.inter_w", "transformer.h.1.mlp.inter_w"]
        assert 0 < result["runs"] < 0.5
