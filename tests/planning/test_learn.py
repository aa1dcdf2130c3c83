"""The fit of three costs to rows' times: what it finds, what it cannot spoil, what it costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.costs.cost import OUTPUT, LayerCost, costs_of_stage
from mcore_batching.planning.costs.layers_of import cost_model
from mcore_batching.planning.learn import LearntCosts, TimedRow

SHAPE = CostModel()
BEGIN = LearntCosts(shape=SHAPE, cost_model=SHAPE)
SECONDS_PER_UNIT = 1e-5
LAUNCHES = CostModel(quadratic=0.002, per_micro_batch=200.0)
ATTENTION = CostModel(quadratic=0.08, per_micro_batch=4.0)
BOTH = CostModel(quadratic=0.02, per_micro_batch=40.0)


def rows_of(seed: int, count: int = 12) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        lengths = [round(generator.lognormvariate(4.0, 0.8)) + 1 for _ in range(4)]
        made.append(tuple(lengths[: generator.randint(1, 4)]))
    return made


def timed(model: CostModel, rows: Sequence[tuple[int, ...]]) -> list[TimedRow]:
    seconds = SECONDS_PER_UNIT * (1.0 + model.backward_ratio)
    return [TimedRow(row, seconds * model.micro_batch(row)) for row in rows]


def error(learnt: LearntCosts, truth: CostModel, rows: Sequence[tuple[int, ...]]) -> float:
    """The largest of single rows."""
    speed = (learnt.seconds_per_unit or 0.0) * (1.0 + learnt.cost_model.backward_ratio)
    return max(
        abs(speed * learnt.cost_model.micro_batch(row) / took - 1)
        for row, took in timed(truth, rows)
    )


@pytest.mark.parametrize(
    "truth", [LAUNCHES, ATTENTION, BOTH, SHAPE, replace(ATTENTION, window=32, quadratic=0.2)]
)
def test_costs_are_known_after_one_step_and_found_out_where_they_change(truth: CostModel) -> None:
    """Pairs beyond the shape's window are not counted."""
    shape = replace(SHAPE, window=truth.window)
    begin = LearntCosts(shape=shape, cost_model=shape)
    learnt = begin.after(begin.evidence(timed(truth, rows_of(0, 48)), shape))
    assert learnt.cost_model.window == truth.window
    assert error(learnt, truth, rows_of(1)) < 0.08
    grown = replace(truth, quadratic=3 * truth.quadratic, per_micro_batch=truth.per_micro_batch / 3)
    for step in range(8):
        learnt = learnt.after(learnt.evidence(timed(grown, rows_of(step)), shape))
    assert error(learnt, grown, rows_of(20)) < 0.1


def test_what_rows_cannot_tell_apart_keeps_the_shapes_proportion() -> None:
    """Rows of one length alone: fixed, linear and quadratic costs are one number."""
    truth = replace(SHAPE, linear=3.0, quadratic=3 * SHAPE.quadratic, per_micro_batch=768.0)
    learnt = BEGIN.after(BEGIN.evidence(timed(truth, [(500,)] * 9), SHAPE))
    assert learnt.cost_model.per_micro_batch == pytest.approx(SHAPE.per_micro_batch, rel=1e-6)
    assert learnt.cost_model.quadratic == pytest.approx(SHAPE.quadratic, rel=1e-6)
    assert learnt.seconds_per_unit == pytest.approx(3 * SECONDS_PER_UNIT, rel=1e-6)


def test_no_news_change_nothing() -> None:
    assert BEGIN.after(BEGIN.evidence([], SHAPE)) is BEGIN
    learnt = BEGIN.after(BEGIN.evidence(timed(BOTH, rows_of(0)), SHAPE))
    assert learnt.after([0.0] * len(learnt.sums)) is learnt


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 2e6, 1e-300], ids=str)
def test_times_that_are_none_are_left_out(seconds: float) -> None:
    rows = timed(BOTH, rows_of(0))
    broken = [TimedRow((9, 9), seconds), TimedRow((), 1.0), TimedRow((0,), 1.0)]
    assert BEGIN.evidence([*rows, *broken], SHAPE) == BEGIN.evidence(rows, SHAPE)


@pytest.mark.parametrize("at", range(6))
def test_a_stalled_row_pulls_little(at: int) -> None:
    rows = timed(BOTH, rows_of(5, 24))
    rows[at] = rows[at]._replace(seconds=50 * rows[at].seconds)
    learnt = BEGIN.after(BEGIN.evidence(rows, SHAPE))
    assert error(learnt, BOTH, rows_of(6)) < 0.1


def test_a_stalled_step_pulls_little_beside_those_before_it() -> None:
    learnt = BEGIN
    for step in range(6):
        rows = timed(BOTH, rows_of(step))
        if step == 5:
            rows = [row._replace(seconds=20 * row.seconds) for row in rows]
        learnt = learnt.after(learnt.evidence(rows, SHAPE))
    assert error(learnt, BOTH, rows_of(9)) < 0.5  # by itself 19


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 10**7), min_size=1, max_size=5).map(tuple),
            st.floats(1e-12, 1e6),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_whatever_was_timed_costs_are_costs(
    rows: list[tuple[tuple[int, ...], float]], times: int
) -> None:
    """No negative, infinite or undefined cost, and a token costs something."""
    learnt = BEGIN
    for _ in range(times):
        learnt = learnt.after(learnt.evidence(itertools.starmap(TimedRow, rows), SHAPE))
        assert learnt.cost_model.linear == 1.0  # and `CostModel` refuses what is no cost
        assert 0 < (learnt.seconds_per_unit or 0.0) < 1e6


def test_uneven_stages_are_compared_with_what_their_layers_cost() -> None:
    """The last of two stages has the output layer; rows of both are of one mean stage's costs."""
    costs = {"a": LayerCost(1.0, 0.001, 0.0, 1.0), OUTPUT: LayerCost(2.0, 0.0, 0.0, 2.0)}
    shape = cost_model(f"aa{OUTPUT}", costs)
    truth = replace(shape, quadratic=5 * shape.quadratic)
    dims, learnt = ParallelDims(pipeline_parallel=2), LearntCosts(shape=shape, cost_model=shape)
    parts = []
    for stage in range(2):
        own = costs_of_stage(truth, dims, stage)
        rows = timed(own, rows_of(stage, 24))
        parts.append(learnt.evidence(rows, costs_of_stage(shape, dims, stage)))
    assert costs_of_stage(truth, dims, 0).linear < costs_of_stage(truth, dims, 1).linear
    learnt = learnt.after([sum(numbers) for numbers in zip(*parts, strict=True)])
    assert learnt.cost_model.quadratic == pytest.approx(truth.quadratic, rel=0.1)
    assert learnt.seconds_per_unit == pytest.approx(SECONDS_PER_UNIT, rel=0.05)
