"""Plans for frameworks that assign samples to ranks, or run no placeholders; checks of their
models."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from mcore_batching.batch.consensus import Consensus
from mcore_batching.planning import (
    CostModel,
    MicroBatches,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    plan_step,
)
from mcore_batching.planning.integers import round_up
from mcore_batching.planning.local import fill_local, least_count, pack_local

# First chunks of models that can run packed rows.
_checked: WeakSet[Any] = WeakSet()


def plan_locally(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    consensus: Consensus,
    *,
    fewest: int = 1,
    multiple: int = 1,
) -> MicroBatches:
    """This rank's micro-batches, the same number on every rank; empty ones are placeholders.

    A collective over the ranks of ``consensus``, on all of which a failure of one is raised. Their
    number is at least ``fewest`` and a multiple of ``multiple``.
    """
    with consensus.agreement("packing") as agree:
        problem = Problem.of(lengths, dims, config)
        packed = pack_local(problem)
        needed = agree.max("micro-batches", least_count(problem, packed))
    count = round_up(max(needed.value, fewest), multiple)
    with consensus.agreement("filling"):
        return fill_local(problem, packed, count)


def caller_with(attribute: str) -> Any:
    """The nearest caller's ``self`` with this attribute of its own; None where no caller has it."""
    # verl and SkyRL hand over a batch alone, and no public name leads from there to its model, the
    # engine's or worker's.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if attribute in getattr(owner, "__dict__", ()):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def check_model(chunks: list[Any], agrees: Any) -> None:
    """Raise on every rank of a `Consensus` (`RankFailedError`) or `Job` (`PlanningFailedError`) if
    the model cannot run packed rows on one of them.

    A collective at the first call with a model.
    """
    # Megatron is there where its models are; other engines' processes may lack it.
    from mcore_batching.megatron.checks.settings import prepare_packed_model

    if chunks[0] not in _checked:
        with agrees.agreement("checking the model"):
            prepare_packed_model(chunks)
        _checked.add(chunks[0])


def plan_full_slots(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> tuple[StepPlan, bool]:
    """A plan for a framework that runs no placeholders; False where samples are too few for it."""
    step = plan_step(lengths, dims, config, cost_model)
    if any(() in rank for rank in step.micro_batches):  # faster: now every sample on its own rank
        even = dataclasses.replace(config, balance="cost")
        step = plan_step(lengths, dims, even, cost_model)
    return step, not any(() in rank for rank in step.micro_batches)
