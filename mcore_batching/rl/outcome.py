"""Advantages from outcomes: one reward a trajectory, compared with those of its group.

    outcome_advantages([1.0, 0.0, 0.0], ["a", "a", "a"], estimator="rloo")    [1.0, -0.5, -0.5]

    estimator            advantage of reward r among the n rewards of a group
    grpo                 (r - mean) / (deviation + 1e-6), with n - 1 degrees of freedom
    dr_grpo              r - mean
    rloo                 r - mean of the n - 1 others
    reinforce_baseline   r - mean; with normalisation over the step, that is REINFORCE++-baseline
    opo                  r - mean weighted by the trajectories' lengths

Guarantees
- A group's advantages depend on its own trajectories alone, whatever the order.
- A trajectory that is alone in its group is compared with nothing: its advantage is 0.
- A reward that is not finite is refused, since it would spoil the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.groups import group_key

EPSILON = 1e-6


def outcome_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    estimator: str = "grpo",
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """The advantage of each trajectory.

    Args:
        rewards: of each trajectory.
        groups: the group (uid) of each trajectory; every group whole.
        estimator: one of `OUTCOME_ESTIMATORS`.
        lengths: trained tokens of each trajectory, for "opo".

    Raises:
        BatchError: an unknown estimator, a reward that is not finite, not one group or length a
            trajectory, or no lengths for "opo".
        LengthError: a group is None or not hashable.
    """
    if estimator not in OUTCOME_ESTIMATORS:
        raise BatchError(
            f"unknown outcome estimator {estimator!r}; set estimator to one of "
            f"{', '.join(OUTCOME_ESTIMATORS)}"
        )
    if estimator == "opo" and lengths is None:
        raise BatchError("estimator='opo' weighs rewards by length; pass lengths")
    lengths = [1] * len(rewards) if lengths is None else lengths
    if not len(rewards) == len(groups) == len(lengths):
        raise BatchError(
            f"expected one group and one length for each of {len(rewards)} rewards, got "
            f"{len(groups)} groups and {len(lengths)} lengths"
        )
    members: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise BatchError(
                f"expected finite rewards, got {reward} for trajectory {index} of group {group!r}; "
                "correct the reward function, or leave the trajectory out"
            )
        members.setdefault(group_key(group, index), []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        if len(indices) < 2:
            continue
        found = OUTCOME_ESTIMATORS[estimator](
            [float(rewards[index]) for index in indices], [lengths[index] for index in indices]
        )
        for index, advantage in zip(indices, found, strict=True):
            advantages[index] = advantage
    return advantages


def _minus_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    del lengths
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    centered = _minus_mean(rewards, lengths)
    variance = math.fsum(each**2 for each in centered) / (len(rewards) - 1)
    return [each / (math.sqrt(variance) + EPSILON) for each in centered]


def _rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1), without the difference of large sums.
    count = len(rewards)
    return [each * count / (count - 1) for each in _minus_mean(rewards, lengths)]


def _opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    total = sum(lengths)
    if not total:
        return [0.0] * len(rewards)
    weighted = (reward * length for reward, length in zip(rewards, lengths, strict=True))
    baseline = math.fsum(weighted) / total
    return [reward - baseline for reward in rewards]


OUTCOME_ESTIMATORS: dict[str, Callable[[Sequence[float], Sequence[int]], list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": _minus_mean,
    "rloo": _rloo,
    "reinforce_baseline": _minus_mean,
    "opo": _opo,
}
"""What each makes of the rewards and lengths of a group of two or more."""
