"""The guarantees of `gather_response`: in one process, and in two and four with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_cases import make_samples, merge_packed, sample_shapes
from gather_worker import (
    CASES,
    TRAILING,
    coupled,
    full_stream,
    gather_all,
    plain_responses,
    row_of,
)
from hypothesis import given, settings
from spawned import reports_of_group

from mcore_batching.batch import DEFAULT_SCHEMA, gather_response, pack

SECONDS = 180  # a rank that waits for another gives up after 120

# Sums of the same float64 terms in another order.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def single(shapes: list[tuple[int, int]]) -> Any:
    samples = make_samples(shapes)
    return pack(samples, schema=DEFAULT_SCHEMA, sample_indices=range(len(shapes)))


@pytest.fixture(scope="module", params=[2, 4], ids=["cp 2", "cp 4"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[Any, Any]]:
    """What each rank of a group of processes reports."""
    return reports_of_group(gather_all, request.param, tmp_path_factory.mktemp("gather"), SECONDS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
def test_every_rank_has_values_and_gradients_of_the_unsliced_row(
    reports: list[dict[Any, Any]], case: str, trailing: tuple[int, ...]
) -> None:
    row = row_of(case, len(reports), 0)
    has_responses = case in ("mixed", "boundaries")
    stream = full_stream(row.host_cu_seqlens_padded[-1], trailing).requires_grad_()
    expected = plain_responses(stream, row)
    assert [len(value) for value in expected] == row.response_lengths
    total = sum(coupled(expected, rank) for rank in range(len(reports)))
    total.backward()
    assert stream.grad is not None
    assert bool(stream.grad.any()) == has_responses
    own = [report[case, trailing] for report in reports]
    for result in own:
        # Exact: each is the value of one rank plus zeros.
        assert all(torch.equal(a, b) for a, b in zip(result["values"], expected, strict=True))
        assert result["collectives"] == ((1, 2) if has_responses else (0, 0))
    merged = merge_packed([result["gradient"] for result in own], row.host_cu_seqlens_padded)
    torch.testing.assert_close(merged, stream.grad, **ROUNDING)


@settings(max_examples=200, deadline=None)
@given(sample_shapes())
def test_without_context_parallelism(shapes: list[tuple[int, int]]) -> None:
    row = single(shapes)
    stream = full_stream(row.tokens.shape[1], ()).requires_grad_()
    values = gather_response(stream, row)
    expected = plain_responses(stream, row)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    ours, plain = (
        torch.autograd.grad(coupled(each, 0), stream, retain_graph=True)[0]
        for each in (values, [stream[:0].sum() + each for each in expected])
    )
    torch.testing.assert_close(ours, plain, **ROUNDING)


def test_a_nan_in_padding_or_prompt_stays_there() -> None:
    row = single([(4, 2), (2, 1)])
    stream = torch.full((6,), torch.nan)
    stream[1], stream[2], stream[4] = 1.0, 2.0, 3.0
    assert [value.tolist() for value in gather_response(stream, row)] == [[1, 2], [3]]


def test_the_type_is_kept() -> None:
    (value,) = gather_response(torch.rand(4).bfloat16(), single([(4, 2)]))
    assert value.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3,), (1, 4), ()], ids=str)
def test_a_stream_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \[4, ...\], one value per token .* got \["):
        gather_response(torch.rand(shape), single([(4, 2)]))


def test_a_sliced_row_without_its_group_is_refused() -> None:
    row = row_of("mixed", 2, 0)
    with pytest.raises(
        ValueError, match=r"the 2 ranks that share the row, got 1; set group to the"
    ):
        gather_response(torch.rand(row.tokens.shape[1]), row)
