"""One iteration's update of a policy: log-probabilities, then the optimizer steps."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import timeline
import torch.distributed as dist
from metrics import StepMetrics
from objective import GRPOObjective, log_probs_of
from policy import build_adam, build_scheduler
from torch import Tensor

from mcore_batching.megatron import (
    DataIterator,
    add_fields,
    forward_only,
    get_data_iterator,
    schedule_of,
    train_step,
)
from mcore_batching.planning import StepStatistics, step_statistics


@dataclasses.dataclass(frozen=True)
class Learner:
    """Models, optimizer and loss of an update.

    Attributes:
        policy: this rank's model chunks in Megatron's data-parallel wrapper.
        reference: this rank's chunks of the frozen policy that the KL term holds on to.
        optimizer: of the policy.
        scheduler: of its learning rate.
        objective: the loss.
    """

    policy: list[Any]
    reference: list[Any]
    optimizer: Any
    scheduler: Any
    objective: GRPOObjective

    @classmethod
    def of(
        cls, options: argparse.Namespace, policy: list[Any], reference: list[Any], num_samples: int
    ) -> Learner:
        """With the optimizer and loss of the job's flags.

        Args:
            options: the flags.
            policy: this rank's chunks.
            reference: likewise.
            num_samples: that the job's steps count as, over which the learning rate decays.
        """
        optimizer = build_adam(policy, options.lr)
        scheduler = build_scheduler(optimizer, options.lr_decay_style, num_samples)
        objective = GRPOObjective(clip=options.clip, kl_coefficient=options.kl_coefficient)
        return cls(policy, reference, optimizer, scheduler, objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """Result of an update.

    Attributes:
        iterators: the schedule; on the last stage its rollout data has ``log_probs`` and
            ``ref_log_probs`` by now.
        steps: of each optimizer step.
        statistics: how well the steps filled micro-batches and evened out ranks.
        plan_seconds: planning, all ranks together.
        forward_only_seconds: old and reference log-probabilities.
        spans: when each micro-batch of the first step ran, if that was recorded.
    """

    iterators: list[DataIterator]
    steps: tuple[StepMetrics, ...]
    statistics: StepStatistics
    plan_seconds: float
    forward_only_seconds: float
    spans: list[timeline.Span]

    def figures(self) -> dict[str, Any]:
        """What `IterationMetrics` tells of an update."""
        return {
            "samples": self.statistics.num_samples,
            "tokens": self.statistics.real_tokens,
            "num_microbatches": self.statistics.num_microbatches,
            "placeholders": self.statistics.num_placeholders,
            "fill": self.statistics.fill,
            "padding": self.statistics.padding,
            "rank_balance": self.statistics.rank_balance,
            "plan_seconds": self.plan_seconds,
            "forward_only_seconds": self.forward_only_seconds,
            "steps": self.steps,
        }


def update(
    learner: Learner,
    args: Any,
    data: dict[str, list[Any]],
    *,
    steps: Sequence[Sequence[int]] | None = None,
    increment: int | None = None,
    record: bool = False,
) -> Update:
    """Score this rank's samples, then take the optimizer steps.

    A collective over all ranks.

    Args:
        learner: models, optimizer and loss.
        args: the flags of the engine.
        data: of this data-parallel rank, ``advantages`` included.
        steps: as `get_data_iterator` takes them.
        increment: as `train_step` takes it, with `steps`.
        record: time every micro-batch of the first step.
    """
    started = time.monotonic()
    iterators, counts = get_data_iterator(args, learner.policy, data, steps=steps)
    planned = time.monotonic()
    old = forward_only(log_probs_of, args, learner.policy, iterators, counts)
    initial = forward_only(
        log_probs_of, args, learner.reference, iterators, counts, store_prefix="ref_"
    )
    scored = time.monotonic()
    # Only the last stage has log-probabilities, and only its loss needs them.
    add_fields(iterators, _on_host(old | initial))

    spans: list[timeline.Span] = []
    taken = []
    for step in range(len(counts)):
        recorded = record and step == 0
        with timeline.record(learner.policy) if recorded else contextlib.nullcontext() as recorder:
            taken.append(_step(learner, args, iterators, counts, step, increment))
        if recorder is not None:
            spans = timeline.gather(recorder, _tokens_of_slots(iterators, step))
    return Update(
        iterators=iterators,
        steps=tuple(taken),
        statistics=_statistics(iterators),
        plan_seconds=planned - started,
        forward_only_seconds=scored - planned,
        spans=spans,
    )


def _step(
    learner: Learner,
    args: Any,
    iterators: list[DataIterator],
    counts: Sequence[int],
    step: int,
    increment: int | None,
) -> StepMetrics:
    """One optimizer step."""
    learning_rate = float(learner.optimizer.param_groups[0]["lr"])  # the step changes it
    before = time.monotonic()
    result = train_step(
        learner.objective,
        args,
        learner.policy,
        iterators,
        counts,
        learner.optimizer,
        learner.scheduler,
        step=step,
        increment=increment,
    )
    seconds = time.monotonic() - before
    return StepMetrics(
        **from_last_stage(result.metrics),
        grad_norm=result.grad_norm or 0.0,
        learning_rate=learning_rate,
        num_microbatches=result.num_microbatches,
        seconds=seconds,
    )


def from_last_stage(metrics: dict[str, float]) -> dict[str, float]:
    """A step's metrics, which only the last pipeline stage has, on every rank.

    A collective over all ranks.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, metrics)
    found: dict[str, float] = next(each for each in gathered if each)
    return found


def _statistics(iterators: Sequence[DataIterator]) -> StepStatistics:
    """Statistics of all steps together.

    The baseline, too, is measured by the flags' cap, which is the memory that it has.
    """
    schedule = schedule_of(iterators)
    first, *others = (
        step_statistics(*schedule.step_plan(step)) for step in range(len(schedule.steps))
    )
    for each in others:
        first += each
    return first


def _tokens_of_slots(iterators: Sequence[DataIterator], step: int) -> list[int]:
    schedule = schedule_of(iterators)
    return [
        tokens * size
        for tokens, size in zip(schedule.row_tokens(step), schedule.row_sizes(step), strict=True)
    ]


def _on_host(outputs: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {key: [value.cpu() for value in values] for key, values in outputs.items()}
