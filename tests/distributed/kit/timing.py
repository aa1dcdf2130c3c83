"""A job that times training steps on turns of trajectories, and rollouts of random lengths."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import torch
from bootstrap import build_model

from kit.exactness import arguments, counted_tokens
from kit.model import adam, named_parameters, transformer_config
from kit.samples import VOCABULARY
from mcore_batching.batch import sample_mean, token_mean
from mcore_batching.megatron import (
    get_data_iterator,
    response_log_probs,
    train_step,
)
from mcore_batching.planning import ParallelDims


def rollouts(num_samples: int, median_tokens: int, seed: int) -> dict[str, list[Any]]:
    """Random samples of log-normal length (σ 1), half of each a response."""
    generator = random.Random(seed)
    totals = [
        max(2, min(8 * median_tokens, round(median_tokens * generator.lognormvariate(0, 1))))
        for _ in range(num_samples)
    ]
    responses = [total // 2 for total in totals]
    return {
        "tokens": [torch.randint(VOCABULARY, (total,)) for total in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "advantages": [torch.rand(response) - 0.5 for response in responses],
        "rollout_log_probs": [torch.full((response,), -4.0) for response in responses],
        "ref_log_probs": [torch.full((response,), -4.0) for response in responses],
    }


def shared_prefixes(
    trajectories: list[list[tuple[int, int]]], max_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Training steps on turns apart, sharing tokens, and merged into a sample a trajectory.

    Args:
        trajectories: prompt and response tokens of each turn.
        max_tokens: of a micro-batch.
        repeats: of each step, in turns.

    Returns:
        by way ``samples``, ``tokens`` that the model got, ``micro_batches``, ``seconds`` of
        processor time of each step, and for the ``sample`` and the ``token`` mean how far the
        gradient is from that of turns apart, over its norm, and the cosine between the two.
    """
    model = build_model(
        transformer_config("dense", hidden_size=64, ffn_hidden_size=256),
        vocab_size=VOCABULARY,
        max_sequence_length=max_tokens,
    )
    before = [parameter.detach().clone() for _, parameter in named_parameters(model)]
    apart, merged = _turns(trajectories)
    ways = {"apart": (apart, False), "shared": (apart, True), "merged": (merged, False)}
    means = {"sample": sample_mean, "token": token_mean}
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
    gradients: dict[str, torch.Tensor] = {}
    for mean in ("token", *["sample"] * repeats):
        for way, (data, shares) in ways.items():
            args = arguments(
                ParallelDims(),
                max_tokens_per_gpu=max_tokens,
                dynamic_batch_share_prefixes=shares,
            )
            iterators, counts = get_data_iterator(args, model, data)
            optimizer = adam(model, distributed=False)
            loss = functools.partial(_policy_loss, mean=means[mean])
            with counted_tokens(model) as seen:
                started = time.process_time()
                done = train_step(loss, args, model, iterators, counts, optimizer)
                seconds = time.process_time() - started
            assert done.grad_norm is not None
            # Clipped to a norm of 1.
            flat = [parameter.main_grad.flatten() for _, parameter in named_parameters(model)]
            gradients[way] = torch.cat(flat) * max(1.0, done.grad_norm)
            with torch.no_grad():
                for (_, parameter), value in zip(named_parameters(model), before, strict=True):
                    parameter.copy_(value)
            own, reference = gradients[way], gradients["apart"]
            found[way] |= {
                mean: (
                    float((own - reference).norm() / reference.norm()),
                    float(torch.cosine_similarity(own, reference, dim=0)),
                ),
                "samples": len(data["tokens"]),
                "tokens": sum(seen),
                "micro_batches": counts[0],
            }
            if mean == "sample":
                found[way]["seconds"].append(seconds)
    return found


def _turns(trajectories: list[list[tuple[int, int]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples with random advantages, one for each turn; the same merged, one a trajectory."""
    names = ("tokens", "total_lengths", "response_lengths", "loss_masks", "advantages")
    apart, merged = ({name: [] for name in names} for _ in range(2))

    def add(data: dict[str, list[Any]], *values: Any) -> None:
        tokens, mask, advantages = values
        both = (tokens, len(tokens), len(mask), mask, advantages)
        for name, value in zip(names, both, strict=True):
            data[name].append(value)

    for turns in trajectories:
        whole = torch.randint(VOCABULARY, (max(map(sum, turns)),))
        first = turns[0][0]
        masks, advantages = torch.zeros(2, len(whole) - first)
        for prompt, response in turns:
            place = slice(prompt - first, prompt - first + response)
            masks[place], advantages[place] = 1.0, torch.rand(1) - 0.5
            end = prompt + response
            add(apart, whole[:end].clone(), masks[place].clone(), advantages[place].clone())
        add(merged, whole, masks, advantages)
    return apart, merged


def _policy_loss(logits: torch.Tensor, row: Any, totals: Any, mean: Any) -> Any:
    log_probs = response_log_probs(logits, row)
    values = [-a.to(p) * p for a, p in zip(row["advantages"], log_probs, strict=True)]
    return mean(values, row, totals), {}
