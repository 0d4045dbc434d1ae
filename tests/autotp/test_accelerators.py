"""Devices that this package has no kernel for: their own kernels, DeepSpeed's ops, or plain torch."""

import torch

from tests.autotp import ranks
from woq_triton import QuantScheme, quantize
from woq_triton.backends import deepspeed_ops

CASES = "tests.autotp.accelerator"


def alone(function: str) -> dict:
    pool = ranks.Pool(1)
    try:
        (answer,) = pool.run(f"{CASES}:{function}", timeout=200)
    finally:
        pool.close()
    if isinstance(answer, ranks.RankError):
        raise answer
    return answer


def test_an_accelerators_ops_serve_what_they_can_and_the_report_says_so() -> None:
    result = alone("some_ops")
    assert result["served by"] == {
        "int8": "deepspeed",
        "int8 symmetric": "deepspeed",
        "int8 ragged": "reference",
        "int8 dim 0": "reference",
        "int4": "reference",  # its op raises, which only trying it shows
    }
    # The op rounds weights to fp16, and DeepSpeed's layout has a rounded reciprocal for a scale.
    assert max(result["errors"].values()) < 2e-3
    assert result["calls"]["int8"] == 3  # tried once, then called by two forwards
    assert result["calls"]["int8 symmetric"] == 2
    assert result["calls"]["int4"] == result["calls"]["int8 ragged"] == 0


def test_a_device_that_registers_its_own_kernel_is_served_by_it() -> None:
    result = alone("own_kernel")
    assert result["before"] == "reference"
    assert result["after"] == "kernel registered for PrivateUse1"
    assert result["calls"] == ["my_linear"]
    assert result["error"] < 1e-6
    assert result["cpu"] == "cpu"


def test_the_cpu_has_no_such_ops_and_forcing_them_says_why() -> None:
    qweight = quantize(torch.randn(8, 64).half(), QuantScheme(8, 32, 1))
    tensors = qweight.packed, qweight.scale, qweight.min
    assert "no working dequantize_int8_to_half_experimental for cpu" in str(
        deepspeed_ops.refusal(*tensors, *qweight.op_scheme)
    )
