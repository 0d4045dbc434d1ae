"""The packed layout: its bits, its inverse, its padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from woq_triton_kernels import layout


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("column", [0, 31, 32, 63, 64, 127, 128, 200])
def test_a_code_lies_where_the_layout_is_drawn(num_bits, column):
    codes = torch.zeros(2, 201, dtype=torch.uint8)
    codes[1, column] = 2**num_bits - 1
    packed = layout.pack(codes, num_bits)
    per_block = {4: 32, 8: 64}[num_bits]
    word = per_block * (column // 128) + column % per_block
    shift = num_bits * (column % 128 // per_block)
    expected = torch.zeros(2, 2 * per_block, dtype=torch.int32)
    expected[1, word] = (2**num_bits - 1) << shift
    assert torch.equal(packed.to(torch.int32) & 0xFFFF, expected)


@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 300),
    num_bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**16),
)
def test_unpack_undoes_pack_for_every_shape(rows, columns, num_bits, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**num_bits, (rows, columns), dtype=torch.uint8, generator=generator)
    packed = layout.pack(codes, num_bits)
    assert packed.dtype == torch.int16
    assert packed.shape == (rows, layout.packed_width(columns, num_bits))
    assert torch.equal(layout.unpack(packed, num_bits, columns), codes)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_padding_holds_code_zero(num_bits):
    codes = torch.full((3, 130), 2**num_bits - 1, dtype=torch.uint8)
    padded = layout.unpack(layout.pack(codes, num_bits), num_bits, 256)
    assert torch.equal(padded[:, :130], codes)
    assert not padded[:, 130:].any()


@pytest.mark.parametrize("num_bits", [4, 8])
def test_a_shard_of_whole_blocks_is_a_slice_of_words(num_bits):
    codes = torch.randint(0, 2**num_bits, (4, 384), dtype=torch.uint8)
    words = layout.words_per_block(num_bits)
    part = layout.pack(codes, num_bits)[1:3, words : 3 * words]
    assert torch.equal(layout.unpack(part, num_bits, 256), codes[1:3, 128:384])
