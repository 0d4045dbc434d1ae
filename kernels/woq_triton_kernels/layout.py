"""The packed layout: the only place that knows where a code's bits lie.

Codes of one output feature are stored in K-planes, 128 input features to a block. In each block
word ``t`` holds the codes of columns ``t``, ``t + L``, ``t + 2L``, ... where ``L`` words make a block::

    int4 (L = 32)   bit 15..12      11..8       7..4       3..0
    word t          k = t + 96    t + 64     t + 32          t

    int8 (L = 64)   bit 15..8                  7..0
    word t          k = t + 64                    t

So one mask and shift of a run of words yields a contiguous run of columns, which is all that a
matrix instruction needs: its order along K is free as long as both operands agree. A shard along N
is a slice of rows, a shard along K at multiples of 128 a slice of words, an embedding look-up a row.
Only K is padded (to whole blocks, with code 0).
"""

import torch
from torch import Tensor

BLOCK_K = 128
"""Input features in one packed block."""

CODES_PER_WORD = {4: 4, 8: 2}
"""Codes in one int16 word, by ``num_bits``; also the number of planes in a block."""


def words_per_block(num_bits: int) -> int:
    """Number of int16 words that hold one block of ``BLOCK_K`` codes."""
    return BLOCK_K // CODES_PER_WORD[num_bits]


def packed_width(in_features: int, num_bits: int) -> int:
    """Number of int16 words in one packed row of ``in_features`` codes."""
    return words_per_block(num_bits) * -(-in_features // BLOCK_K)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes into K-plane words.

    Args:
        codes: ``[out_features, in_features]`` uint8, each below ``2**num_bits``.
        num_bits: 4 or 8.

    Returns:
        ``[out_features, packed_width(in_features, num_bits)]`` int16, contiguous.
    """
    rows, in_features = codes.shape
    width = packed_width(in_features, num_bits)
    planes = CODES_PER_WORD[num_bits]
    padded = width * planes
    if padded != in_features:
        codes = torch.nn.functional.pad(codes, (0, padded - in_features))
    blocks = codes.view(rows, padded // BLOCK_K, planes, BLOCK_K // planes)
    if num_bits == 4:
        low = blocks[:, :, 0] | (blocks[:, :, 1] << 4)
        high = blocks[:, :, 2] | (blocks[:, :, 3] << 4)
    else:
        low, high = blocks[:, :, 0], blocks[:, :, 1]
    # A word's low byte comes first in memory: every platform torch and Triton serve is little-endian.
    return torch.stack((low, high), dim=-1).view(torch.int16).reshape(rows, width)


def unpack(packed: Tensor, num_bits: int, in_features: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Undo `pack`.

    Args:
        packed: ``[out_features, packed_width(in_features, num_bits)]`` int16.
        num_bits: 4 or 8.
        in_features: The number of codes in a row, without padding.
        dtype: Integer dtype of the result; int16, the words' own, takes the least time.

    Returns:
        ``[out_features, in_features]``, uint8 unless another dtype was asked for.
    """
    rows, width = packed.shape
    length = words_per_block(num_bits)
    words = packed.reshape(rows, width // length, length)
    planes = CODES_PER_WORD[num_bits]
    codes = torch.empty(rows, width // length, planes, length, dtype=dtype, device=packed.device)
    for plane in range(planes):
        shifted = words >> (num_bits * plane) if plane else words
        torch.bitwise_and(shifted, 2**num_bits - 1, out=codes[:, :, plane])
    return codes.view(rows, width * planes)[:, :in_features]
