"""The loss of most jobs, a policy term and a KL term by another mean, and what it is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


MEANS: dict[str, Callable[..., Tensor]] = {
    "token": token_mean,
    "sample": sample_mean,
    "trained sample": functools.partial(sample_mean, over_trained_samples=True),
}


def packed_objective(
    logits: Tensor, row: PackedMicroBatch, totals: StepTotals
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as a user of the package writes it: policy by token mean, KL by sample mean."""
    log_probs = response_log_probs(logits, row)
    behaviour = zip(log_probs, row["rollout_log_probs"], row["advantages"], strict=True)
    policy = token_mean([policy_terms(*values) for values in behaviour], row, totals)
    terms = [kl_terms(*values) for values in zip(log_probs, row["ref_log_probs"], strict=True)]
    kl = sample_mean(terms, row, totals)
    return policy + KL_WEIGHT * kl, {"policy": policy, "kl": kl}
