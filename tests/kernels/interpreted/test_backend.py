"""The Triton implementation of the ops: shapes, strides, empty tensors, rows of embeddings."""

import pytest
import torch

from tests.kernels.interpreted import inline_asm
from tests.kernels.interpreted.problems import make_problem
from tests.numerics import DENSE_ROUNDING, KERNEL, relative_error
from woq_triton.backends import triton as backend
from woq_triton.backends import workspace
from woq_triton.scheme import QuantScheme

FP16, FP32 = torch.float16, torch.float32


def linear(problem, x, out_dtype=None):
    with inline_asm.interpreted():
        return backend.linear(
            x,
            problem.packed,
            problem.scale,
            problem.min,
            problem.bias,
            *problem.scheme,
            *problem.shape,
            out_dtype,
        )


def test_x_may_have_any_leading_shape_and_strides():
    problem = make_problem(6, 40, 96, QuantScheme(4, 32), FP32)
    x, expected = problem.x, problem.expected
    wide = torch.stack((x, x), dim=2)
    variants = {
        "3-d": (x.view(2, 3, 96), expected.view(2, 3, 40)),
        "1-d": (x[0], expected[0]),
        "transposed": (x.T.contiguous().T, expected),
        "every second element": (wide[:, :, 0], expected),
        "rows with a gap": (torch.cat((x, x), dim=1)[:, :96], expected),
        "expanded": (x[:1].expand(5, 96), expected[:1].expand(5, 40)),
        "no tokens": (x[:0], expected[:0]),
        "no tokens, 3-d": (x.new_empty(2, 0, 96), expected.new_empty(2, 0, 40)),
    }
    for name, (variant, answer) in variants.items():
        out = linear(problem, variant)
        assert out.shape == answer.shape and out.dtype == FP32, name
        assert relative_error(out, answer) < KERNEL[FP32], name


@pytest.mark.parametrize("M", [1, 20, 600])
def test_every_size_of_m_is_served_in_the_dtype_of_x(M):
    """By the decode kernel, the gemm kernel, and a dense product with the dequantized weight."""
    problem = make_problem(M, 24, 64, QuantScheme(4, 32), FP16, bias=True)
    out = linear(problem, problem.x)
    assert out.dtype == FP16
    # One rounding of the output, and one of the weights where they are made dense.
    assert relative_error(out, problem.expected) < 3 * DENSE_ROUNDING[FP16]


@pytest.mark.parametrize("N, K", [(0, 64), (16, 0), (0, 0)])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_weights_without_rows_or_columns(N, K, group_dim):
    """A rank with no head of a sharded attention has them."""
    problem = make_problem(3, N, K, QuantScheme(4, 32, group_dim), FP32, bias=True)
    out = linear(problem, problem.x)
    assert torch.equal(out.double(), problem.expected)
    dense = backend.dequantize(problem.packed, problem.scale, problem.min, *problem.scheme, N, K, None)
    assert dense.shape == (N, K)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_dim, group_size", [(1, 64), (1, 40), (0, 16), (0, 7), (0, -1), (1, -1)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, FP32], ids=str)
def test_dequantize_is_exact_but_for_the_output_dtype(dtype, symmetric, group_dim, group_size, num_bits):
    scheme = QuantScheme(num_bits, group_size, group_dim, symmetric)
    problem = make_problem(1, 37, 150, scheme, dtype)
    tensors = (problem.packed, problem.scale, problem.min, *problem.scheme, *problem.shape)
    for out_dtype in (None, FP32):
        dense = backend.dequantize(*tensors, out_dtype)
        assert dense.dtype == (out_dtype or dtype)
        assert relative_error(dense, problem.weight) < DENSE_ROUNDING[dense.dtype]


@pytest.mark.parametrize("num_bits, group_dim", [(4, 1), (8, 0)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding_gathers_the_rows_asked_for(ids_dtype, num_bits, group_dim):
    problem = make_problem(1, 50, 140, QuantScheme(num_bits, 32, group_dim), torch.bfloat16)
    tensors = (problem.packed, problem.scale, problem.min, *problem.scheme, *problem.shape)
    ids = torch.tensor([[49, 0, 7], [7, 31, 32]], dtype=ids_dtype)
    for variant in (ids, ids.T, ids[0, 0], ids[:, :0]):
        rows = backend.embedding(variant, *tensors, FP32)
        assert rows.shape == (*variant.shape, 140)
        assert relative_error(rows, problem.weight[variant.long()]) < DENSE_ROUNDING[FP32]
    assert backend.embedding(ids, *tensors, None).dtype == torch.bfloat16


def test_an_id_outside_the_table_gives_nan_and_reads_nothing():
    problem = make_problem(1, 10, 64, QuantScheme(4, 32), FP32)
    ids = torch.tensor([3, -1, 10, 2**40])
    rows = backend.embedding(
        ids, problem.packed, problem.scale, problem.min, *problem.scheme, *problem.shape, None
    )
    assert torch.isfinite(rows[0]).all() and torch.isnan(rows[1:]).all()


@pytest.mark.parametrize("group_dim, group_size", [(1, 32), (0, 16), (0, 96), (0, -1)])
def test_a_dense_product_is_made_block_by_block_in_the_same_memory(group_dim, group_size):
    """Blocks of 64 rows: whole groups of 16, parts of groups of 96 rows and of one that spans them all."""
    problem = make_problem(520, 200, 64, QuantScheme(4, group_size, group_dim), FP32, bias=True)
    tensors = (problem.packed, problem.scale, problem.min, *problem.scheme, *problem.shape, FP32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "DENSE_BYTES", 64 * 64 * 4)
        blocks = [(launch.tensors[-1], rows) for launch, rows in backend._dense_blocks(*tensors)]
        out = linear(problem, problem.x)
    assert len({memory.data_ptr() for memory, _ in blocks}) == 1
    assert [row for _, rows in blocks for row in range(rows.start, rows.stop)] == list(range(200))
    assert max(memory.nbytes for memory, _ in blocks) == 64 * 64 * 4
    assert relative_error(out, problem.expected) < KERNEL[FP32]
