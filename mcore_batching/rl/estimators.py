"""Advantages of trajectories, each from its reward and the others' of its group.

estimator            advantage of reward r among the n rewards of a group
grpo                 (r - mean) / (deviation + 1e-6), with n - 1 degrees of freedom
dr_grpo              r - mean
rloo                 r - mean of the n - 1 others
reinforce_baseline   r - mean; with normalisation over the step, that is REINFORCE++-baseline
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from mcore_batching.batch.errors import BatchError
from mcore_batching.rl.real_samples import indices_by_group

# Added to the divisor, as verl and SkyRL do by default. Doubled, it halves the advantages of groups
# whose rewards are all but equal, and changes nothing else.
_EPSILON = 1e-6


def outcome_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], estimator: str
) -> list[float]:
    """The advantage of each trajectory; 0 for one that is alone in its group.

    outcome_advantages([1, 0, 0], ["a", "a", "a"], "rloo")    [1.0, -0.5, -0.5]
    """
    advantages = [0.0] * len(rewards)
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise BatchError(
                f"reward {reward} of trajectory {index}, group {groups[index]!r}, is not finite; "
                "correct it, or drop the trajectory"
            )
    for indices in indices_by_group({"groups": groups}, "groups", range(len(rewards))).values():
        if len(indices) < 2:  # nothing to compare with
            continue
        found = ESTIMATORS[estimator]([rewards[index] for index in indices])
        for index, advantage in zip(indices, found, strict=True):
            advantages[index] = advantage
    return advantages


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
