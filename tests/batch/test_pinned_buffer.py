"""Tensors in one buffer, and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch.columns import sent
from mcore_batching.batch.row_block import PinnedBuffer

CPU = torch.device("cpu")
TYPES = (torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=8)
)
def test_tensors_come_back_as_they_were(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randint(0, 9, shape).to(dtype) for dtype, shape in kinds]
    together = PinnedBuffer(tensors, pin_memory=False)
    back = together.on(CPU)
    for before, after in zip(tensors, back, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
    filled = [tensor for tensor in back if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) <= 1
    assert all(tensor.storage_offset() * tensor.element_size() % 128 == 0 for tensor in back)


def test_views_and_strides_are_copied_alone() -> None:
    """Not the whole of what a view looks into."""
    whole = torch.arange(1000).view(100, 10)
    together = PinnedBuffer([whole[:, 3], whole[5].expand(4, 10)], pin_memory=False)
    column, repeated = together.on(CPU)
    assert torch.equal(column, whole[:, 3])
    assert torch.equal(repeated, whole[5].expand(4, 10))
    assert column.untyped_storage().nbytes() < 1500


def test_what_a_copy_would_lose_is_kept() -> None:
    """A graph, a subclass, a layout."""
    attached = torch.ones(2, requires_grad=True) * 2
    parameter = torch.nn.Parameter(torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    back = PinnedBuffer([attached, parameter, sparse], pin_memory=False).on(CPU)
    assert back[0] is attached
    assert back[1] is parameter
    assert back[2] is sparse


def test_a_change_in_place_is_none_of_the_neighbours() -> None:
    """Autograd would refuse a backward pass through a neighbour of what has been changed."""
    first, second = PinnedBuffer([torch.ones(2), torch.ones(2)], pin_memory=False).on(CPU)
    weight = torch.ones(2, requires_grad=True)
    total = (weight * first).sum()
    second.mul_(2)
    total.backward()
    assert torch.equal(first, torch.ones(2))


def test_a_tensor_on_the_host_stays_there() -> None:
    tensor = torch.ones(2)
    assert sent(tensor, CPU) is tensor
