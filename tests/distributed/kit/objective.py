"""Functions of the logits that jobs give to the engine: the loss of most, and log-probs.

The loss is a policy term and a KL term by another mean.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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


def positions_here(total_length: int) -> Tensor:
    """Where the tokens stand in their sample that this context-parallel rank has in slime's row."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1:
        return torch.arange(total_length)
    chunk = -(-total_length // (2 * size))
    chunks = ((n * chunk, (n + 1) * chunk) for n in (rank, 2 * size - 1 - rank))
    return torch.cat([torch.arange(*ends) for ends in chunks])


def log_probs_by_lengths(
    logits: Tensor,
    *,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **unused: Any,
) -> dict[str, list[Tensor]]:
    """Log-probs of whole responses, of tokens found by lengths as slime's functions find them."""
    here = [positions_here(total) for total in total_lengths]
    # Those whose next token is one of the sample's, and where they stand in this rank's row.
    known = [places + 1 < total for places, total in zip(here, total_lengths, strict=True)]
    starts = itertools.accumulate(map(len, here), initial=0)
    at = [start + each.nonzero()[:, 0] for start, each in zip(starts, known, strict=False)]
    following = [places[each] + 1 for places, each in zip(here, known, strict=True)]
    targets = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for tokens, places, each in zip(unconcat_tokens, at, following, strict=True):
        targets[0, places] = tokens[each]
    row = -vocab_parallel_cross_entropy(logits.float().clone(), targets)[0]
    found = []
    for total, response, places, each in zip(
        total_lengths, response_lengths, at, following, strict=True
    ):
        whole = row.new_zeros(total)
        whole[each] = row[places]
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        found.append(whole[total - response :])
    return {"log_probs": found}


def difference(ours: Tensor, reference: Tensor, whole: Tensor | None = None) -> float:
    """Largest difference, relative to the largest entry of the reference, or of ``whole``, of which
    the reference is a part."""
    if not reference.numel():
        return 0.0
    scale = float((reference if whole is None else whole).abs().max()) or 1.0
    return float((ours - reference).abs().max()) / scale
