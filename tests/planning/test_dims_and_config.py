"""Values of `ParallelDims`, `PlannerConfig` and `CostModel`: counts, padded sizes, costs."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import (
    Case,
    cases,
    examples,
    row_multiple,
    sample_multiple,
)

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.config import (
    padded_row_tokens,
    padded_sample_tokens,
    placeholder_tokens,
    row_capacity_tokens,
)


@examples(100)
@given(cases(), st.integers(0, 2000))
def test_padded_sizes_are_the_least_multiples_and_fill_rows_up_to_their_capacity(
    case: Case, length: int
) -> None:
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
    # A row's capacity admits exactly the rows under the cap.
    cap = config.max_tokens_per_gpu * dims.context_parallel
    fits = padded_row_tokens(length, dims, config) <= cap
    assert fits == (length <= row_capacity_tokens(dims, config))


@pytest.mark.parametrize(
    "value",
    [ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=3), CostModel(linear=2)],
)
def test_options_are_frozen_hashable_and_picklable(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 5)
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_cost_of_samples_and_micro_batches() -> None:
    model = CostModel()
    assert model.sample(0) == 0
    assert model.sample(24576) == 2 * 24576
    assert model.micro_batch([]) == 256
    assert model.micro_batch([24576, 12288]) == 256 + 2 * 24576 + 12288 * 1.5
    assert model.backward_ratio == 2
    assert CostModel(linear=2, quadratic=3, per_micro_batch=5).micro_batch([1, 10]) == 330
    model = CostModel(quadratic=1.0, window=4, beyond_window=0.25)
    assert [model.sample(length) for length in (2, 6)] == [2 + 4, 6 + 36 - 0.75 * 4]


COSTS = CostModel(
    linear=2.0, quadratic=0.5, backward_ratio=1.5, window=7, context_parallel_overhead=0.25
)


def test_cost_model_round_trip_with_and_without_what_a_record_notes() -> None:
    assert CostModel.from_json(COSTS.to_json()) == COSTS
    assert CostModel.from_json("\ufeff" + COSTS.to_json()) == COSTS
    document = json.loads(COSTS.to_json()) | {"seconds_per_unit": 1e-6}
    assert CostModel.from_json(json.dumps(document)) == COSTS
    del document["window"]
    assert CostModel.from_json(json.dumps(document)) == dataclasses.replace(COSTS, window=None)


def test_costs_of_a_row_grow_with_each_doubling_of_its_size() -> None:
    """By a share of its work and a fixed part; on one rank not at all."""
    model = CostModel(context_parallel_overhead=0.25, context_parallel_fixed=40.0)
    assert model.on_ranks(1) == model
    alone = model.sample(8000)
    for size, doublings in ((2, 1), (4, 2), (8, 3), (3, 2), (6, 3)):
        rows = model.on_ranks(size)
        assert rows.sample(8000) == pytest.approx(alone * 1.25**doublings / size, rel=1e-12)
        assert rows.per_micro_batch == model.per_micro_batch + 40.0 * doublings
    free = CostModel(context_parallel_overhead=0.0, context_parallel_fixed=0.0)
    assert free.on_ranks(4).micro_batch([8000]) == pytest.approx(256 + alone / 4)
