"""The guarantees of `gather_response`; ranks of a group take turns in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_cases import boundary_shapes, make_samples, pack_on_all_ranks, sample_shapes
from hypothesis import given, settings
from torch import Tensor

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    PackedMicroBatch,
    gather,
    gather_response,
    make_placeholder,
)

# Sums of the same float64 terms in another order.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
MIXED = [(11, 7), (3, 3), (0, 0), (30, 29), (1, 1), (6, 0)]


def rows_of(case: str, size: int) -> list[PackedMicroBatch]:
    """The slices of a row, with padding of the row itself."""
    shapes = {"mixed": MIXED, "boundaries": boundary_shapes(size)}
    samples = make_samples(shapes.get(case, [(5, 0), (0, 0), (2 * size, 0)]))
    options: dict[str, Any] = {"row_alignment_tokens": 14 * size}
    if case == "placeholder":
        samples = make_placeholder(DEFAULT_SCHEMA, samples, samples)
        options |= {"sample_indices": (), "is_placeholder": True}
    return pack_on_all_ranks(samples, size, **options)


def full_stream(num_tokens: int, trailing: tuple[int, ...] = ()) -> Tensor:
    """A value for every position of the full row."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(num_tokens, *trailing, generator=generator, dtype=torch.float64)
    return made.requires_grad_()


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["mixed", "boundaries", "empty responses", "placeholder"])
@pytest.mark.parametrize("trailing", [(), (2,)], ids=str)
def test_every_rank_has_values_and_gradients_of_the_unsliced_row(
    monkeypatch: pytest.MonkeyPatch, case: str, size: int, trailing: tuple[int, ...]
) -> None:
    rows = rows_of(case, size)
    stream = full_stream(rows[0].host_cu_seqlens_padded[-1], trailing)
    expected = plain_responses(stream, rows[0])
    assert [len(value) for value in expected] == rows[0].response_lengths
    wanted = sum(coupled(expected, rank) for rank in range(size))
    assert isinstance(wanted, Tensor)
    (plain,) = torch.autograd.grad(wanted, stream)
    group: Any = SimpleNamespace(size=lambda: size)

    def on_all_ranks(reduce: Any) -> list[list[Tensor]]:
        monkeypatch.setattr(gather, "all_reduce", lambda own, group: reduce(own))
        locals_ = [stream[row.index.positions] for row in rows]
        return [gather_response(*each, group=group) for each in zip(locals_, rows, strict=True)]

    parts: list[Tensor] = []
    on_all_ranks(lambda own: parts.append(own) or own)
    # Without response tokens there is no collective.
    has_responses = case in ("mixed", "boundaries")
    assert len(parts) == has_responses * size
    found = on_all_ranks(lambda own: torch.stack(parts).sum(0))
    for values in found:  # exact: each is the value of one rank plus zeros
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    total = sum(coupled(values, rank) for rank, values in enumerate(found))
    assert isinstance(total, Tensor)
    (gradient,) = torch.autograd.grad(total, stream)
    assert bool(gradient.any()) == has_responses
    torch.testing.assert_close(gradient, plain, **ROUNDING)


@settings(max_examples=100, deadline=None)
@given(sample_shapes())
def test_without_context_parallelism(shapes: list[tuple[int, int]]) -> None:
    (row,) = pack_on_all_ranks(make_samples(shapes))
    stream = full_stream(row.tokens.shape[1])
    values, expected = gather_response(stream, row), plain_responses(stream, row)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    ours, plain = (
        torch.autograd.grad(coupled(each, 0), stream, retain_graph=True)[0]
        for each in (values, [stream[:0].sum() + each for each in expected])
    )
    torch.testing.assert_close(ours, plain, **ROUNDING)


def test_a_nan_in_padding_or_prompt_stays_there() -> None:
    (row,) = pack_on_all_ranks(make_samples([(4, 2), (2, 1)]))
    stream = torch.full((6,), torch.nan, dtype=torch.bfloat16)
    stream[1], stream[2], stream[4] = 1.0, 2.0, 3.0
    found = gather_response(stream, row)
    assert [value.tolist() for value in found] == [[1, 2], [3]]
    assert {value.dtype for value in found} == {torch.bfloat16}


@pytest.mark.parametrize("shape", [(3,), (1, 4), ()], ids=str)
def test_a_stream_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    (row,) = pack_on_all_ranks(make_samples([(4, 2)]))
    with pytest.raises(ValueError, match=r"shape \[4, ...\], one value per token .* got \["):
        gather_response(torch.rand(shape), row)


def test_a_sliced_row_without_its_group_is_refused() -> None:
    row = rows_of("mixed", 2)[0]
    with pytest.raises(
        ValueError, match=r"the 2 ranks that share the row, got 1; set group to the"
    ):
        gather_response(torch.rand(row.tokens.shape[1]), row)
