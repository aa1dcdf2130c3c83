"""Sampling: the policy plays games, its tokens drawn from the Megatron model over the pipeline.

Every pass appends one token to each open game. There is no key-value cache: a pass runs the
histories anew, all open games of a rank packed together. The last stage draws, and tells the other
stages. Data-parallel ranks go on together until the last game of all is over; one whose own games
are over runs placeholders meanwhile.

A token is a function of the model's weights, the game and the seed: its random number comes from
the token's name, so that neither the parallel dims nor the other games on a rank change it. All
ranks of a replica hold the same games, token by token.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from byte_tokens import PADDING
from megatron.core import parallel_state
from torch import Tensor
from trajectories import Trajectory

from mcore_batching.batch import PackedMicroBatch, gather_response
from mcore_batching.megatron import (
    context_parallel_group,
    forward_only,
    get_data_iterator,
    schedule_of,
)


@dataclasses.dataclass
class Passes:
    """Forward passes in which games were played, the same numbers on every rank.

    Attributes:
        count: passes; each draws one token for every open game.
        placeholders: micro-batches without a game, over all passes and ranks.
    """

    count: int = 0
    placeholders: int = 0


def play(trajectories: Sequence[Trajectory], args: Any, policy: list[Any]) -> Passes:
    """Play games to their end.

    A collective over all ranks.

    Args:
        trajectories: this data-parallel rank's games, the same on all ranks of the replica; maybe
            none. They are played on in place.
        args: the flags of the engine.
        policy: this rank's model chunks.

    Returns:
        the passes that it took.
    """
    passes = Passes()
    while _on_any_rank(not each.is_over for each in trajectories):
        open_games = [each for each in trajectories if not each.is_over]
        passes.placeholders += _play_one_token(open_games, args, policy)
        passes.count += 1
    return passes


def uniform(name: str) -> float:
    """The random number of this name, from 0 up to, not including, 1."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def draw(logits: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of logits, as its random number says.

    Args:
        logits: ``[rows, vocabulary]``.
        uniforms: one per row, in [0, 1).

    Returns:
        int64 ``[rows]`` tokens; float64 ``[rows]``, their log-probabilities.
    """
    log_probs = torch.log_softmax(logits.double(), -1)
    ends = log_probs.exp().cumsum(-1)
    # Measured by what the probabilities really add up to, no token beyond the last can be drawn.
    at = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * ends[:, -1:]
    tokens = torch.searchsorted(ends, at, right=True)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]


def _play_one_token(open_games: list[Trajectory], args: Any, policy: list[Any]) -> int:
    """Draw one token for every open game; return the pass's placeholders over all ranks."""
    iterators, counts = get_data_iterator(
        args, policy, _histories(open_games), steps=[range(len(open_games))]
    )
    outputs = forward_only(_next_token_logits, args, policy, iterators, counts)
    if open_games:
        _share_and_play(open_games, outputs)
    plan, _ = schedule_of(iterators).step_plan(0)
    return sum(not micro_batch for rank in plan.micro_batches for micro_batch in rank)


def _share_and_play(open_games: list[Trajectory], outputs: dict[str, list[Tensor]]) -> None:
    """Draw on the last stage, tell the replica's other stages, and play the tokens on all.

    Args:
        open_games: of this rank, at least one.
        outputs: from `forward_only`; empty but on the last stage.
    """
    device = torch.device(torch.cuda.current_device())
    drawn = torch.empty(2, len(open_games), dtype=torch.float64, device=device)
    if outputs:
        logits = torch.cat(outputs["logits"])
        drawn[:] = torch.stack(draw(logits, [uniform(each.drawn) for each in open_games]))
    dist.broadcast(
        drawn,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    tokens, log_probs = drawn.tolist()
    for game, token, log_prob in zip(open_games, tokens, log_probs, strict=True):
        game.play(int(token), log_prob)


def _histories(open_games: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """One sample per game, its response the token to be drawn.

    A padding token stands there: the position that predicts it does not see it.
    """
    tokens = [torch.tensor([*game.tokens, PADDING]) for game in open_games]
    return {
        "tokens": tokens,
        "total_lengths": [len(each) for each in tokens],
        "response_lengths": [1] * len(tokens),
    }


def _next_token_logits(logits: Tensor, *, micro_batch: PackedMicroBatch) -> dict[str, list[Tensor]]:
    """Logits ``[1, vocabulary]`` of each sample's response token, for `forward_only`.

    Whole rows on every tensor- and context-parallel rank, so that all of them draw alike.
    """
    rows = gather_response(
        logits[0].float(), micro_batch, group=context_parallel_group(micro_batch)
    )
    own = torch.cat(rows)
    tensor = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(tensor.size())]
    dist.all_gather(parts, own, group=tensor)
    return {"logits": list(torch.split(torch.cat(parts, -1), 1))}


def _on_any_rank(flags: Any) -> bool:
    device = torch.device(torch.cuda.current_device())
    found = torch.tensor([int(any(flags))], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())
