"""Every layer class that AutoTP can make, and the other ways than `init_inference` defaults to get them."""

import pytest

from tests.autotp import ranks

ROOMS = "tests.autotp"


@pytest.mark.parametrize(("group_dim", "num_bits"), [(0, 4), (1, 4), (0, 8), (1, 8)])
def test_every_layer_class_computes_what_its_dequantized_twin_does(group_dim: int, num_bits: int) -> None:
    for result in ranks.run(2, f"{ROOMS}.classes:layer_classes", group_dim, num_bits):
        assert max(result["errors"].values()) < 1e-5, result["errors"]
        # Quantized weights differ from the dense ones by more than the kernels' rounding.
        assert min(result["changes"].values()) > 1e-4, result["changes"]
        assert result["tied"]
        assert result["vocab"] == [300, True]
        assert result["overlap"] < 1e-5
        assert result["skipped"].keys() == {"conv", "conv_column", "deferred"}
        assert "quantize before compiling" in result["skipped"]["deferred"]
        assert "DeepSpeed's Conv_LinearALlreduce" in result["skipped"]["conv"]
        assert "DeepSpeed's conv_LinearLayer" in result["skipped"]["conv_column"]
        assert {"Yuan_LinearLayer", "Yuan_LinearAllreduce"} <= result["classes"]


def test_a_model_sharded_by_a_partition_config() -> None:
    for result in ranks.run(2, f"{ROOMS}.classes:partition_config"):
        assert result["kernel"] < 1e-5 < result["quantization"]
        assert result["sub-parameter layers"] == 4
        assert result["head"]


def test_a_model_sharded_by_an_injection_policy() -> None:
    for result in ranks.run(2, f"{ROOMS}.classes:injection_policy"):
        assert result["kernel"] < 1e-5 < result["quantization"]
        assert result["parallel"] == 12
