"""Times of passes become times of rows, whatever chunks they ran through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import JobMemory
from mcore_batching.megatron.timing import CostLearner, TimedStep, learner_of
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.schedule import Pass

ORDER = [Pass(kind, chunk, slot) for kind in ("F", "B") for chunk in (0, 1) for slot in (0, 1, 2)]


class Mark:
    """A mark of a device, at a time; without one the device has not got to it."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return self.seconds is not None

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * float(end.seconds - self.seconds)


def marks() -> list[Any]:
    """Slot n takes n + 1 s a pass, backward passes twice as long; between passes 100 s pass."""
    found, now = [], 0.0
    for each in ORDER:
        took = (each.slot + 1.0) * (2 if each.kind == "B" else 1)
        found += [Mark(now), Mark(now + took)]
        now += took + 100.0
    return found


def test_a_row_takes_its_passes_through_all_chunks() -> None:
    step = TimedStep([(5,), (), (3, 4)], ORDER, marks())
    assert step.is_over
    assert [tuple(row) for row in step.timed_rows()] == [((5,), 6.0), ((3, 4), 18.0)]
    assert not TimedStep([(5,)], ORDER, [*marks()[:-1], Mark(None)]).is_over


def test_expert_parallel_ranks_are_refused() -> None:
    learner, shape = CostLearner(), CostModel()
    with pytest.raises(DynamicBatchArgumentError) as refused:
        learner.begin(shape, ParallelDims(data_parallel=2, expert_parallel=2))
    said = str(refused.value)
    assert said.startswith("--dynamic-batch-cost-model auto learns")
    assert "expert-parallel ranks wait for each other in every one: set it to fixed" in said
    assert learner.begin(shape, ParallelDims(data_parallel=2)).cost_model is shape


def test_an_actor_and_a_critic_have_learners_of_their_own() -> None:
    actor, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    job: Any = SimpleNamespace(memory=JobMemory(None))
    assert learner_of(job, [actor]) is learner_of(job, [actor]) is not learner_of(job, [critic])
