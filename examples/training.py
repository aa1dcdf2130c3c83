"""The GRPO loop on this rank: plan, log-probabilities, optimizer steps."""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timeline
import torch.distributed as dist
from batches import groups_of_iteration, rollout_data, share_of_rank
from megatron.core import parallel_state
from metrics import IterationMetrics, StepMetrics
from objective import GRPOObjective, log_probs_of
from policy import build_adam, build_policy_and_reference
from rollouts import Rollout
from torch import Tensor

from mcore_batching.megatron import (
    DataIterator,
    add_fields,
    forward_only,
    get_data_iterator,
    train_step,
)
from mcore_batching.megatron.arguments import planner_config
from mcore_batching.planning import (
    Layout,
    StepPlan,
    StepStatistics,
    step_statistics,
)


def train(
    options: argparse.Namespace,
    layout: Layout,
    groups: Sequence[list[Rollout]],
    *,
    one_sample_a_micro_batch: bool,
    on_iteration: Callable[[IterationMetrics], None],
) -> list[timeline.Span]:
    """Train a policy from its initial weights.

    A collective over all ranks.

    Args:
        options: the job's flags.
        layout: of the job.
        groups: all rollouts; every rank has read the whole file.
        one_sample_a_micro_batch: run the baseline.
        on_iteration: called with each iteration's metrics, on every rank.

    Returns:
        when each micro-batch of the last iteration's first step ran.
    """
    longest = max(len(rollout_data([group])["tokens"][0]) for group in groups)
    policy, reference = build_policy_and_reference(
        layout,
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        max_sequence_length=longest,
        seed=options.seed,
    )
    optimizer = build_adam(policy, options.lr)
    objective = GRPOObjective(clip=options.clip, kl_coefficient=options.kl_coefficient)
    args = baseline_arguments(options) if one_sample_a_micro_batch else options
    spans: list[timeline.Span] = []
    for iteration in range(options.iterations):
        chosen = groups_of_iteration(groups, iteration, options.prompts_per_iteration)
        mine = share_of_rank(chosen, parallel_state.get_data_parallel_rank(), layout.data_parallel)
        data = rollout_data(mine)

        started = time.monotonic()
        iterators, counts = get_data_iterator(args, policy, data)
        planned = time.monotonic()
        old = forward_only(log_probs_of, args, policy, iterators, counts)
        initial = forward_only(
            log_probs_of, args, reference, iterators, counts, store_prefix="ref_"
        )
        scored = time.monotonic()
        # Only the last stage has log-probabilities, and only its loss needs them.
        add_fields(iterators, _on_host(old | initial))

        steps = []
        for step in range(len(counts)):
            recorded = iteration == options.iterations - 1 and step == 0
            before = time.monotonic()
            with timeline.record(policy) if recorded else contextlib.nullcontext() as recorder:
                result = train_step(
                    objective, args, policy, iterators, counts, optimizer, step=step
                )
            seconds = time.monotonic() - before
            if recorder is not None:
                spans = timeline.gather(recorder, _tokens_of_slots(iterators, step))
            steps.append(
                StepMetrics(
                    **_from_last_stage(result.metrics),
                    grad_norm=result.grad_norm or 0.0,
                    num_microbatches=result.num_microbatches,
                    seconds=seconds,
                )
            )
        statistics = iteration_statistics(options, layout, iterators)
        rewards = [rollout.reward for group in chosen for rollout in group]
        on_iteration(
            IterationMetrics(
                iteration=iteration,
                samples=statistics.num_samples,
                tokens=statistics.real_tokens,
                reward=sum(rewards) / len(rewards),
                num_microbatches=statistics.num_microbatches,
                placeholders=statistics.num_placeholders,
                fill=statistics.fill,
                padding=statistics.padding,
                rank_balance=statistics.rank_balance,
                plan_seconds=planned - started,
                forward_only_seconds=scored - planned,
                steps=tuple(steps),
            )
        )
    return spans


def baseline_arguments(options: argparse.Namespace) -> argparse.Namespace:
    """The flags with dynamic micro-batches turned off, and one sample to each."""
    args = copy.copy(options)
    args.use_dynamic_batch_size = False
    args.micro_batch_size = 1
    return args


def iteration_statistics(
    options: argparse.Namespace, layout: Layout, iterators: Sequence[DataIterator]
) -> StepStatistics:
    """How well the iteration's steps filled micro-batches and evened out ranks.

    A collective over data-parallel ranks. The baseline, too, is measured by the cap that the
    flags give, which is the memory it has.
    """
    schedule = iterators[0].schedule
    shards: list[Any] = [None] * layout.data_parallel
    dist.all_gather_object(
        shards,
        (schedule.rollout_data["total_lengths"], schedule.steps),
        group=parallel_state.get_data_parallel_group(),
    )
    lengths = [length for shard_lengths, _ in shards for length in shard_lengths]
    config = planner_config(options)
    all_statistics = []
    for step in range(len(schedule.steps)):
        micro_batches, first = [], 0
        for shard_lengths, steps in shards:
            micro_batches.append(tuple(tuple(first + i for i in ids) for ids in steps[step]))
            first += len(shard_lengths)
        plan = StepPlan(
            micro_batches=tuple(micro_batches),
            num_microbatches=len(schedule.steps[step]),
            sample_indices=tuple(sorted(i for rank in micro_batches for ids in rank for i in ids)),
            layout=layout,
            config=config,
            scope="local",
        )
        all_statistics.append(step_statistics(plan, lengths))
    total = all_statistics[0]
    for each in all_statistics[1:]:
        total += each
    return total


def _tokens_of_slots(iterators: Sequence[DataIterator], step: int) -> list[int]:
    schedule = iterators[0].schedule
    lengths = schedule.rollout_data["total_lengths"]
    return [sum(lengths[i] for i in micro_batch) for micro_batch in schedule.steps[step]]


def _on_host(outputs: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {key: [value.cpu() for value in values] for key, values in outputs.items()}


def _from_last_stage(metrics: dict[str, float]) -> dict[str, float]:
    """The step's metrics, which only the last pipeline stage has, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, metrics)
    found: dict[str, float] = next(each for each in gathered if each)
    return found
