"""Statistics of a step's plan among its losses, as stock code logs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from mcore_batching import CostModel, ParallelDims, PlannerConfig, plan_step, step_statistics
from mcore_batching.integrations.megatron_lm import step_log, with_batching_statistics
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory

LENGTHS = [9, 6, 4, 2]
PLAN = plan_step(
    LENGTHS, ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8), CostModel()
)
STATISTICS = step_statistics(PLAN, LENGTHS)
LOSSES = {"lm loss": torch.tensor([2.0])}


@pytest.fixture(autouse=True)
def _new_job() -> Iterator[None]:
    yield
    step_log._last_step.clear()
    step_log._unread.clear()


def test_losses_are_joined_by_the_last_steps_statistics() -> None:
    assert with_batching_statistics(LOSSES) == LOSSES
    step_log.record_step(STATISTICS, plan_seconds=0.5, run=(1.0, 4.0), log_all=True)
    logged = with_batching_statistics(LOSSES)
    made = STATISTICS
    assert logged.pop("lm loss") is LOSSES["lm loss"]
    assert {name: value.tolist() for name, value in logged.items()} == {
        f"batching/{name}": [pytest.approx(value)]
        for name, value in {
            "fill": made.fill,
            "padding": made.padding,
            "micro-batches a rank": made.num_microbatches,
            "placeholders": made.num_placeholders,
            "samples over the cap": 1,
            "rank balance": made.rank_balance,
            "slot balance": made.slot_balance,
            "time over floor": made.time_over_floor,
            "tokens in flight": made.peak_inflight_tokens,
            "plan seconds": 0.5,
            "step seconds": 3.0,
        }.items()
    }
    assert list(LOSSES) == ["lm loss"]


def test_five_values_are_logged_unless_all_are_asked_for() -> None:
    step_log.record_step(STATISTICS, plan_seconds=0.5, run=(1.0, 4.0), learnt={"cost": 1.0})
    assert {*with_batching_statistics({"lm loss": torch.ones(1)})} - {"lm loss"} == {
        "batching/micro-batches a rank",
        "batching/fill",
        "batching/padding",
        "batching/time over floor",
        "batching/plan seconds",
    }


def test_truncated_rows_are_logged_of_fine_tuning_alone() -> None:
    step_log.record_step(STATISTICS, plan_seconds=0.5, run=(1.0, 4.0), truncated=0)
    assert with_batching_statistics(LOSSES)["batching/truncated"].tolist() == [0.0]


def test_memory_is_estimated_where_the_model_s_shape_is_known() -> None:
    shape = ModelShape(layers=2, hidden=8, ffn=32, heads=2, groups=2, head_dim=4, vocab=2**20)
    memory = predicted_memory(STATISTICS, PLAN, shape)
    step_log.record_step(STATISTICS, plan_seconds=0.5, run=(1.0, 4.0), memory=memory, log_all=True)
    logged = with_batching_statistics(LOSSES)
    assert logged["batching/tokens in flight"].tolist() == [9.0]
    assert logged["batching/logits GiB"].tolist() == [pytest.approx(9 * 6 / 2**10)]
    per_token = 2 * 2 * (4 * 8 + 4 * 8 + 3 * 32)
    expected = pytest.approx(9 * per_token / 2**30)
    assert logged["batching/activations GiB"].tolist() == [expected]


def test_ranks_without_losses_log_nothing() -> None:
    step_log.record_step(STATISTICS, plan_seconds=0.5, run=(1.0, 4.0))
    assert with_batching_statistics({}) == {}


class Mark:
    """Of a device that gets there when it is told to."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.over = seconds, False

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end: Mark) -> float:
        assert end.over  # CUDA raises otherwise
        return 1e3 * (end.seconds - self.seconds)


def test_the_time_of_a_step_that_is_not_over_is_read_a_step_later() -> None:
    ends = [Mark(2.0), Mark(5.0)]
    logged = []
    for end in ends:
        step_log.record_step(STATISTICS, plan_seconds=0.0, run=(Mark(0.0), end), log_all=True)
        logged.append(float(with_batching_statistics(LOSSES)["batching/step seconds"]))
        ends[0].over = True
    assert logged == [0.0, 2.0]
    ends[1].over = True
    assert float(with_batching_statistics(LOSSES)["batching/step seconds"]) == 5.0


def test_learnt_costs_and_what_they_predict_are_entries() -> None:
    costs = CostModel(quadratic=0.5, per_micro_batch=7.0)
    learnt = LearntCosts(shape=CostModel(), cost_model=costs)
    known = {"quadratic cost": 0.5, "micro-batch cost": 7.0}
    assert step_log.learnt_entries(None, 4.0) == {}
    assert step_log.learnt_entries(learnt, 4.0) == known
    learnt = dataclasses.replace(learnt, seconds_per_unit=0.25)
    assert step_log.learnt_entries(learnt, 4.0) == known | {"predicted step seconds": 1.0}
