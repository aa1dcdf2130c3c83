"""Padded sizes, the row capacity, and the refusal of a cap that holds nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, cases, examples, row_multiple, sample_multiple

from mcore_batching.planning import (
    ConfigError,
    ParallelDims,
    PlannerConfig,
    plan_step,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.config import (
    padded_row_tokens,
    padded_sample_tokens,
    placeholder_tokens,
    row_capacity_tokens,
)
from mcore_batching.planning.plans.validation import validate_plan


@examples(100)
@given(cases(), st.integers(0, 500))
def test_padded_sizes_are_the_least_multiples(case: Case, length: int) -> None:
    dims, config = case.dims, case.config
    each, row = sample_multiple(dims, config), row_multiple(dims, config)
    assert sample_multiple_tokens(dims, config) == each
    assert row_multiple_tokens(dims, config) == row
    padded = padded_sample_tokens(length, dims, config)
    assert padded % each == 0
    assert padded - each < max(length, 1) <= padded
    total = padded_row_tokens(padded, dims, config)
    assert total % row == 0
    assert total - row < padded <= total
    assert placeholder_tokens(dims, config) == -(-each // row) * row


@examples(100)
@given(cases(), st.integers(0, 2000))
def test_row_capacity_admits_exactly_the_rows_under_the_cap(case: Case, tokens: int) -> None:
    dims, config = case.dims, case.config
    cap = config.max_tokens_per_gpu * dims.context_parallel
    fits = padded_row_tokens(tokens, dims, config) <= cap
    assert fits == (tokens <= row_capacity_tokens(dims, config))


def test_a_cap_that_holds_no_placeholder_is_refused() -> None:
    dims = ParallelDims(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
    config = PlannerConfig(max_tokens_per_gpu=7, pad_total_to=16)
    message = (
        "the least micro-batch takes 16 tokens, the cap is 14; set "
        "max_tokens_per_gpu (--max-tokens-per-gpu) to 8 or more, or lower "
        "pad_each_to (--dynamic-batch-pad-each-to) and "
        "pad_total_to (--dynamic-batch-pad-total-to)"
    )
    for lengths in ([], [1, 2]):
        with pytest.raises(ConfigError) as caught:
            plan_step(lengths, dims, config)
        assert str(caught.value) == message
    enough = PlannerConfig(max_tokens_per_gpu=8, pad_total_to=16)
    validate_plan(plan_step([1, 2], dims, enough), [1, 2])
