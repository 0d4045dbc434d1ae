"""int8 codes as rows of a quantized embedding bag, for a few tokens of any float dtype.

A bag's weighted sum of 8-bit rows, ``sum_k x[k] * (q[k] * scale + bias)``, is a matrix-vector product with
the transposed weight: row k holds the codes of one input feature, a bag the rows of one group, and the
activations are the weights of the sum. FBGEMM, which torch has on x86, generates its loop for the processor,
with fp32 sums. The row's own scale and bias (1 and -128) centre the codes; the group's come after::

    out[n] = sum_g scale[n, g] * bag[g, n] + sum_g (min[n, g] + 128 * scale[n, g]) * sum_k x[g, k]

A row is cut into chunks of C output features, whose sums fit the registers. The arrangement::

    codes [groups * N / C * group_size, C + 8] uint8     row (g, c, k) = codes (c*C .. +C, g*group_size + k)
                                                         and the fp32 numbers 1 and -128

Beyond a few tokens it loses to dequantizing chunk after chunk and multiplying.
"""

import functools

import torch
from torch import Tensor

from woq_triton.backends.cpu import multiply_blocks, to_weights
from woq_triton.scheme import QuantScheme
from woq_triton_kernels import layout

_MOST_CHUNK, _LEAST_CHUNK = 256, 64
"""Output features in a chunk: more run out of registers, fewer waste bytes on the 8 of each row."""

_LEAST_GROUP = 32
"""Below this group size the sums after the bags weigh too much."""

_MOST_TOKENS = 8
"""Tokens up to which bags are the quicker way."""

_TAIL = 8
"""Bytes after the codes of a row: two fp32 numbers."""


def fits(scheme: QuantScheme, shape: tuple[int, int]) -> bool:
    """Whether a weight ``[out_features, in_features]`` can be arranged so, and this torch has FBGEMM."""
    return (
        scheme.num_bits == 8
        and scheme.group_dim == 1
        and shape[1] > 0
        and scheme.resolve_group_size(shape) >= _LEAST_GROUP
        and shape[1] % scheme.resolve_group_size(shape) == 0
        and chunk_size(shape[0]) > 0
        and "fbgemm" in torch.backends.quantized.supported_engines
    )


@functools.cache
def chunk_size(out_features: int) -> int:
    """Output features in a chunk: the largest divisor within the limits; 0 if there is none."""
    sizes = range(_MOST_CHUNK, _LEAST_CHUNK - 1, -1)
    return next((size for size in sizes if out_features and out_features % size == 0), 0)


def arrange(packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """Canonical codes to rows, uint8 ``[K * N / C, C + 8]``."""
    chunk = chunk_size(len(packed))
    arranged = torch.empty(in_features * (len(packed) // chunk), chunk + _TAIL, dtype=torch.uint8)
    arranged[:, chunk:] = torch.tensor([1.0, -128.0]).view(torch.uint8)
    for rows, words in zip(_chunks(arranged, len(packed), group_size), packed.split(chunk), strict=True):
        rows.copy_(layout.unpack(words, 8, in_features).t().reshape(rows.shape))
    return arranged


def restore(arranged: Tensor, out_features: int, in_features: int, group_size: int) -> Tensor:
    """Undo `arrange`."""
    packed = torch.empty(out_features, layout.packed_width(in_features, 8), dtype=torch.int16)
    parts = packed.split(chunk_size(out_features))
    for words, rows in zip(parts, _chunks(arranged, out_features, group_size), strict=True):
        words.copy_(layout.pack(rows.flatten(0, 1).t().contiguous(), 8))
    return packed


def linear(
    tokens: Tensor, arranged: Tensor, scale: Tensor, min: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """``tokens @ weight.T + bias`` for ``[M, K]`` activations of any float dtype, in that dtype.

    Args:
        tokens: ``[M, K]``.
        arranged: uint8 ``[K * N / C, C + 8]``.
        scale: ``[N, groups]``; quickest where it is the transpose of a contiguous tensor.
        min: As scale, or None.
        bias: ``[N]`` or None.
        group_size: Divides K.
    """
    if len(tokens) <= _MOST_TOKENS:
        out = tokens.new_empty(len(tokens), len(scale))
        min_t = None if min is None else min.t()
        return _sum_bags(tokens.float().contiguous(), arranged, scale.t(), min_t, bias, out)
    chunk = chunk_size(len(scale))
    codes = arranged.view(-1, len(scale) // chunk, group_size, chunk + _TAIL)[..., :chunk]

    def weight_t(rows: slice) -> Tensor:
        # [groups, chunks, group_size, C] to [groups, group_size, rows]
        part = codes[:, rows.start // chunk : -(-rows.stop // chunk)].transpose(1, 2).float().flatten(2)
        return to_weights(part, 128, scale[rows], None if min is None else min[rows]).flatten(0, 1)

    return multiply_blocks(tokens, weight_t, len(scale), chunk, bias)


def _chunks(arranged: Tensor, out_features: int, group_size: int) -> list[Tensor]:
    """The codes of each chunk of output features: views ``[groups, group_size, C]``."""
    chunk = chunk_size(out_features)
    rows = arranged.view(-1, out_features // chunk, group_size, chunk + _TAIL)
    return [rows[:, index, :, :chunk] for index in range(rows.shape[1])]


def _sum_bags(
    tokens: Tensor, arranged: Tensor, scale_t: Tensor, min_t: Tensor | None, bias: Tensor | None, out: Tensor
) -> Tensor:
    groups, out_features = scale_t.shape
    group_size = tokens.shape[1] // groups
    indices, offsets = _bags(len(arranged), group_size)
    scale_t = scale_t.float()
    centre = None if min_t is None else min_t.float().add(scale_t, alpha=128)
    for token, x in enumerate(tokens.unflatten(1, (groups, 1, group_size))):
        weights = x.expand(groups, out_features // (arranged.shape[1] - _TAIL), group_size).reshape(-1)
        bags = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            arranged, indices, offsets, False, 0, False, weights, None, True
        )
        sums = bags.view(groups, out_features).mul_(scale_t).sum(0)
        if centre is not None:
            sums += x.sum((1, 2)) @ centre
        out[token] = sums if bias is None else sums.add_(bias)
    return out


@functools.lru_cache(maxsize=8)
def _bags(rows: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Row numbers, and where each bag starts: every row belongs to one bag, in order."""
    return torch.arange(rows, dtype=torch.int32), torch.arange(0, rows + 1, group_size, dtype=torch.int32)
