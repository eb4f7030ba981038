"""How a vector is cut into blocks, and that nothing grows on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel_sgd.kernels import Blocks, cut, payload_offsets

repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=200)
sizes_of_parameters = st.lists(st.integers(0, 400), max_size=12)
block_sizes = st.integers(1, 150)
all_bits = pytest.mark.parametrize("bits", [1, 4, 8])


@repeatable
@given(sizes_of_parameters, block_sizes)
@example([], 8)
@example([0], 8)
@example([0, 8, 0, 0, 9], 8)
@example([7, 1, 1], 8)
def test_cut(sizes, block_size):
    starts = cut(sizes, block_size)
    assert starts.dtype == np.int64
    assert (starts[0], starts[-1]) == (0, sum(sizes))
    lengths = np.diff(starts)
    assert (lengths > 0).all()
    assert (lengths <= block_size).all()
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        if size >= block_size:  # shares no block with its neighbours, and wastes none
            own = starts[(starts >= end - size) & (starts <= end)]
            assert (own[0], own[-1]) == (end - size, end)
            assert len(own) - 1 == -(-size // block_size)


@repeatable
@given(st.lists(st.integers(0, 7), min_size=1), st.just(8))
def test_small_neighbours_share_full_blocks(sizes, block_size):
    assert len(cut(sizes, block_size)) - 1 == -(-sum(sizes) // block_size)


def test_cut_of_a_known_layout():
    assert cut([10, 4, 2, 8, 3], 4).tolist() == [0, 4, 8, 10, 14, 16, 20, 24, 27]
    assert cut([10, 2, 1, 1, 2, 8], 4).tolist() == [0, 4, 8, 10, 14, 16, 20, 24]


@all_bits
@repeatable
@given(sizes_of_parameters, block_sizes)
def test_no_payload_is_larger_than_its_values(bits, sizes, block_size):
    starts = cut(sizes, block_size)
    offsets = payload_offsets(starts, bits)
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    nbytes, lengths = np.diff(offsets), np.diff(starts)
    assert (nbytes > 0).all()
    assert (nbytes <= 4 * lengths).all()
    assert (nbytes % 4 == 0).all()


@all_bits
def test_a_full_block_takes_its_bits_and_its_levels(bits):
    levels = 8 if bits == 1 else 4
    offsets = payload_offsets(cut([1024 * 5], 1024), bits)
    assert np.diff(offsets).tolist() == [1024 * bits // 8 + levels] * 5


def test_a_part_of_the_blocks_keeps_its_place_in_the_whole():
    starts = cut([100, 70, 300], 64)
    blocks = Blocks(starts, payload_offsets(starts, 4))
    part = blocks.part(2, 5)
    assert len(part) == 3
    assert (part.values.start, part.values.stop) == (starts[2], starts[5])
    assert (part.bytes.start, part.bytes.stop) == (blocks.offsets[2], blocks.offsets[5])
    assert np.shares_memory(part.starts, starts)
    assert len(blocks.part(3, 3)) == 0
    assert blocks.values == slice(0, 470)
