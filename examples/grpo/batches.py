"""Recorded rollouts as batches: groups of an iteration, each rank's share, the engine's fields.

Groups are dealt out whole, so that advantages need no other rank. Ranks may hold unequal shares, or
none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from byte_tokens import encode
from rollouts import Rollout

Group = TypeVar("Group")

ADVANTAGE_EPSILON = 1e-4


def groups_of_iteration(
    groups: Sequence[list[Rollout]], iteration: int, groups_per_iteration: int
) -> list[list[Rollout]]:
    """The groups that an iteration trains on.

    Args:
        groups: all groups of the file.
        iteration: number of the iteration, from 0.
        groups_per_iteration: how many it takes; the file is walked through in a circle.
    """
    first = iteration * groups_per_iteration
    return [groups[(first + i) % len(groups)] for i in range(groups_per_iteration)]


def share_of_rank(groups: Sequence[Group], rank: int, num_ranks: int) -> list[Group]:
    """The groups that data-parallel rank ``rank`` holds: every ``num_ranks``-th."""
    return list(groups[rank::num_ranks])


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward's distance from the group's mean in standard deviations (GRPO).

    All 0 for a group of equal rewards.
    """
    mean = statistics.fmean(rewards)
    deviation = statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + ADVANTAGE_EPSILON) for reward in rewards]


def rollout_data(groups: Sequence[list[Rollout]]) -> dict[str, list[Any]]:
    """The fields of a rank's samples, one value per sample; empty lists for no groups.

    Returns:
        ``tokens``, ``total_lengths``, ``response_lengths``, ``loss_masks``, ``rewards`` and
        ``advantages`` (the group's advantage at every response token).
    """
    samples = [rollout for group in groups for rollout in group]
    encoded = [encode(sample) for sample in samples]
    advantages = [
        advantage
        for group in groups
        for advantage in group_advantages([sample.reward for sample in group])
    ]
    return {
        "tokens": [sample.tokens for sample in encoded],
        "total_lengths": [len(sample.tokens) for sample in encoded],
        "response_lengths": [sample.response_length for sample in encoded],
        "loss_masks": [sample.loss_mask for sample in encoded],
        "rewards": [sample.reward for sample in samples],
        "advantages": [
            torch.full((sample.response_length,), advantage)
            for sample, advantage in zip(encoded, advantages, strict=True)
        ],
    }
