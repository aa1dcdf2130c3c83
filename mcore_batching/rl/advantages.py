"""Advantages of response tokens, from the rewards of the trajectories of each group.

    trajectory_ids  [7, 7, 8]    uids  [a, a, a]    rewards  [0, 1, 0]
    loss_masks  [[1], [1, 0], [1]]
    compute_advantages(batch, "dr_grpo", step_wise=True)    [[0.5], [0.5, 0.0], [-0.5]]

    estimator            advantage of reward r among the n rewards of a group
    grpo                 (r - mean) / (deviation + 1e-6), with n - 1 degrees of freedom
    dr_grpo              r - mean
    rloo                 r - mean of the n - 1 others
    reinforce_baseline   r - mean; with normalisation over the step, that is REINFORCE++-baseline
    opo                  r - mean weighted by the trajectories' lengths
    maxrl                (r - mean) / (mean + 1e-6), of rewards of 0 or more

With `step_wise` a sample is one turn of a trajectory. A trajectory counts once in its group,
however many turns it has; all of its turns get its advantage, each through its own mask. Padding
samples are in no group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.agreement.consensus import Consensus, Statement
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.field_checks import (
    checked_values,
    num_samples,
    read_lengths,
    require_one_per_sample,
)
from mcore_batching.batch.fields.schema import DEFAULT_SCHEMA
from mcore_batching.batch.rows.select import step_batches
from mcore_batching.planning.errors import Argument, shortened
from mcore_batching.rl.group_locality import groups_held, require_local
from mcore_batching.rl.metrics import masked_zscore
from mcore_batching.rl.real_samples import as_numbers, indices_by_group, real_indices

Outcome = Literal["last", "sum"]

# Added to the divisor, as verl and SkyRL do by default. Doubled, it halves the advantages of groups
# whose rewards are all but equal, and changes nothing else.
_EPSILON = 1e-6
_TEMPORAL = ("gae", "reinforce_plus_plus", "reinforce++")  # known names that get their own error


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
        estimator: a name of the table above.
        step_wise: True if a sample is one turn of a trajectory.
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

    # All that can fail on one rank alone.
    def work() -> tuple[list[Tensor], list[dict[str, Any]], list[Hashable]]:
        _require_offered(estimator, step_wise)
        masks = _masks(batch)
        advantages = _advantages(batch, estimator, masks, step_wise, outcome)
        indices = range(len(masks))
        values = {"masks": masks, "advantages": advantages, "indices": list(indices)}
        parts = step_batches(values, [indices] if steps is None else steps)
        return advantages, parts, groups_held(batch) if group is not None else []

    # What fails on one rank is raised on all, before the collectives of the normalisation below.
    alike = {"estimator": estimator, "normalize": normalize}

    agreed = Consensus(group).agree(
        "computing advantages",
        work,
        lambda done: Statement(equal={**alike, "number of steps": len(done[1])}, tell=done[2]),
    )
    require_local(agreed.told)
    advantages, parts, _ = agreed.result
    return _normalized(advantages, parts, group) if normalize else advantages


def _normalized(
    advantages: Sequence[Tensor],
    parts: Sequence[Mapping[str, Any]],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Advantages of mean 0 and variance 1 in each step; a collective over ``group`` for each."""
    normalized = [torch.zeros_like(each) for each in advantages]
    for part in parts:
        scores = masked_zscore(part["advantages"], part["masks"], group=group)
        for index, score in zip(part["indices"], scores, strict=True):
            normalized[index] = score
    return normalized


def _require_offered(estimator: str, step_wise: bool) -> None:
    if not isinstance(estimator, str):
        raise BatchError(Argument("estimator"), f" must be a name, got {estimator!r:.60}")
    if estimator in ESTIMATORS:
        return
    reason = " is unknown"
    if estimator in _TEMPORAL and step_wise:
        reason = " needs rewards that with step_wise=True are in other samples"
    elif estimator in _TEMPORAL:
        reason = " compares no trajectories: use the framework's own"
    offered = f"; set one of {', '.join(ESTIMATORS)}"
    raise BatchError(Argument("estimator", estimator), reason, offered)


def _masks(batch: Mapping[str, Any]) -> list[Tensor]:
    """bool ``[response_length]`` for each sample, False throughout for a padding sample."""
    totals, responses = read_lengths(batch)
    given = batch.get("loss_masks")
    if given is None:
        masks = [torch.ones(length, dtype=torch.bool) for length in responses]
    else:
        found = checked_values(DEFAULT_SCHEMA["loss_masks"], given, totals, responses)
        masks = [mask != 0 for mask in found]
    real = set(real_indices(batch))  # a padding sample trains nothing, whatever its mask says
    return [mask if i in real else torch.zeros_like(mask) for i, mask in enumerate(masks)]


def _advantages(
    batch: Mapping[str, Any],
    estimator: str,
    masks: Sequence[Tensor],
    step_wise: bool,
    outcome: Outcome,
) -> list[Tensor]:
    uids = _values(batch, "uids")
    trajectories = _trajectories(batch, uids, step_wise)
    found = outcome_advantages(
        _outcomes(batch, trajectories, outcome),
        [uids[turns[0]] for turns in trajectories],
        [sum(int(masks[turn].sum()) for turn in turns) for turns in trajectories],
        estimator,
    )
    # Each turn gets the trajectory's advantage through its own mask.
    advantages = [torch.zeros_like(mask, dtype=torch.float32) for mask in masks]
    for turns, advantage in zip(trajectories, found, strict=True):
        for turn in turns:
            advantages[turn] = masks[turn].float() * advantage
    return advantages


def _trajectories(batch: Mapping[str, Any], uids: Any, step_wise: bool) -> list[list[int]]:
    """Indices of the real samples of each trajectory [trajectories][turns]."""
    real = real_indices(batch)
    if not step_wise and batch.get("trajectory_ids") is None:
        return [[index] for index in real]
    ids = _values(batch, "trajectory_ids")
    # By group first: some frameworks number the trajectories of each prompt from 0.
    trajectories = [
        (trajectory, turns)
        for members in indices_by_group(uids, real).values()
        for trajectory, turns in indices_by_group(ids, members).items()
    ]
    for trajectory, turns in trajectories:
        if len(turns) > 1 and not step_wise:
            raise BatchError(
                f"trajectory {trajectory!r} has {len(turns)} samples ({shortened(turns)}); if a "
                "sample is one turn, set ",
                Argument("step_wise", True),
            )
    return [turns for _, turns in trajectories]


def _outcomes(
    batch: Mapping[str, Any], trajectories: Sequence[Sequence[int]], outcome: Outcome
) -> list[float]:
    """The reward of each trajectory [trajectories]."""
    if not (isinstance(outcome, str) and outcome in ("last", "sum")):
        raise BatchError(Argument("outcome"), f" must be 'last' or 'sum', got {outcome!r:.60}")
    rewards = _values(batch, "rewards")
    if outcome == "sum":
        return [sum(as_numbers("rewards", rewards, turns)) for turns in trajectories]
    if batch.get("round_number") is None:
        return as_numbers("rewards", rewards, [turns[-1] for turns in trajectories])
    # Batches may be shuffled: the number says which turn came last, not the place.
    rounds = _values(batch, "round_number")
    last = []
    for turns in trajectories:
        numbers = as_numbers("round_number", rounds, turns)
        last.append(max(zip(numbers, turns, strict=True), key=lambda each: each[0])[1])
    return as_numbers("rewards", rewards, last)


def _values(batch: Mapping[str, Any], name: str) -> Any:
    values = batch.get(name)
    require_one_per_sample(name, values, num_samples(batch), ", to compute advantages from")
    return values


def outcome_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], lengths: Sequence[int], estimator: str
) -> list[float]:
    """The advantage of each trajectory; 0 for one that is alone in its group.

    outcome_advantages([1, 0, 0], ["a", "a", "a"], [1, 1, 1], "rloo")    [1.0, -0.5, -0.5]
    """
    advantages = [0.0] * len(rewards)
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise BatchError(
                f"reward {reward} of trajectory {index}, group {groups[index]!r}, is not finite; "
                "correct it, or drop the trajectory"
            )
    for indices in indices_by_group(groups, range(len(rewards))).values():
        if len(indices) < 2:  # nothing to compare with
            continue
        found = ESTIMATORS[estimator](
            [rewards[index] for index in indices], [lengths[index] for index in indices]
        )
        for index, advantage in zip(indices, found, strict=True):
            advantages[index] = advantage
    return advantages


def _minus_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    del lengths
    mean = math.fsum(rewards) / len(rewards)  # exact: the order of a group's samples is any
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    centered = _minus_mean(rewards, lengths)
    variance = math.fsum(each**2 for each in centered) / (len(rewards) - 1)
    return [each / (math.sqrt(variance) + _EPSILON) for each in centered]


def _rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1), without a difference of large sums.
    count = len(rewards)
    return [each * count / (count - 1) for each in _minus_mean(rewards, lengths)]


def _opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    total = sum(lengths)
    if not total:  # nothing is trained in this group
        return [0.0] * len(rewards)
    weighted = (reward * length for reward, length in zip(rewards, lengths, strict=True))
    baseline = math.fsum(weighted) / total
    return [reward - baseline for reward in rewards]


def _maxrl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    if min(rewards) < 0:
        raise BatchError(
            Argument("estimator", "maxrl"),
            f" needs rewards of 0 or more, got {min(rewards)}; correct the rewards, or set ",
            Argument("estimator", "grpo"),
        )
    mean = math.fsum(rewards) / len(rewards)
    return [each / (mean + _EPSILON) for each in _minus_mean(rewards, lengths)]


ESTIMATORS: dict[str, Callable[[Sequence[float], Sequence[int]], list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": _minus_mean,
    "rloo": _rloo,
    "reinforce_baseline": _minus_mean,
    "opo": _opo,
    "maxrl": _maxrl,
}
"""Advantages by the rewards and lengths of a group of two or more, by estimator."""
