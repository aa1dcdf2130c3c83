"""From lengths to plans.

Any number of samples, zero included, gives a plan on any `ParallelDims`; too few samples never
raise. No sample is left out unless `last="drop"` asks for it, and then the plan lists it. The same
input gives the same plan everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.dynamic_cp import Sizes, packed_on_least_ranks
from mcore_batching.planning.errors import Argument, ConfigError, LengthError
from mcore_batching.planning.groups import LastStep, group_steps, padding_tags
from mcore_batching.planning.integers import at_least, entries
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import largest_first, place, split_until
from mcore_batching.planning.plan import MicroBatches, Plan, StepPlan
from mcore_batching.planning.problem import Problem, check_owners
from mcore_batching.planning.search import (
    Objective,
    Slots,
    check_inflight_tokens,
    search,
    search_dynamic,
)
from mcore_batching.planning.shard import (
    fill_shard,
    pack_shard,
    shard_ends,
    shard_outlook,
    soonest_counts,
    soonest_filling,
    worst_outlook,
)

MAX_SEARCHED_PASSES = 2 * 10**8
"""Samples of a step times `plan_effort`: some 130,000 samples at the default effort. A pass takes
about a microsecond, so that such a search ends within minutes."""


def plan_step(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    owners: Sequence[int] | None = None,
    forward_only: bool = False,
) -> StepPlan:
    """Plan one optimizer step.

    Without `owners` the plan is global: samples are packed together, split until every rank can
    have the same number of micro-batches, and spread evenly over ranks and slots. With `owners` it
    is local: every sample stays on the rank that holds it, each rank packs its own, and ranks with
    fewer micro-batches than the fullest one split theirs and then add placeholders.

    By default a search decides how many micro-batches there are, what is in them and in which order
    they run, so that the slowest rank's pipeline ends first (with expert parallelism: so that
    slots, each as slow as its slowest rank, do); where order takes no time the largest comes first.
    With `balance="cost"` or "tokens" packed micro-batches are spread evenly, in the order of
    descending weight; with "none" they keep the order of packing. A rank's last micro-batch is real
    if it has any sample.

    Args:
        lengths: total length of each sample [samples], in tokens; may be empty.
        dims: sizes of the parallel groups.
        config: cap and policies.
        cost_model: costs of samples and micro-batches; the default `CostModel()` if None.
        owners: the data-parallel rank that holds each sample [samples], or None.
        forward_only: plan for forward passes alone, as for old and reference log-probs.

    Raises:
        LengthError: a length or an owner is out of range.
        ConfigError: the cap leaves no room for a single token, or the search would take hours.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
        InflightBoundError: no plan was found that keeps to `max_inflight_tokens`.
    """
    plan = plan_batch(lengths, dims, config, cost_model, owners=owners, forward_only=forward_only)
    return plan.steps[0]


def plan_batch(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    owners: Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
    groups_per_step: int | None = None,
    last: LastStep = "keep",
    is_padding: Sequence[Any] | None = None,
    forward_only: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the steps of one batch: a number of samples each, a number of groups each, or one step.

    Args:
        lengths: total length of each sample of the batch [samples], in tokens; may be empty, which
            gives one step of placeholders.
        dims: sizes of the parallel groups.
        config: cap and policies.
        cost_model: costs of samples and micro-batches; the default `CostModel()` if None.
        samples_per_step: samples of each step over all ranks, in the order of `lengths`; the last
            step takes what is left. None makes one step of all.
        owners: as in `plan_step`.
        groups: the group (uid) of each sample [samples], with `groups_per_step`.
        groups_per_step: groups of each step over all ranks, as in `group_steps`; not together with
            `samples_per_step`.
        last: treatment of groups left over, as in `group_steps`; those dropped are listed in
            `Plan.dropped`.
        is_padding: which samples are padding samples, as in `group_steps`, with `groups`; they are
            in no step, and are listed as dropped.
        forward_only: as in `plan_step`.
        on_step: called after each step with the steps planned so far and all of them.

    Raises:
        As `plan_step`; LengthError also for `samples_per_step` below 1, for groups that
            `group_steps` refuses or that are not one per sample, for arguments that exclude each
            other, and if `last="drop"` leaves no step.
    """
    problem = Problem.of(lengths, dims, config, cost_model, forward_only=forward_only)
    if owners is not None:
        if config.max_context_parallel is not None:
            raise ConfigError(
                "samples that stay where they are cannot share ranks; leave ",
                Argument("owners"),
                " or ",
                Argument("max_context_parallel"),
                " out",
            )
        owners = check_owners(owners, problem.num_samples, dims.data_parallel)
    if groups is None and groups_per_step is None and last == "keep" and is_padding is None:
        samples_of_steps = _slices(problem.num_samples, samples_per_step)
    else:
        samples_of_steps = _whole_groups(
            problem.num_samples, groups, groups_per_step, last, is_padding, samples_per_step
        )
    _check_search(config, max(map(len, samples_of_steps)))
    steps: list[StepPlan] = []
    for samples in samples_of_steps:
        steps.append(_plan_samples(problem, samples, owners))
        if on_step is not None:
            on_step(len(steps), len(samples_of_steps))
    covered = {sample for step in steps for sample in step.sample_indices}
    dropped = tuple(sample for sample in range(problem.num_samples) if sample not in covered)
    return Plan(steps=tuple(steps), num_samples=problem.num_samples, dropped=dropped)


def _check_search(config: PlannerConfig, num_samples: int) -> None:
    if config.searches and num_samples * config.plan_effort > MAX_SEARCHED_PASSES:
        raise ConfigError(
            f"a search for {num_samples} samples in a step with ",
            Argument("plan_effort", config.plan_effort),
            f" may simulate at most {MAX_SEARCHED_PASSES} passes; decrease ",
            Argument("plan_effort"),
            f" to {MAX_SEARCHED_PASSES // num_samples}, set ",
            Argument("samples_per_step"),
            " lower, or ",
            Argument("balance", "cost"),
        )


def _slices(num_samples: int, samples_per_step: int | None) -> list[Sequence[int]]:
    per_step = max(1, num_samples)
    if samples_per_step is not None:
        per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
    return [
        range(first, min(first + per_step, num_samples))
        for first in range(0, max(1, num_samples), per_step)
    ]


def _whole_groups(
    num_samples: int,
    groups: Sequence[Hashable] | None,
    groups_per_step: int | None,
    last: LastStep,
    is_padding: Sequence[Any] | None,
    samples_per_step: int | None,
) -> list[Sequence[int]]:
    if samples_per_step is not None:
        raise LengthError(
            "steps are cut either by ",
            Argument("samples_per_step"),
            " or by ",
            Argument("groups"),
            " and ",
            Argument("groups_per_step"),
            ", got both; leave ",
            Argument("samples_per_step"),
            " out to keep the samples of a prompt together",
        )
    if groups is None or groups_per_step is None:
        absent = Argument("groups" if groups is None else "groups_per_step")
        raise LengthError(
            Argument("groups"),
            ", ",
            Argument("groups_per_step"),
            ", ",
            Argument("last"),
            " and ",
            Argument("is_padding"),
            " go together, but ",
            absent,
            " is not set; set ",
            absent,
            ", or none of them",
        )
    groups = entries("groups", groups, LengthError)
    if len(groups) != num_samples:
        raise LengthError(
            Argument("groups"),
            f" must name one group for each of the {num_samples} samples, got {len(groups)} "
            "entries; pass them in the order of lengths",
        )
    steps: list[Sequence[int]] = list(
        group_steps(groups, groups_per_step, last=last, is_padding=is_padding)
    )
    if not steps and not all(padding_tags(is_padding, num_samples)):
        raise LengthError(
            "the batch has fewer groups than ",
            Argument("groups_per_step", groups_per_step),
            ", so dropping those left over leaves no step at all; set ",
            Argument("last", "keep"),
            ", or decrease ",
            Argument("groups_per_step"),
        )
    return steps or [range(0)]


def _plan_samples(batch: Problem, samples: Sequence[int], owners: Sequence[int] | None) -> StepPlan:
    """The plan of one step.

    Args:
        batch: all samples of the batch.
        samples: those of the step, ascending.
        owners: the rank that holds each sample of the batch; None: samples may go to any rank.
    """
    sizes = None
    if owners is None and batch.config.max_context_parallel is not None:
        micro_batches, sizes = _plan_dynamic(batch.subset(samples))
        ranks = tuple(_renamed(rank, samples) for rank in micro_batches)
    elif owners is None:
        micro_batches = _plan_global(batch.subset(samples))
        ranks = tuple(_renamed(rank, samples) for rank in micro_batches)
    else:
        shards: list[list[int]] = [[] for _ in range(batch.dims.data_parallel)]
        for sample in samples:
            shards[owners[sample]].append(sample)
        local = _plan_local([batch.subset(shard) for shard in shards])
        ranks = tuple(_renamed(rank, shard) for rank, shard in zip(local, shards, strict=True))
    return StepPlan(
        micro_batches=ranks,
        num_microbatches=len(ranks[0]),
        sample_indices=tuple(samples),
        dims=batch.dims,
        config=batch.config,
        context_parallel=sizes,
        scope="global" if owners is None else "local",
        cost_model=batch.cost_model,
        forward_only=batch.forward_only,
    )


def _plan_global(problem: Problem) -> tuple[MicroBatches, ...]:
    dims = problem.dims
    together = dims.expert_parallel
    useful = -(-max(problem.num_samples, 1) // together) * together
    if dims.data_parallel > useful:  # no sample shares a rank, and the others have placeholders
        fewer = dataclasses.replace(problem, dims=dataclasses.replace(dims, data_parallel=useful))
        found = _plan_global(fewer)
        return *found, *(((),) * len(found[0]),) * (dims.data_parallel - useful)
    plain = _packed_and_placed(problem)
    if not problem.config.searches or not problem.num_samples:
        if problem.config.max_inflight_tokens is not None:
            # Refuses a plan that holds more.
            worst = worst_outlook(shard_outlook(problem, rank) for rank in plain)
            soonest_filling([worst], problem.config)
        return plain
    found = tuple(
        tuple(tuple(sorted(samples)) for samples in slots) for slots in _searched(problem, plain)
    )
    return largest_first(problem, found)


def _searched(problem: Problem, plain: tuple[MicroBatches, ...] | None = None) -> list[Slots]:
    """The step that the search finds, from what `_packed_and_placed` makes."""
    by_tokens = dataclasses.replace(problem.config, balance="tokens")
    in_order = dataclasses.replace(problem.config, packing="first-fit", balance="none")
    starts = (
        plain or _packed_and_placed(problem),
        *(
            _packed_and_placed(dataclasses.replace(problem, config=c))
            for c in (by_tokens, in_order)
        ),
    )
    return search(Objective(problem), starts)


def _plan_dynamic(problem: Problem) -> tuple[tuple[MicroBatches, ...], Sizes]:
    """Micro-batches of all ranks under dynamic CP, and their context-parallel sizes."""
    plain = packed_on_least_ranks(problem)
    if not problem.config.searches or not problem.num_samples:
        check_inflight_tokens(problem, plain)
        return plain
    found = search_dynamic(problem, plain, _searched)
    ranks = tuple(tuple(tuple(sorted(samples)) for samples in slots) for slots in found.ranks)
    return ranks, tuple(map(tuple, found.sizes or []))


def _packed_and_placed(problem: Problem) -> tuple[MicroBatches, ...]:
    """Micro-batches packed under the cap and spread over ranks, without a search."""
    bins = pack_shard(problem)
    ranks = problem.dims.data_parallel
    count = problem.dims.round_up_num_microbatches(-(-len(bins) // ranks))
    if problem.config.fill == "split":
        bins = split_until(bins, count * ranks, problem.weight)
    return place(problem, bins, count)


def _plan_local(shards: Sequence[Problem]) -> tuple[MicroBatches, ...]:
    """Every rank's micro-batches, made of its own samples, as many as the latest rank ends soonest
    with."""
    packed = [pack_shard(shard) for shard in shards]
    ends = [shard_ends(shard, bins) for shard, bins in zip(shards, packed, strict=True)]
    latest = [max(each) for each in zip(*ends, strict=True)]
    filled = [
        tuple(fill_shard(shard, bins, count) for shard, bins in zip(shards, packed, strict=True))
        for count in soonest_counts(latest, shards[0].dims, shards[0].config)
    ]
    outlooks = [
        worst_outlook(shard_outlook(shard, rank) for shard, rank in zip(shards, ranks, strict=True))
        for ranks in filled
    ]
    return filled[soonest_filling(outlooks, shards[0].config)]


def _renamed(rank: MicroBatches, samples: Sequence[int]) -> MicroBatches:
    """The same micro-batches with positions in `samples` replaced by the samples found there."""
    return tuple(tuple(samples[position] for position in samples_of) for samples_of in rank)
