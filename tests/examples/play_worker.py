"""What the processes of `test_play` run: the same games on many layouts, and a plain reference."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from batches import share_of_rank
from byte_tokens import VOCABULARY
from kit.model import named_parameters
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_model_config
from number_chain import NumberChain
from options import parse_arguments
from policy import build_policy_and_reference
from sampling import play, uniform
from trajectories import MAX_TOKENS, Trajectory

from mcore_batching.planning import ParallelDims

SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "max_sequence_length": MAX_TOKENS}


class LenientChain(NumberChain):
    """Goes on after wrong answers, so that an untrained policy plays more than a round."""

    def reply(self, answers: Any) -> str | None:
        """The next question until there is none."""
        played = len(answers)
        return None if played == len(self.changes) else self._question(played)


def games_of(num_prompts: int, seed: int) -> list[list[Trajectory]]:
    """Two trajectories a prompt; the rounds differ."""
    groups = []
    for index in range(num_prompts):
        group = [Trajectory.begin(f"{seed}/0/{index}", number) for number in range(2)]
        for each in group:
            each.game = LenientChain(**dataclasses.asdict(each.game))
        groups.append(group)
    return groups


def played(dims: dict[str, Any], weights: str, num_prompts: int, seed: int) -> dict[str, Any]:
    """What this rank holds after play.

    Args:
        dims: of the job.
        weights: file with the whole model's.
        num_prompts: over all ranks.
        seed: of games and tokens.
    """
    shape = ParallelDims(**dims)
    policy, _ = build_policy_and_reference(shape, seed=0, **SHAPE)
    whole = torch.load(weights, weights_only=True)
    with torch.no_grad():
        for name, parameter in named_parameters(policy):
            parameter.copy_(_part(whole[name].to(parameter.device), parameter))
    rank = parallel_state.get_data_parallel_rank()
    share = share_of_rank(games_of(num_prompts, seed), rank, shape.data_parallel)
    mine = [game for group in share for game in group]
    # A cap of a few games, so that a pass is several micro-batches.
    passes = play(mine, parse_arguments(["--online", "--max-tokens-per-gpu", "48"]), policy)
    return {
        "data_parallel_rank": rank,
        "passes": passes.count,
        "placeholders": passes.placeholders,
        "games": [_record(game) for game in mine],
    }


def reference(weights: str, num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """The same games on the first rank: Megatron's own layers, one game a forward pass.

    Args:
        weights: file to write the whole model's to, drawn at random.
        num_prompts: as in `played`.
        seed: as in `played`.

    Returns:
        the games, one after the other; nothing on other ranks.
    """
    dims = ParallelDims(data_parallel=dist.get_world_size())
    policy, _ = build_policy_and_reference(dims, seed=0, **SHAPE)
    if dist.get_rank() != 0:
        return []
    model = GPTModel(
        config=get_model_config(policy[0]),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(torch.device(torch.cuda.current_device()))
    parameters = dict(named_parameters([model]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() > 1:
                # Large enough that what is likely depends on the whole history.
                drawn = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(drawn.to(parameter.device))
    torch.save({name: each.detach().cpu() for name, each in parameters.items()}, Path(weights))
    games = [game for group in games_of(num_prompts, seed) for game in group]
    for game in games:
        while not game.is_over:
            game.play(*_plain_draw(model, game))
    return [_record(game) for game in games]


@torch.no_grad()
def _plain_draw(model: Any, game: Trajectory) -> tuple[int, float]:
    device = next(model.parameters()).device
    tokens = torch.tensor([game.tokens], device=device)
    length = tokens.shape[1]
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    logits = model(tokens, torch.arange(length, device=device)[None], future)
    probabilities = torch.softmax(logits[0, -1].double(), -1).tolist()
    left = uniform(f"{game.uid}/{game.number}/{length}")
    token = 0
    while left >= probabilities[token]:
        left -= probabilities[token]
        token += 1
    return token, math.log(probabilities[token])


def _part(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of a whole weight that this tensor-parallel rank holds."""
    if whole.shape == parameter.shape:
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size, parameter.partition_dim)[rank]


def _record(game: Trajectory) -> dict[str, Any]:
    assert game.is_over
    return {
        "game": [game.uid, game.number],
        "tokens": game.tokens,
        "turns": [[turn.start, turn.stop] for turn in game.turns],
        "log_probs": game.log_probs,
    }
