"""The losses of the exactness tests: a policy term, with or without a KL term by another mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class Objective:
    """By which means the terms of a loss are taken; no KL term if `kl` is None."""

    policy: str
    kl: str | None = None


OBJECTIVES = {
    "token-mean": Objective("token"),
    "sample-mean": Objective("sample"),
    "trained-sample-mean": Objective("trained sample"),
    "token-mean-with-kl": Objective("token", kl="sample"),
    "sample-mean-with-kl": Objective("sample", kl="token"),
}
DEFAULT_OBJECTIVE = "token-mean-with-kl"

MEANS: dict[str, Callable[..., Tensor]] = {
    "token": token_mean,
    "sample": sample_mean,
    "trained sample": functools.partial(sample_mean, over_trained_samples=True),
}


def packed_objective(
    logits: Tensor, row: PackedMicroBatch, totals: StepTotals, name: str = DEFAULT_OBJECTIVE
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as a user of the package writes it."""
    objective = OBJECTIVES[name]
    log_probs = response_log_probs(logits, row)
    policy = [
        policy_terms(*values)
        for values in zip(log_probs, row["rollout_log_probs"], row["advantages"], strict=True)
    ]
    policy_share = MEANS[objective.policy](policy, row, totals)
    if objective.kl is None:
        return policy_share, {"policy": policy_share}
    kl = [kl_terms(*values) for values in zip(log_probs, row["ref_log_probs"], strict=True)]
    kl_share = MEANS[objective.kl](kl, row, totals)
    return policy_share + KL_WEIGHT * kl_share, {"policy": policy_share, "kl": kl_share}


def plain_objective(
    log_probs: list[Tensor], samples: dict[str, list[Any]], name: str = DEFAULT_OBJECTIVE
) -> dict[str, Tensor]:
    """The same loss written down plainly, over all samples at once, none of them padding.

    A response that is the whole sample has no prediction for its first token.
    """
    objective = OBJECTIVES[name]
    masks, policy, kl = [], [], []
    for i, values in enumerate(log_probs):
        mask = samples["loss_masks"][i].float().clone()
        if samples["response_lengths"][i] == samples["total_lengths"][i]:
            mask[:1] = 0
        masks.append(mask)
        policy.append(
            policy_terms(values, samples["rollout_log_probs"][i], samples["advantages"][i])
        )
        kl.append(kl_terms(values, samples["ref_log_probs"][i]))
    policy_mean = _plain_mean(objective.policy, policy, masks)
    if objective.kl is None:
        return {"loss": policy_mean, "policy": policy_mean}
    kl_mean = _plain_mean(objective.kl, kl, masks)
    return {"loss": policy_mean + KL_WEIGHT * kl_mean, "policy": policy_mean, "kl": kl_mean}


def _plain_mean(name: str, values: list[Tensor], masks: list[Tensor]) -> Tensor:
    sums = torch.stack([(value * mask).sum() for value, mask in zip(values, masks, strict=True)])
    counts = torch.stack([mask.sum() for mask in masks])
    if name == "token":
        return sums.sum() / counts.sum()
    means = sums / counts.clamp(min=1)
    return means.mean() if name == "sample" else means.sum() / (counts > 0).sum()
