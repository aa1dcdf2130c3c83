"""Advantages that pass from token to token, for trajectories that are one sequence each.

    token_rewards  [0, 0, 0, 1]    mask  [1, 1, 0, 1]    gamma 0.5
    discounted_returns             [0.25, 0.5, 0, 1]

Guarantees
- A token with a mask of 0 (an observation between turns) is no action: it has advantage and return
  0, takes no discount, and what comes after it reaches the actions before it.
- A reward on such a token is refused: no action would be credited for it at its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError


def last_token_rewards(rewards: Sequence[float], masks: Sequence[Tensor]) -> list[Tensor]:
    """Each sample's reward on its last token whose mask is not 0.

    Args:
        rewards: one a sample.
        masks: ``[response_length]`` each.

    Returns:
        float32 ``[response_length]`` each; all 0 for a sample that has no such token.
    """
    placed = []
    for reward, mask in zip(rewards, masks, strict=True):
        tokens = torch.zeros(mask.shape[0], dtype=torch.float32, device=mask.device)
        trained = mask.nonzero()
        if len(trained):
            tokens[trained[-1]] = float(reward)
        placed.append(tokens)
    return placed


def generalized_advantages(
    token_rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalized advantage estimation (Schulman et al., 2015) over each sample's actions.

    Args:
        token_rewards: ``[response_length]`` for each sample.
        values: of the state before each response token, ``[response_length]`` each; 0 after the
            last.
        masks: ``[response_length]`` each.
        gamma: discount an action.
        gae_lambda: weight of longer estimates.

    Returns:
        advantages and returns, float32 ``[response_length]`` for each sample.

    Raises:
        BatchError: a reward on a masked token, or tensors of different lengths.
    """
    advantages, returns = [], []
    for index, (reward, value, mask) in enumerate(zip(token_rewards, values, masks, strict=True)):
        actions = _actions(index, mask, reward, value)
        advantage = torch.zeros(mask.shape[0], dtype=torch.float32, device=mask.device)
        rewards_of, values_of = reward[actions].tolist(), value[actions].tolist()
        found = [0.0] * len(rewards_of)
        next_value = running = 0.0
        for step in range(len(found) - 1, -1, -1):
            delta = rewards_of[step] + gamma * next_value - values_of[step]
            running = delta + gamma * gae_lambda * running
            found[step], next_value = running, values_of[step]
        advantage[actions] = torch.tensor(found, device=mask.device)
        advantages.append(advantage)
        returns.append(torch.where(actions, advantage + value.detach().float(), 0.0))
    return advantages, returns


def discounted_returns(
    token_rewards: Sequence[Tensor], masks: Sequence[Tensor], *, gamma: float = 1.0
) -> list[Tensor]:
    """Discounted sum of the rewards from each action on: REINFORCE++ before normalisation.

    Args:
        token_rewards: ``[response_length]`` for each sample, KL penalties included.
        masks: ``[response_length]`` each.
        gamma: discount an action.

    Returns:
        float32 ``[response_length]`` for each sample.

    Raises:
        BatchError: a reward on a masked token, or tensors of different lengths.
    """
    # Without values the deltas are the rewards, and lambda 1 adds all of them up.
    zeros = [torch.zeros_like(reward) for reward in token_rewards]
    advantages, _ = generalized_advantages(token_rewards, zeros, masks, gamma=gamma, gae_lambda=1.0)
    return advantages


def _actions(index: int, mask: Tensor, reward: Tensor, value: Tensor) -> Tensor:
    if not mask.shape == reward.shape == value.shape:
        raise BatchError(
            f"sample {index}: expected rewards and values of shape {list(mask.shape)}, one a "
            f"response token, got {list(reward.shape)} and {list(value.shape)}"
        )
    actions = mask != 0
    if bool((reward[~actions] != 0).any()):
        raise BatchError(
            f"sample {index}: expected rewards on tokens whose loss mask is not 0, got one on "
            f"token {int((reward * ~actions).nonzero()[0])}; put it on the action before, as "
            "last_token_rewards does"
        )
    return actions
