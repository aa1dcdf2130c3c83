"""A short supervised start: the policy imitates a scripted player who is often wrong.

It learns how an answer is written, and some of what is right; the rest is left to play.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from policy import build_adam
from torch import Tensor
from trajectories import samples_of, scripted_trajectory
from update import from_last_stage

from mcore_batching.batch import PackedMicroBatch, StepTotals, token_mean
from mcore_batching.megatron import get_data_iterator, response_log_probs, train_step

GAMES_PER_STEP = 128
SLIP = 0.3
"""Share of the scripted player's rounds that are answered wrongly."""


def imitation_loss(
    logits: Tensor, row: PackedMicroBatch, totals: StepTotals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Called by `train_step`: cross entropy, mean over the player's tokens of the step."""
    per_token = [-each for each in response_log_probs(logits, row)]
    return token_mean(per_token, row, totals), {}


def warm_start(
    options: argparse.Namespace,
    policy: list[Any],
    on_step: Callable[[int, float], None],
) -> None:
    """Train the policy for ``options.warm_start_steps`` steps, each on games of its own.

    A collective over all ranks.

    Args:
        options: the job's flags.
        policy: this rank's model chunks.
        on_step: called with the number of each step, from 1, and its loss in nats a token.
    """
    optimizer = build_adam(policy, options.warm_start_lr)
    rank = parallel_state.get_data_parallel_rank()
    num_ranks = parallel_state.get_data_parallel_world_size()
    for step in range(options.warm_start_steps):
        games = [
            scripted_trajectory(f"{options.seed}/warm start {step}/{index}", 0, SLIP)
            for index in range(rank, GAMES_PER_STEP, num_ranks)
        ]
        samples = samples_of(games, step_wise=False)
        iterators, counts = get_data_iterator(options, policy, samples, steps=[range(len(games))])
        result = train_step(imitation_loss, options, policy, iterators, counts, optimizer)
        on_step(step + 1, from_last_stage(result.metrics)["loss"])
