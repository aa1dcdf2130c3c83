"""Advantages of trajectories, each from its reward and the others' of its group.

estimator            advantage of reward r among the n rewards of a group
grpo                 (r - mean) / (deviation + 1e-6), with n - 1 degrees of freedom
dr_grpo              r - mean
rloo                 r - mean of the n - 1 others
reinforce_baseline   r - mean; with normalisation over the step, that is REINFORCE++-baseline
opo                  r - mean weighted by the trajectories' lengths
maxrl                (r - mean) / (mean + 1e-6), of rewards of 0 or more
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.errors import Argument
from mcore_batching.rl.real_samples import indices_by_group

# Added to the divisor, as verl and SkyRL do by default. Doubled, it halves the advantages of groups
# whose rewards are all but equal, and changes nothing else.
_EPSILON = 1e-6


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
    for indices in indices_by_group({"groups": groups}, "groups", range(len(rewards))).values():
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
    # The baseline of least variance where a gradient's squared norm grows with the length.
    weighted = (reward * length for reward, length in zip(rewards, lengths, strict=True))
    baseline = math.fsum(weighted) / total
    return [reward - baseline for reward in rewards]


def _maxrl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    # Below 0 a mean would turn every sign, near 0 it would blow up rewards of both signs.
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
