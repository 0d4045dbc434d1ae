"""Providers of other packages. None is required: what is not installed is listed as missing.

Those for GPUs were written against the packages' published interfaces; the gate in `benchmarks.providers`
decides whether they compute what they should before any of them is timed.
"""

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem
from benchmarks.providers import dense_linear, provider
from woq_triton import quantize
from woq_triton.scheme import QuantScheme


def _deepspeed(weight: Tensor, problem: Problem) -> nn.Module:
    from deepspeed.inference.quantization import layers

    config = {
        "num_bits": problem.scheme.num_bits,
        "group_size": problem.scheme.group_size,
        "group_dim": 0 if weight.device.type == "cpu" else 1,
        "symmetric": False,
    }
    layer = layers.QuantizedLinear(config, dense_linear(weight.half()))
    # It goes by address, and would give this weight's codes to another one that comes to lie there.
    layers.quantized_weight_registry.clear()
    return layer


for _bits in (4, 8):
    provider(
        f"DeepSpeed int{_bits}",
        _bits,
        torch.float16,
        needs=("deepspeed",),
        note="stock QuantizedLinear: fp16 only, and on a CPU only groups along out_features",
    )(_deepspeed)


@provider(
    "torchao int4",
    4,
    needs=("torchao",),
    devices=("cpu",),
    note="prototype Int4OpaqueTensor, torch's int4 op",
)
def _torchao_int4(weight: Tensor, problem: Problem) -> nn.Module:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return _torchao(
        weight, PrototypeInt4WeightOnlyConfig(problem.scheme.group_size, set_inductor_config=False)
    )


@provider("torchao int4", 4, needs=("torchao",), devices=("cuda",), note="tile_packed_to_4d, tinygemm")
def _torchao_int4_cuda(weight: Tensor, problem: Problem) -> nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig

    return _torchao(
        weight, Int4WeightOnlyConfig(problem.scheme.group_size, int4_packing_format="tile_packed_to_4d")
    )


@provider(
    "torchao int8", 8, needs=("torchao",), note="Int8WeightOnlyConfig, one scale a row, without torch.compile"
)
def _torchao_int8(weight: Tensor, problem: Problem) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(weight, Int8WeightOnlyConfig(set_inductor_config=False))


def _torchao(weight: Tensor, config: object) -> nn.Module:
    from torchao.quantization import quantize_

    model = nn.Sequential(dense_linear(weight))
    quantize_(model, config)
    return model


@provider("bitsandbytes nf4", 4, needs=("bitsandbytes",), note="Linear4bit, groups of 64, no scale offset")
def _bitsandbytes_nf4(weight: Tensor, problem: Problem) -> nn.Module:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        problem.in_features, problem.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4"
    )
    layer.load_state_dict({"weight": weight})
    return layer.to(weight.device)


@provider(
    "bitsandbytes int8", 8, needs=("bitsandbytes",), note="Linear8bitLt: activations are rounded to int8 too"
)
def _bitsandbytes_int8(weight: Tensor, problem: Problem) -> nn.Module:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(
        problem.in_features, problem.out_features, bias=False, has_fp16_weights=False
    )
    layer.load_state_dict({"weight": weight})
    return layer.to(weight.device)


def _hqq(weight: Tensor, problem: Problem) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=problem.scheme.num_bits, group_size=problem.scheme.group_size, axis=1)
    layer: nn.Module = HQQLinear(
        dense_linear(weight), config, compute_dtype=weight.dtype, device=str(weight.device)
    )
    return layer


provider("HQQ int4", 4, needs=("hqq",), note="its torch backend: dequantize, multiply")(_hqq)
provider(
    "HQQ int8",
    8,
    needs=("hqq",),
    note="it rounds zero points, near 128, to bf16: whole groups are up to half a code off",
)(_hqq)


def _quanto(weight: Tensor, problem: Problem) -> nn.Module:
    from optimum import quanto

    model = nn.Sequential(dense_linear(weight))
    quanto.quantize(model, weights=quanto.qint4 if problem.scheme.num_bits == 4 else quanto.qint8)
    quanto.freeze(model)
    return model


for _bits in (4, 8):
    _note = "groups of 128" if _bits == 4 else "one scale a row"
    provider(f"optimum-quanto int{_bits}", _bits, needs=("optimum.quanto",), note=_note)(_quanto)


def _gemlite(weight: Tensor, problem: Problem) -> nn.Module:
    from gemlite import helper

    qweight = quantize(weight.half(), problem.scheme)
    scale = qweight.scale.float()
    assert qweight.min is not None
    # GemLite: w = (q - zero) * scale; a constant group, whose scale is 0, does not occur in random weights.
    zero = (-qweight.min.float() / scale).half()
    processor = {4: helper.A16W4_HQQ_INT, 8: helper.A16W8_HQQ_INT}[problem.scheme.num_bits]
    made: nn.Module = processor(device=str(weight.device), dtype=torch.float16).from_weights(
        qweight.codes(), scale.half(), zero
    )
    return made


class _Conch(nn.Module):
    """conch's mixed-precision op: symmetric int4, eight codes of a column in an int32."""

    def __init__(self, weight: Tensor, problem: Problem) -> None:
        super().__init__()
        bits, self.group_size = problem.scheme.num_bits, problem.scheme.group_size
        qweight = quantize(weight.half(), QuantScheme(bits, self.group_size, symmetric=True))
        codes = qweight.codes().t().to(torch.int64).unflatten(0, (-1, 32 // bits))
        shifts = bits * torch.arange(32 // bits, device=weight.device)[None, :, None]
        words = (codes << shifts).sum(1)
        self.register_buffer("words", words.to(torch.int32).contiguous())
        self.register_buffer("scale", qweight.scale.t().contiguous())
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        from conch.ops.quantization.gemm import mixed_precision_gemm

        out: Tensor = mixed_precision_gemm(
            x, self.words, self.scale, None, self.bits, 2 ** (self.bits - 1), self.group_size
        )
        return out


def _humming(weight: Tensor, problem: Problem) -> nn.Module:
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=problem.out_features,
        shape_k=problem.in_features,
        weight_config={
            "dtype": f"int{problem.scheme.num_bits}",
            "weight_scale_group_size": problem.scheme.group_size,
        },
        torch_dtype=torch.float16,
    ).to(weight.device)
    layer.load_from_unquantized(weight.half())
    layer.transform()
    return layer


for _bits in (4, 8):
    _gpu = {"dtype": torch.float16, "devices": ("cuda",)}
    provider(f"GemLite int{_bits}", _bits, needs=("gemlite",), note="same codes as ours", **_gpu)(_gemlite)
    provider(f"Humming int{_bits}", _bits, needs=("humming",), note="symmetric", **_gpu)(_humming)
    provider(f"conch int{_bits}", _bits, needs=("conch",), note="symmetric", **_gpu)(_Conch)


class _Marlin(nn.Module):
    """Marlin as vLLM ships it: symmetric int4."""

    def __init__(self, weight: Tensor, problem: Problem) -> None:
        super().__init__()
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_test
        from vllm.scalar_type import scalar_types

        self.marlin, self.kind, self.shape = marlin_utils, scalar_types.uint4b8, problem.shape
        _, codes, scale, *order = marlin_utils_test.marlin_quantize(
            weight.half().t().contiguous(), self.kind, problem.scheme.group_size, False
        )
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.order = order
        self.empty = torch.empty(0, dtype=torch.int32, device=weight.device)
        self.workspace = marlin_utils.marlin_make_workspace_new(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.marlin.apply_gptq_marlin_linear(
            input=x,
            weight=self.codes,
            weight_scale=self.scale,
            weight_zp=self.empty,
            g_idx=self.order[0],
            g_idx_sort_indices=self.order[1],
            workspace=self.workspace,
            wtype=self.kind,
            output_size_per_partition=self.shape[0],
            input_size_per_partition=self.shape[1],
            is_k_full=True,
        )
        return out


provider("Marlin int4", 4, torch.float16, needs=("vllm",), devices=("cuda",), note="vLLM's, symmetric")(
    _Marlin
)
