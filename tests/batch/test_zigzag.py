"""The guarantees of a context-parallel rank's slice of a row."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from batch_cases import merge_packed
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch.row_index import Slice

SIZES = (1, 2, 4)


def padded(length: int, size: int) -> int:
    multiple = 2 * size if size > 1 else 1
    return -(-length // multiple) * multiple


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """A context-parallel size and the offsets of segments that divide, empty ones included."""
    size = draw(st.sampled_from(SIZES))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    return size, (0, *accumulate(padded(length, size) for length in lengths))


@settings(max_examples=300, deadline=None)
@given(rows(), st.sampled_from([0, 1, -1]))
def test_merge_undoes_slice_for_any_segments(row: tuple[int, tuple[int, ...]], dim: int) -> None:
    size, offsets = row
    x = torch.rand(offsets[-1], 3).movedim(0, dim)
    slices = [Slice(offsets, size, rank) for rank in range(size)]
    parts = [x.index_select(dim, each.positions) for each in slices]
    assert all(part.shape[dim] * size == offsets[-1] for part in parts)
    assert torch.equal(merge_packed(parts, offsets, dim), x)
    for rank, each in enumerate(slices):
        held = [place for _, first, end in each.chunks for place in range(first, end)]
        assert each.positions.tolist() == held
        assert each.local(each.positions).tolist() == list(range(each.num_local))
        for other in slices[:rank]:
            assert (other.local(each.positions) == -1).all()


def test_one_rank_holds_the_row_as_it_is_of_any_length() -> None:
    assert Slice((0, 7)).positions.tolist() == list(range(7))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 tokens cannot be cut into 4 equal .* pad them to 8"):
        Slice((0, 6), 2, 0)
    with pytest.raises(ValueError, match="5 tokens cannot be cut into 8 equal"):
        Slice((0, 8, 13), 4, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"a rank below context_parallel_size=2, got {rank}"):
        Slice((0, 8), 2, rank)
