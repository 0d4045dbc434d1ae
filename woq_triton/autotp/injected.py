"""Layers that DeepSpeed's kernel injection made: their weights quantized, their matmuls through our ops.

An injected block keeps its matrices as bare parameters (``attn_qkvw``, ``attn_ow``, ``inter_w``,
``output_w``) and hands them to operators that it holds as attributes. For the walk over the model each
matrix becomes a module in the parameter's place; one that is quantized stays, and the block's operators
are exchanged for ones that multiply by it. One that is not gets its parameter back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.transformer.inference.ds_attention import BloomSelfAttention, DeepSpeedSelfAttention
from deepspeed.ops.transformer.inference.ds_mlp import DeepSpeedMLP
from deepspeed.ops.transformer.inference.op_binding.rms_norm import RMSNormOp
from deepspeed.utils.types import ActivationFuncType, NormType
from torch import Tensor, nn
from torch.nn import functional

from woq_triton.model import Conversion
from woq_triton.modules import QuantizedLinear

_WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {
    DeepSpeedSelfAttention: ("attn_qkvw", "attn_ow"),
    BloomSelfAttention: ("attn_qkvw", "attn_ow"),
    DeepSpeedMLP: ("inter_w", "output_w"),
}
_GATED = (ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU)


class InjectedWeight(nn.Module):
    """A matrix of an injected block, seen as ``[out_features, in_features]``.

    Args:
        parameter: As the block holds it, ``[in_features, out_features]`` unless `transposed`.
        transposed: Whether the block keeps its matrices the other way round.
        refusal: Why it cannot be quantized, or None.
    """

    def __init__(self, parameter: nn.Parameter, transposed: bool, refusal: str | None) -> None:
        super().__init__()
        data = parameter.data if transposed else parameter.data.t()
        self.weight = nn.Parameter(data, requires_grad=False)
        self.refusal = refusal
        self.kept = False  # whether a forward has kept the parameter under a second name
        self.source = [parameter]  # in a list, so that it is not a parameter of this module too

    def release(self) -> None:
        """Let go of the dense matrix."""
        for parameter in (self.weight, *self.source):
            parameter.data = parameter.new_empty(0)


def convert_injected(module: nn.Module) -> Conversion | str | None:
    """Convert a matrix of an injected block; None for all other modules."""
    if not isinstance(module, InjectedWeight):
        return None
    return module.refusal or Conversion(module.weight, QuantizedLinear, module.release)


@contextmanager
def injected_weights_as_modules(model: nn.Module) -> Iterator[None]:
    """Show the matrices of injected blocks as modules, and put back those that were not quantized."""
    blocks = [module for module in model.modules() if type(module) in _WEIGHTS]
    for block in blocks:
        for name in _WEIGHTS[type(block)]:
            parameter = block._parameters.get(name)
            if parameter is not None:
                del block._parameters[name]
                # A forward keeps what it used under this name, and could not keep a module there.
                kept = block._parameters.pop(f"_{name}", None)
                config: Any = block.config
                module = InjectedWeight(parameter, config.transposed_mode, _refusal(block))
                module.kept = kept is not None
                setattr(block, name, module)
    try:
        yield
    finally:
        for block in blocks:
            for name in _WEIGHTS[type(block)]:
                left = block._modules.get(name)
                if isinstance(left, InjectedWeight):
                    del block._modules[name]
                    for attribute in (name, f"_{name}") if left.kept else (name,):
                        setattr(block, attribute, left.source[0])
            if any(isinstance(block._modules.get(name), QuantizedLinear) for name in _WEIGHTS[type(block)]):
                _exchange_operators(block)


def _refusal(block: nn.Module) -> str | None:
    """Why a block's matmuls cannot be taken over, or None."""
    config: Any = block.config
    if not config.pre_layer_norm:
        return "DeepSpeed's operators for blocks that normalize last have no counterpart here"
    if isinstance(block, DeepSpeedMLP):
        if block.attn_nw is None or not config.mlp_after_attn:
            return "DeepSpeed's operators for an MLP beside the attention have no counterpart here"
        kind = config.mlp_act_func_type
        gated = kind in _GATED
        known = gated if config.norm_type == NormType.RMSNorm else kind in _ACTIVATIONS and not gated
        if not known:
            return f"its activation {kind} has no counterpart here"
    return None


def _exchange_operators(block: nn.Module) -> None:
    if isinstance(block, DeepSpeedMLP):
        if not isinstance(block.mlp_gemm_func, _MLP):
            block.mlp_gemm_func = _MLP(block.config, block.mlp_gemm_func)
    elif not isinstance(block.qkv_func, _QKV):
        block.qkv_func = _QKV(block.config)
        block.vector_matmul_func = _Product(block.config)


class _Operator(nn.Module):
    """What the operators share: the block's configuration, and a product with either kind of matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def product(self, x: Tensor, weight: Any) -> Tensor:
        """``x`` times a quantized matrix, or a parameter in DeepSpeed's arrangement."""
        if isinstance(weight, QuantizedLinear):
            out: Tensor = weight(x)
            return out
        return torch.matmul(x, weight.t() if self.config.transposed_mode else weight)


class _Product(_Operator):
    def forward(self, input: Tensor, weight: Any, async_op: bool = False) -> Tensor:
        return self.product(input, weight)


class _QKV(_Operator):
    def forward(
        self, input: Tensor, weight: Any, bias: Tensor | None, gamma: Tensor, beta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        epsilon = self.config.epsilon
        if self.config.norm_type == NormType.LayerNorm:
            norm = functional.layer_norm(input, input.shape[-1:], gamma, beta, epsilon)
        else:
            norm = RMSNormOp.rms_norm_fallback(input, gamma, epsilon)
        out = self.product(norm, weight)
        if bias is not None:
            out += bias
        return out, norm


def _gelu(x: Tensor, exact: bool) -> Tensor:
    return functional.gelu(x, approximate="none" if exact else "tanh")


_ACTIVATIONS = {
    ActivationFuncType.GELU: _gelu,
    ActivationFuncType.GATED_GELU: _gelu,
    ActivationFuncType.ReLU: lambda x, exact: functional.relu(x),
    ActivationFuncType.GATED_SILU: lambda x, exact: functional.silu(x),
}


class _MLP(_Operator):
    """``residual_add = norm(...)``, then in, activation and out, as DeepSpeed's operator.

    Args:
        config: The block's configuration.
        replaced: DeepSpeed's operator. Its CUDA kernels approximate GELU by tanh, its fallback does not.
    """

    def __init__(self, config: Any, replaced: Any) -> None:
        super().__init__(config)
        self.exact_gelu = "fallback" in getattr(replaced.mlp_gemm_func, "__name__", "")
        self.pre_rms_norm = replaced.pre_rms_norm

    def forward(
        self,
        input: Tensor,
        residual: Tensor,
        weight_interm: Any,
        weight_out: Any,
        input_bias: Tensor | None = None,
        bias: Tensor | None = None,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        epsilon = self.config.epsilon
        activation = _ACTIVATIONS[self.config.mlp_act_func_type]
        if input_bias is not None:
            input = input + input_bias
        if self.config.norm_type == NormType.LayerNorm:
            added = functional.layer_norm(input + residual, input.shape[-1:], gamma, beta, epsilon)
            inner = self.product(added, weight_interm)
            inner = activation(inner if bias is None else inner + bias, self.exact_gelu)
            return self.product(inner, weight_out), added
        norm, added = self.pre_rms_norm(input, residual, gamma, epsilon)
        up, gate = self.product(norm, weight_interm).chunk(2, dim=-1)
        return self.product(activation(gate, self.exact_gelu) * up, weight_out), added
