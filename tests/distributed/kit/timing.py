"""A job that times training steps on turns of trajectories, each by itself and sharing tokens."""

from __future__ import annotations

import time
from typing import Any

import torch
from bootstrap import build_model

from kit.exactness import arguments, counted_tokens
from kit.model import adam, named_parameters, transformer_config
from kit.samples import VOCABULARY
from mcore_batching.batch import token_mean
from mcore_batching.megatron import get_data_iterator, response_log_probs, train_step
from mcore_batching.planning import ParallelDims


def shared_prefixes(
    trajectories: list[list[tuple[int, int]]], max_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Training steps on turns apart and sharing tokens, from the same weights.

    Args:
        trajectories: prompt and response tokens of each turn.
        max_tokens: of a micro-batch.
        repeats: of each step, in turns.

    Returns:
        by way ``samples``, ``tokens`` that the model got, ``micro_batches``, ``seconds`` of
        processor time of each step, and the ``norm`` of the gradient.
    """
    model = build_model(
        transformer_config("dense", hidden_size=64, ffn_hidden_size=256),
        vocab_size=VOCABULARY,
        max_sequence_length=max_tokens,
    )
    before = [parameter.detach().clone() for _, parameter in named_parameters(model)]
    data = _turns(trajectories)
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ("apart", "shared")}
    for way in [*found] * repeats:
        args = arguments(
            ParallelDims(),
            max_tokens_per_gpu=max_tokens,
            dynamic_batch_share_prefixes=way == "shared",
        )
        planned = get_data_iterator(args, model, data)
        optimizer = adam(model, distributed=False)
        with counted_tokens(model) as seen:
            started = time.process_time()
            done = train_step(_policy_loss, args, model, *planned, optimizer)
            found[way]["seconds"].append(time.process_time() - started)
        with torch.no_grad():
            for (_, parameter), value in zip(named_parameters(model), before, strict=True):
                parameter.copy_(value)
        found[way] |= {
            "norm": done.grad_norm,
            "samples": len(data["tokens"]),
            "tokens": sum(seen),
            "micro_batches": planned[1][0],
        }
    return found


def _turns(trajectories: list[list[tuple[int, int]]]) -> dict[str, list[Any]]:
    """A sample for each turn, each beginning the next, with random advantages."""
    made: list[tuple[torch.Tensor, int]] = []
    for turns in trajectories:
        whole = torch.randint(VOCABULARY, (max(map(sum, turns)),))
        made += [(whole[: sum(turn)].clone(), turn[1]) for turn in turns]
    return {
        "tokens": [tokens for tokens, _ in made],
        "total_lengths": [len(tokens) for tokens, _ in made],
        "response_lengths": [response for _, response in made],
        "advantages": [torch.full((response,), float(torch.rand(1))) for _, response in made],
    }


def _policy_loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
    log_probs = response_log_probs(logits, row)
    values = [-a.to(p) * p for a, p in zip(row["advantages"], log_probs, strict=True)]
    return token_mean(values, row, totals), {}
