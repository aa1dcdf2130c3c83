"""The GRPO objective: clipped policy loss and a KL term, both means over the step's tokens."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch, StepTotals, token_mean
from mcore_batching.megatron import response_log_probs, response_log_probs_and_entropy


def log_probs_of(logits: Tensor, *, micro_batch: PackedMicroBatch) -> dict[str, list[Tensor]]:
    """Log-probabilities of each sample's response tokens, for `forward_only`."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


@dataclasses.dataclass(frozen=True)
class GRPOObjective:
    """Loss function that `train_step` calls with each micro-batch's logits.

    The micro-batch carries ``log_probs`` (of the policy before the iteration's first update),
    ``ref_log_probs`` (of the initial policy) and ``advantages``, each ``[response_length]`` a
    sample.

    Attributes:
        clip: how far the ratio of new to old probability may count from 1.
        kl_coefficient: weight of the KL divergence to the reference policy.
    """

    clip: float
    kl_coefficient: float

    def __call__(
        self, logits: Tensor, row: PackedMicroBatch, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss, and its shares of the metrics."""
        log_probs, entropies = response_log_probs_and_entropy(logits, row)
        policy_loss, kl, clipped = [], [], []
        for new, old, reference, advantages in zip(
            log_probs,
            row["log_probs"],
            row["ref_log_probs"],
            row["advantages"],
            strict=True,
        ):
            ratio = (new - old).exp()
            bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
            policy_loss.append(-torch.minimum(ratio * advantages, bounded * advantages))
            # The low-variance estimate: never negative, its mean the KL divergence.
            kl.append((reference - new).exp() - (reference - new) - 1)
            clipped.append((bounded * advantages < ratio * advantages).float())
        policy_share = token_mean(policy_loss, row, totals)
        kl_share = token_mean(kl, row, totals)
        return policy_share + self.kl_coefficient * kl_share, {
            "policy_loss": policy_share,
            "kl": kl_share,
            "clipped": token_mean(clipped, row, totals),
            "entropy": token_mean(entropies, row, totals),
        }
