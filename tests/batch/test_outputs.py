"""Outputs come back: values of whole responses from the ranks that share a row (which take turns in
one process), and, invariant 7, what is run in plan order in the order the samples came in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_cases import boundary_shapes, make_samples, pack_on_all_ranks, sample_shapes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    OrderError,
    PackedMicroBatch,
    apply_order,
    gather_response,
    make_placeholder,
    order,
    restore_order,
)
from mcore_batching.batch import row as packed_row

# Sums of the same float64 terms in another order.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def plain_responses(stream: Tensor, row: PackedMicroBatch) -> list[Tensor]:
    """Token by token from the full stream, differentiable."""
    responses = []
    for start, total, response in zip(
        row.host_cu_seqlens_padded, row.total_lengths, row.response_lengths, strict=False
    ):
        values = [
            stream[start + position - 1] if position else torch.zeros_like(stream[0])
            for position in range(total - response, total)
        ]
        responses.append(torch.stack(values) if values else stream[:0])
    return responses


def coupled(values: list[Tensor], rank: int) -> Tensor:
    """A loss in which all positions of a sample interact, weighted differently on each rank."""
    terms = [value.sum() / max(value.numel(), 1) for value in values]
    return (rank + 1) * torch.stack(terms).exp().sum()


@settings(max_examples=100, deadline=None)
@given(sample_shapes(), st.sampled_from([1, 2, 4]), st.sampled_from([(), (2,)]))
@example(boundary_shapes(2), 2, ())
@example(boundary_shapes(4), 4, (2,))
@example([(5, 0), (0, 0), (4, 0)], 2, ())
@example([], 2, ())
def test_every_rank_has_values_and_gradients_of_the_unsliced_row(
    shapes: list[tuple[int, int]], size: int, trailing: tuple[int, ...]
) -> None:
    """Also of rows with padding of their own, and, without samples, of a placeholder."""
    samples = make_samples(shapes or [(3, 1)])
    options: dict[str, Any] = {"row_align": 14 * size, "is_placeholder": not shapes}
    if not shapes:
        samples = make_placeholder(DEFAULT_SCHEMA, samples, samples)
    rows = pack_on_all_ranks(samples, size, **options)
    # A value for every position of the full row.
    shape = (rows[0].host_cu_seqlens_padded[-1], *trailing)
    generator = torch.Generator().manual_seed(3)
    stream = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = plain_responses(stream, rows[0])
    assert [len(value) for value in expected] == rows[0].response_lengths
    wanted = sum(coupled(expected, rank) for rank in range(size))
    # Of responses without a prompt or a token nothing depends on the stream.
    (plain,) = torch.autograd.grad(wanted + 0 * stream.sum(), stream)
    group: Any = SimpleNamespace(size=lambda: size) if size > 1 else None

    def on_all_ranks(reduce: Any) -> list[list[Tensor]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_row, "all_reduce", lambda own, group: reduce(own))
            locals_ = [stream[row.index.positions] for row in rows]
            return [gather_response(*each, group=group) for each in zip(locals_, rows, strict=True)]

    parts: list[Tensor] = []
    found = on_all_ranks(lambda own: parts.append(own) or own)
    # Without response tokens there is no collective, nor on one rank.
    assert len(parts) == (size if size > 1 and any(rows[0].response_lengths) else 0)
    if parts:
        found = on_all_ranks(lambda own: torch.stack(parts).sum(0))
    for values in found:  # exact: each is the value of one rank plus zeros
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    total = sum(coupled(values, rank) for rank, values in enumerate(found))
    (gradient,) = torch.autograd.grad(total + 0 * stream.sum(), stream)
    torch.testing.assert_close(gradient, plain, **ROUNDING)


def test_a_nan_in_padding_or_prompt_stays_there() -> None:
    (row,) = pack_on_all_ranks(make_samples([(4, 2), (2, 1)]))
    stream = torch.full((6,), torch.nan, dtype=torch.bfloat16)
    stream[1], stream[2], stream[4] = 1.0, 2.0, 3.0
    found = gather_response(stream, row)
    assert [value.tolist() for value in found] == [[1, 2], [3]]
    assert {value.dtype for value in found} == {torch.bfloat16}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40).flatmap(lambda n: st.permutations(range(n))))
def test_order(plan_order: list[int]) -> None:
    """Values and indices may come one by one."""
    origin = [f"output of {index}" for index in range(len(plan_order))]
    run = [f"output of {index}" for index in plan_order]
    assert apply_order(iter(origin), iter(plan_order)) == run
    assert restore_order(iter(run), iter(plan_order), len(plan_order)) == origin


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-2, 9), max_size=9), st.integers(0, 9), st.integers(0, 9))
@example([0], 2, 1)
def test_anything_but_a_permutation_is_refused(
    indices: list[int], num_values: int, num_samples: int
) -> None:
    values = list(range(num_values))
    if num_values == len(indices) and sorted(indices) == list(range(num_samples)):
        assert restore_order(apply_order(values, indices), indices, num_samples) == values
        return
    with pytest.raises(OrderError) as caught:
        restore_order(values, indices, num_samples)
    error = caught.value
    assert error.missing == tuple(sorted(set(range(num_samples)) - set(indices)))
    assert error.extra == tuple(sorted(set(indices) - set(range(num_samples))))
    assert error.doubled == tuple(sorted({i for i in indices if indices.count(i) > 1}))


def test_of_millions_of_missing_indices_an_error_has_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "_MAX_MISSING", 3)
    with pytest.raises(OrderError) as caught:
        restore_order([], [], 100)
    assert caught.value.missing == (0, 1, 2)
