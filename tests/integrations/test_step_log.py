"""Statistics of a step's plan among its losses, as stock code logs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching import CostModel, ParallelDims, PlannerConfig, plan_step, step_statistics
from mcore_batching.integrations.megatron_lm import step_log, with_batching_statistics
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.plans.memory import ModelShape

LENGTHS = [9, 6, 4, 2]
PLAN = plan_step(
    LENGTHS, ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8), CostModel()
)
STATISTICS = step_statistics(PLAN, LENGTHS)
LOSSES = {"lm loss": torch.tensor([2.0])}
SHAPE = ModelShape(layers=2, hidden=8, ffn=32, heads=2, groups=2, head_dim=4, vocab=2**20)


def record(
    learnt: LearntCosts | None = None, run: tuple[Any, Any] = (1.0, 4.0), **options: Any
) -> None:
    """A step that has run by `PLAN`."""
    schedule: Any = SimpleNamespace(
        step_plan=lambda step: (PLAN, LENGTHS), settings=SimpleNamespace(learnt=learnt)
    )
    step_log.record_step(schedule, SHAPE, plan_seconds=0.5, run=run, **options)


@pytest.fixture(autouse=True)
def _new_job() -> Iterator[None]:
    yield
    step_log._last_step.clear()
    step_log._unread.clear()


def test_losses_are_joined_by_the_last_steps_statistics() -> None:
    assert with_batching_statistics(LOSSES) == LOSSES
    record(log_all=True)
    logged = with_batching_statistics(LOSSES)
    made, per_token = STATISTICS, 2 * 2 * (4 * 8 + 4 * 8 + 3 * 32)
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
            "activations GiB": 9 * per_token / 2**30,
            "logits GiB": 9 * 6 / 2**10,
        }.items()
    }
    assert list(LOSSES) == ["lm loss"]


def test_five_values_are_logged_unless_all_are_asked_for() -> None:
    record(LearntCosts(shape=CostModel(), cost_model=CostModel()))
    assert {*with_batching_statistics({"lm loss": torch.ones(1)})} - {"lm loss"} == {
        "batching/micro-batches a rank",
        "batching/fill",
        "batching/padding",
        "batching/time over floor",
        "batching/plan seconds",
    }


def test_truncated_rows_are_logged_of_fine_tuning_alone() -> None:
    record(truncated=0)
    assert with_batching_statistics(LOSSES)["batching/truncated"].tolist() == [0.0]


def test_ranks_without_losses_log_nothing() -> None:
    record()
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
        record(run=(Mark(0.0), end), log_all=True)
        logged.append(float(with_batching_statistics(LOSSES)["batching/step seconds"]))
        ends[0].over = True
    assert logged == [0.0, 2.0]
    ends[1].over = True
    assert float(with_batching_statistics(LOSSES)["batching/step seconds"]) == 5.0


@pytest.mark.parametrize(
    ("seconds", "predicted"),
    [(None, {}), (0.25, {"predicted step seconds": 0.25 * STATISTICS.step_time})],
)
def test_learnt_costs_and_what_they_predict_are_entries(
    seconds: float | None, predicted: dict[str, float]
) -> None:
    costs = CostModel(quadratic=0.5, per_micro_batch=7.0)
    learnt = LearntCosts(shape=CostModel(), cost_model=costs, seconds_per_unit=seconds)
    record(learnt, log_all=True)
    logged = with_batching_statistics(LOSSES)
    expected = {"quadratic cost": 0.5, "micro-batch cost": 7.0} | predicted
    names = (*expected, "predicted step seconds")
    found = {name: logged.get(f"batching/{name}") for name in names}
    assert {name: float(value) for name, value in found.items() if value is not None} == {
        name: pytest.approx(value) for name, value in expected.items()
    }
