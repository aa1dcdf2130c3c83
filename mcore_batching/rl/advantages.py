"""Advantages of response tokens, from the rewards of the trajectories of each group.

    estimator            advantage of reward r among the n rewards of a group
    grpo                 (r - mean) / (deviation + 1e-6), with n - 1 degrees of freedom
    dr_grpo              r - mean
    rloo                 r - mean of the n - 1 others
    reinforce_baseline   r - mean; with normalization over the step: REINFORCE++-baseline

    trajectory_ids  [7, 7, 8]    uids  [a, a, a]    rewards  [0, 1, 0]
    loss_masks  [[1], [1, 0], [1]]
    compute_advantages(batch, "dr_grpo", step_wise=True)    [[0.5], [0.5, 0.0], [-0.5]]

With `step_wise` a sample is one turn of a trajectory, which counts once in its group; all of its
turns get its advantage, each through its own mask. Padding samples are in no group.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import BatchError, OrderError
from mcore_batching.batch.fields import checked_values, read_lengths
from mcore_batching.batch.schema import DEFAULT_SCHEMA
from mcore_batching.batch.values import read_indices
from mcore_batching.planning.errors import shortened
from mcore_batching.planning.integers import entries, require_choice
from mcore_batching.rl.real_samples import indices_by_group, numbers_of, real_indices

Outcome = Literal["last", "sum"]

_EPSILON = 1e-6
"""Added to a group's deviation, as verl and SkyRL do by default. Doubled, it halves the advantages
of groups with all but equal rewards, and changes nothing else."""
_LEAST_VARIANCE = 1e-8
"""Added to a step's variance, so that advantages that are all equal become 0."""


class SplitGroupError(BatchError):
    """Groups with samples on several ranks, so that none can compute their statistics."""


def compute_advantages(
    batch: Mapping[str, Any],
    estimator: str = "grpo",
    *,
    step_wise: bool = False,
    outcome: Outcome = "last",
    steps: Iterable[Iterable[int]] | None = None,
    normalize: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """The advantage of every response token. A collective over ``group``.

    Args:
        batch: field name to one value per sample: ``total_lengths``, ``response_lengths``,
            ``rewards``, ``uids``, ``trajectory_ids`` with ``step_wise``; optional ``loss_masks``,
            ``is_padding``.
        estimator: "grpo", "dr_grpo", "rloo" or "reinforce_baseline".
        step_wise: True if a sample is one turn; those of a group with one trajectory id are one
            trajectory.
        outcome: reward of a trajectory: of its "last" turn (by ``round_number`` if there is one,
            else in the batch), or the "sum" over its turns.
        steps: sample indices of each optimizer step, as from `group_steps`, the same number on
            every rank; None: all samples are one step.
        normalize: to mean 0 and variance 1 over the unmasked tokens of each step, on all ranks, 0.0
            for samples in no step; None: only under "reinforce_baseline".
        group: the data-parallel ranks; None for this process alone.

    Returns:
        float32 ``[response_length]`` for each sample, 0.0 where the mask is 0.

    Raises:
        BatchError: on every rank, if on any an argument or a field is wrong.
        SplitGroupError: a group has samples on several ranks.
    """
    normalize = estimator == "reinforce_baseline" if normalize is None else normalize

    with Consensus(group).agreement("computing advantages") as agree:
        agree.same("estimator", estimator)
        agree.same("step_wise", step_wise)
        agree.same("outcome", outcome)
        agree.same("normalize", normalize)
        mask, lengths, counts = _response_mask(batch)
        values = _advantages(batch, estimator, step_wise, outcome)
        members = _read_steps(steps, len(lengths))
        agree.same("number of steps", len(members))
        # All unmasked tokens of a sample have one value: statistics weigh it by their number.
        weighed = [[(values[i], counts[i]) for i in step] for step in members if normalize]
        sums = agree.sum("sums", [math.fsum(v * n for v, n in step) for step in weighed])
        totals = agree.sum("counts", [sum(n for _, n in step) for step in weighed])
        groups = indices_by_group(batch, "uids", real_indices(batch))
        # Uids travel to other ranks alone: those of a single process need not be picklable.
        uids = agree.every("uids", list(groups) if group is not None else [])
    _require_local(uids.by_rank)
    if normalize:
        filled = [max(total, 1) for total in totals.value]  # of none 0.0, never NaN
        means = [added / total for added, total in zip(sums.value, filled, strict=True)]
        # Inside an agreement, since ranks wait for each other here.
        with Consensus(group).agreement("normalizing") as agree:
            # From deviations: a difference of two large sums of squares would lose its digits.
            deviations = [
                math.fsum(n * (v - mean) ** 2 for v, n in step)
                for step, mean in zip(weighed, means, strict=True)
            ]
            squares = agree.sum("squares", deviations)
        raw, values = values, [0.0] * len(values)
        for step, mean, square, total in zip(members, means, squares.value, filled, strict=True):
            scale = (square / total + _LEAST_VARIANCE) ** -0.5
            for i in step:
                values[i] = (raw[i] - mean) * scale if counts[i] else 0.0
    of_samples = torch.tensor(values, dtype=torch.float32, device=mask.device)
    repeats = torch.tensor(lengths, device=mask.device, dtype=torch.int64)
    of_tokens = of_samples.repeat_interleave(repeats, output_size=len(mask)) * mask
    # Copies: a sample that is sent or kept by itself must not take all others along.
    return [part.clone() for part in torch.split(of_tokens, lengths)]


def _require_local(held: Mapping[int, Collection[Hashable]]) -> None:
    """Refuse a group that is on two ranks, given the groups of each rank."""
    # Each would compare a reward with only a part of its group. All compute this from the same
    # lists, and raise the same error.
    ranks_of: dict[Hashable, tuple[int, ...]] = {}
    for rank, groups in held.items():
        for each in groups:
            ranks_of[each] = (*ranks_of.get(each, ()), rank)
    split = {each: ranks for each, ranks in ranks_of.items() if len(ranks) > 1}
    if split:
        found = [f"{each!r:.60} on ranks {', '.join(map(str, split[each]))}" for each in split]
        raise SplitGroupError(
            f"groups are split: {shortened(found, 5, '; ')}; give a uid's samples to one rank, and "
            "set group to data-parallel ranks alone"
        )


def _read_steps(steps: Iterable[Iterable[int]] | None, num_samples: int) -> list[list[int]]:
    """Sample indices of each step, which are in one step at most."""
    if steps is None:
        return [list(range(num_samples))]
    read = [read_indices("steps", step) for step in entries("steps", steps, BatchError)]
    counts = Counter(index for step in read for index in step)
    wrong = sorted(i for i, count in counts.items() if count > 1 or not 0 <= i < num_samples)
    if wrong:
        raise OrderError(
            f"expected steps of indices below {num_samples}, each in one at most, got "
            f"{shortened(wrong)}; pass each step's own samples"
        )
    return read


def _response_mask(batch: Mapping[str, Any]) -> tuple[Tensor, list[int], list[int]]:
    """The mask of all samples' response tokens, bool ``[tokens]``; tokens of each sample's response
    [samples]; those of them that count, none of a padding sample [samples]."""
    totals, lengths = read_lengths(batch)
    given = batch.get("loss_masks")
    masks = [torch.ones(sum(lengths))]
    if given is not None:
        masks = checked_values(DEFAULT_SCHEMA["loss_masks"], given, totals, lengths)
    mask = torch.cat(masks or [torch.ones(0)]) != 0
    ends = torch.tensor([0, *itertools.accumulate(lengths)], device=mask.device)
    counts = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[ends].diff().tolist()
    real = set(real_indices(batch))  # a padding sample trains nothing, whatever its mask
    return mask, lengths, [count if i in real else 0 for i, count in enumerate(counts)]


def _advantages(
    batch: Mapping[str, Any], estimator: str, step_wise: bool, outcome: Outcome
) -> list[float]:
    """The advantage of each sample [samples], 0.0 of a padding sample."""
    if not (isinstance(estimator, str) and estimator in ESTIMATORS):
        raise BatchError(f"unknown estimator {estimator!r:.60}; set one of {', '.join(ESTIMATORS)}")
    require_choice("outcome", outcome, get_args(Outcome), BatchError)
    advantages = [0.0] * len(batch["total_lengths"])
    # By group first: some frameworks number the trajectories of each prompt from 0.
    for group, members in indices_by_group(batch, "uids", real_indices(batch)).items():
        trajectories = _trajectories(batch, members, step_wise)
        rewards = [_reward(batch, turns, outcome) for turns in trajectories]
        for reward, turns in zip(rewards, trajectories, strict=True):
            if not math.isfinite(reward):
                raise BatchError(
                    f"reward {reward} of the trajectory of sample {shortened(turns)}, group "
                    f"{group!r}, is not finite; correct it, or drop the trajectory"
                )
        if len(rewards) < 2:  # nothing to compare with
            continue
        for turns, advantage in zip(trajectories, ESTIMATORS[estimator](rewards), strict=True):
            for turn in turns:
                advantages[turn] = advantage
    return advantages


def _trajectories(
    batch: Mapping[str, Any], members: Sequence[int], step_wise: bool
) -> list[list[int]]:
    """The samples of each trajectory of a group [trajectories][turns]."""
    if not step_wise and batch.get("trajectory_ids") is None:
        return [[index] for index in members]
    found = indices_by_group(batch, "trajectory_ids", members)
    for trajectory, turns in found.items():
        if len(turns) > 1 and not step_wise:
            raise BatchError(
                f"trajectory {trajectory!r} has {len(turns)} samples ({shortened(turns)}); if "
                "a sample is one turn, set step_wise=True"
            )
    return list(found.values())


def _reward(batch: Mapping[str, Any], turns: Sequence[int], outcome: Outcome) -> float:
    if outcome == "sum":
        return sum(numbers_of(batch, "rewards", turns))
    last = turns[-1]
    # Batches may be shuffled: the number shows which turn came last, not the place.
    if batch.get("round_number") is not None:
        # Of equal numbers the last in the batch: where all are 0, none were numbered.
        last = max(zip(numbers_of(batch, "round_number", turns), turns, strict=True))[1]
    return numbers_of(batch, "rewards", [last])[0]


def _minus_mean(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)  # exact: the order of a group's samples is any
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float]) -> list[float]:
    centered = _minus_mean(rewards)
    variance = math.fsum(each**2 for each in centered) / (len(rewards) - 1)
    return [each / (math.sqrt(variance) + _EPSILON) for each in centered]


def _rloo(rewards: Sequence[float]) -> list[float]:
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1), without a difference of large sums.
    count = len(rewards)
    return [each * count / (count - 1) for each in _minus_mean(rewards)]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": _minus_mean,
    "rloo": _rloo,
    "reinforce_baseline": _minus_mean,
}
"""Advantages by the rewards of a group of two or more, by estimator."""
