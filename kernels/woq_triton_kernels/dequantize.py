"""Packed to dense: whole weights, and the rows that an embedding looks up."""

import triton
import triton.language as tl
from torch import Tensor

from woq_triton_kernels.launch import Launch
from woq_triton_kernels.loads import plane_length
from woq_triton_kernels.tiles import DEQUANTIZE_ROWS, single_group
from woq_triton_kernels.unpack import round_to
from woq_triton_kernels.weights import load_at, metadata_offsets, scaled_weights


# Ids are often a column of a larger tensor: whether they are aligned must not make another kernel.
@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["ids_ptr"])
def _dequantize_kernel(
    ids_ptr,
    packed_ptr,
    scale_ptr,
    min_ptr,
    out_ptr,
    M,
    N,
    K,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    LENGTH: tl.constexpr = plane_length(NUM_BITS)
    blocks = tl.cdiv(K, 128)
    program = tl.program_id(0).to(tl.int64)
    block = (program % blocks).to(tl.int32)
    m = program // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    if ids_ptr is None:
        rows = tl.minimum(m, N - 1)
        known = m < M
    else:
        ids = tl.load(ids_ptr + m, mask=m < M, other=0).to(tl.int64)
        known = (ids >= 0) & (ids < N)
        rows = tl.where(known, ids, 0)
    columns = tl.arange(0, LENGTH)
    words = tl.load(packed_ptr + (rows * (blocks * LENGTH))[:, None] + (block * LENGTH + columns)[None, :])
    length = K if GROUP_DIM == 1 else N
    last_group = (length - 1) // GROUP_SIZE if GROUP_SIZE > 0 else 0
    for plane in tl.static_range(128 // LENGTH):
        start = block * 128 + plane * LENGTH
        k = start + columns
        offsets = metadata_offsets(
            0, rows, k, start, K, last_group, GROUP_SIZE, GROUP_DIM, False, LENGTH, EVEN_K
        )
        scale, minimum = load_at(scale_ptr, offsets), load_at(min_ptr, offsets)
        weights = scaled_weights(words, scale, minimum, min_ptr is None, plane, NUM_BITS)
        # There is no error to raise from here: an id outside the table must not pass for a token.
        weights = tl.where(known[:, None], weights, float("nan"))
        ptrs = out_ptr + (m * K)[:, None] + k[None, :]
        value = round_to(weights, out_ptr.dtype.element_ty)
        tl.store(ptrs, value, mask=(m < M)[:, None] & (k < K)[None, :])


def dequantize_launch(
    ids: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    min: Tensor | None,
    out: Tensor,
    num_bits: int,
    group_size: int,
    group_dim: int,
) -> Launch:
    """The launch that makes rows of the dense weight, computed in fp32.

    Args:
        ids: int32 or int64 ``[M]``, contiguous: which rows. None means all, in order. An id outside
            the weight gives a row of NaN.
        packed: int16 ``[out_features, packed_width]``, contiguous.
        scale: Float ``[out_features, groups]`` (group_dim 1) or ``[groups, in_features]``, contiguous.
        min: As scale, or None when symmetric.
        out: Float ``[M, in_features]`` (M = out_features without ids), contiguous; written.
        num_bits: 4 or 8.
        group_size: Weights in a group.
        group_dim: Dimension that groups run along.
    """
    (M, K), N = out.shape, packed.shape[0]
    return Launch(
        _dequantize_kernel,
        triton.cdiv(M, DEQUANTIZE_ROWS) * triton.cdiv(K, 128),
        (ids, packed, scale, min, out),
        M,
        (N, K),
        {
            "NUM_BITS": num_bits,
            "GROUP_SIZE": single_group(group_size, group_dim, N, K),
            "GROUP_DIM": group_dim,
            "BLOCK_M": DEQUANTIZE_ROWS,
            "EVEN_K": K % 128 == 0,
            "num_warps": 4,
        },
    )
