"""Matrices of 4-bit codes as torch's packed CPU kernel takes them, for bf16 activations.

`torch.ops.aten._weight_int4pack_mm_for_cpu` computes ``w = (q - 8) * scale + zero`` with fp32 products and
sums, and is several times as fast as a dense bf16 layer at one token. Its arrangement of codes ``[N, W]``,
with B the rows in a block (64 with AVX-512, 32 with AVX2)::

    arranged [N / B, W, B / 2] uint8     byte (b, k, i) = code (b*B + i, k) | code (b*B + i + B/2, k) << 4

Beyond a few dozen tokens it loses to dequantizing block after block and multiplying. How the weights of a
layer become 4-bit codes is told in `cpu_int4` and `cpu_int8_planes`.
"""

import functools

import torch
from torch import Tensor

from woq_triton.backends import cpu

_KERNEL_GROUPS = (256, 128, 64, 32)
"""Group sizes that torch's kernel knows."""

_BLOCK_ROWS = {"AVX512": 64, "AVX2": 32}

ROWS_AT_A_TIME = 128
"""Rows that are rearranged at a time, whole blocks."""


def kernel_group(group_size: int) -> int:
    """The largest group that torch's kernel knows and that divides a group; 0 if there is none."""
    return next((size for size in _KERNEL_GROUPS if group_size % size == 0), 0)


def fits(group_size: int, shape: tuple[int, int], metadata: torch.dtype) -> bool:
    """Whether torch's kernel can take the codes of a weight ``[out_features, in_features]``.

    Args:
        group_size: As resolved for the shape, along in_features.
        shape: ``(out_features, in_features)``.
        metadata: Dtype of the weight's scale.
    """
    out_features, in_features = shape
    return (
        metadata == torch.bfloat16
        and out_features * in_features > 0
        and block_rows() > 0
        and out_features % block_rows() == 0
        and in_features % group_size == 0
        and kernel_group(group_size) > 0
    )


@functools.cache
def block_rows() -> int:
    """Rows in a block of torch's arrangement; 0 where this torch's is not the one drawn above."""
    rows = _BLOCK_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0)
    if rows == 0:
        return 0
    codes = (torch.arange(2 * rows * 32) * 7 % 16).to(torch.uint8).view(2 * rows, 32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return rows if torch.equal(_blocks(codes, rows).view_as(packed), packed) else 0


def arrange(codes: Tensor) -> Tensor:
    """Codes ``[N, W]``, N of whole blocks, as the kernel takes them: uint8 ``[N, W / 2]``."""
    return _blocks(codes, block_rows()).view(len(codes), -1)


def restore(arranged: Tensor) -> Tensor:
    """Undo `arrange`."""
    low, high = halves(arranged)
    return torch.stack((low, high), dim=1).transpose(2, 3).reshape(len(arranged), -1)


def halves(arranged: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the lower and of the upper half of each block's rows: uint8 ``[N / B, W, B / 2]``."""
    blocks = as_blocks(arranged)
    return blocks & 15, blocks >> 4


def as_blocks(arranged: Tensor) -> Tensor:
    """``[N, W / 2]`` as ``[N / B, W, B / 2]``, two codes in a byte."""
    rows, width = arranged.shape
    return arranged.view(rows // block_rows(), 2 * width, block_rows() // 2)


def _blocks(codes: Tensor, rows: int) -> Tensor:
    low, high = codes.view(-1, 2, rows // 2, codes.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()


def multiply(tokens: Tensor, arranged: Tensor, group_size: int, scale_and_zero: Tensor) -> Tensor:
    """``tokens @ weight.T`` by torch's kernel, bf16 ``[M, N]``.

    Args:
        tokens: bf16 ``[M, W]``.
        arranged: uint8 ``[N, W / 2]``.
        group_size: A multiple of the kernel's.
        scale_and_zero: bf16 ``[W / kernel group, N, 2]``.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(
        tokens.contiguous(), arranged, kernel_group(group_size), scale_and_zero
    )


def dequantize_t(low: Tensor, high: Tensor, centre: int, scale: Tensor, min: Tensor | None) -> Tensor:
    """The dense weight of some blocks, transposed: fp32 ``[in_features, rows]``.

    Args:
        low: Codes of each block's lower half of rows, uint8 ``[blocks, in_features, B / 2]``.
        high: Those of its upper half.
        centre: The code that stands for 0 in symmetric weights.
        scale: ``[rows, groups]``.
        min: As scale, or None.
    """
    blocks, in_features, half = low.shape
    weight = torch.empty(in_features, blocks, 2, half)
    weight[:, :, 0] = low.transpose(0, 1)
    weight[:, :, 1] = high.transpose(0, 1)
    grouped = weight.view(scale.shape[1], -1, len(scale))
    return cpu.to_weights(grouped, centre, scale, min).view(in_features, len(scale))
