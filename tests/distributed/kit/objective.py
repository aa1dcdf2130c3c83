"""The loss of the exactness tests: a policy term by token mean, a KL term by sample mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch, StepTotals, sample_mean, token_mean
from mcore_batching.megatron import response_log_probs

KL_WEIGHT = 0.3


def policy_terms(log_probs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """Importance-weighted policy gradient of each token."""
    return -(log_probs - behaviour).clamp(-5, 5).exp() * advantages


def kl_terms(log_probs: Tensor, reference: Tensor) -> Tensor:
    """The low-variance estimate of the KL divergence of each token."""
    return (reference - log_probs).exp() - (reference - log_probs) - 1


def packed_objective(
    logits: Tensor, row: PackedMicroBatch, totals: StepTotals
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as a user of the package writes it."""
    log_probs = response_log_probs(logits, row)
    policy = [
        policy_terms(*values)
        for values in zip(log_probs, row["rollout_log_probs"], row["advantages"], strict=True)
    ]
    kl = [kl_terms(*values) for values in zip(log_probs, row["ref_log_probs"], strict=True)]
    policy_share = token_mean(policy, row, totals)
    kl_share = sample_mean(kl, row, totals)
    return policy_share + KL_WEIGHT * kl_share, {"policy": policy_share, "kl": kl_share}


def plain_objective(log_probs: list[Tensor], samples: dict[str, list[Any]]) -> dict[str, Tensor]:
    """The same loss written down plainly, over all samples at once.

    A response that is the whole sample has no prediction for its first token.
    """
    policy_sum, num_tokens, kl_means = torch.zeros(()), 0.0, []
    for i, values in enumerate(log_probs):
        mask = samples["loss_masks"][i].float().clone()
        if samples["response_lengths"][i] == samples["total_lengths"][i]:
            mask[:1] = 0
        policy = policy_terms(values, samples["rollout_log_probs"][i], samples["advantages"][i])
        policy_sum = policy_sum + (policy * mask).sum()
        num_tokens += float(mask.sum())
        kl = kl_terms(values, samples["ref_log_probs"][i])
        kl_means.append((kl * mask).sum() / max(float(mask.sum()), 1.0))
    policy_mean = policy_sum / num_tokens
    kl_mean = torch.stack(kl_means).mean()
    return {"loss": policy_mean + KL_WEIGHT * kl_mean, "policy": policy_mean, "kl": kl_mean}
