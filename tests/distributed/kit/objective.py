"""Functions of the logits that jobs give to the engine: the loss of most, and log-probs.

The loss is a policy term and a KL term by another mean.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

import mcore_batching.batch
import mcore_batching.megatron
from mcore_batching.batch import PackedMicroBatch, StepTotals, sample_mean, token_mean
from mcore_batching.megatron import response_log_probs

KL_WEIGHT = 0.3
_PAGE = Path(mcore_batching.megatron.__file__).with_name("README.md").read_text(encoding="utf-8")
OF_THE_PAGE = {
    name: code for code, name in re.findall(r"```python\n(# (\w+).*?)```", _PAGE, re.DOTALL)
}
"""Code of losses on the loop's page, by the first word."""
MEANS_OF_THE_PAGE = {"GSPO": "sample", "CISPO": "prompt", "PPO": "trajectory"}


def share_of_the_page(name: str, **values: Any) -> Tensor:
    """The `share` that a loss on the loop's page makes of these values."""
    space = {**vars(mcore_batching.batch), "torch": torch, **values}
    exec(OF_THE_PAGE[name], space)
    share: Tensor = space["share"]
    return share


def terms_by_hand(
    name: str, new: Tensor, old: Tensor, engine: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The terms of one sample's tokens of a loss on the loop's page, by its paper."""
    if name == "CISPO":
        return -torch.minimum(torch.exp(new - old), torch.tensor(5.0)).detach() * advantages * new
    low, high, weight = 0.8, 1.2, torch.minimum(torch.exp(old - engine), torch.tensor(2.0))
    ratio = torch.exp(new - old)
    if name == "GSPO":
        mean = (new - old)[mask != 0] @ mask[mask != 0] / (float(mask.sum()) or 1.0)
        low, high, weight, ratio = 0.9997, 1.0004, torch.ones(()), torch.exp(mean) + 0.0 * new
    # The lower of both objectives: clipped only where that lowers it.
    is_clipped = torch.where(advantages > 0, ratio > high, ratio < low)
    kept = torch.where(advantages > 0, high, low)
    return -weight * torch.where(is_clipped, kept, ratio) * advantages


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


def log_probs_of(logits: Tensor, *, micro_batch: PackedMicroBatch) -> dict[str, list[Tensor]]:
    """What the tests give to `forward_only`."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


def log_probs_by_lengths(
    logits: Tensor,
    *,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **unused: Any,
) -> dict[str, list[Tensor]]:
    """Log-probs of whole responses, of tokens found by lengths as slime's functions find them."""
    tokens = torch.cat(unconcat_tokens).to(logits.device)
    targets = tokens.new_zeros(logits.shape[:2])  # the row may end in padding
    targets[0, : len(tokens) - 1] = tokens[1:]
    row = -vocab_parallel_cross_entropy(logits.float().clone(), targets)[0]
    found, end = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        # Nothing predicts a sample's first token.
        whole = torch.cat((row.new_zeros(1), row[end - total : end - 1]))
        found.append(whole[total - response :])
    return {"log_probs": found}


def difference(ours: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    if not reference.numel():
        return 0.0
    return float((ours - reference).abs().max()) / (float(reference.abs().max()) or 1.0)
