"""The GRPO loop with games that the policy plays itself, on this rank."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import timeline
import torch
import torch.distributed as dist
from batches import share_of_rank
from megatron.core import parallel_state
from metrics import OnlineMetrics
from policy import build_policy_and_reference, copy_weights
from sampling import play
from trajectories import MAX_TOKENS, Trajectory, samples_of
from update import Learner, update
from warm_start import warm_start

from mcore_batching.megatron import DataIterator
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims, group_steps
from mcore_batching.rl import compute_advantages, sample_metrics


def train_online(
    options: argparse.Namespace,
    dims: ParallelDims,
    *,
    on_warm_start: Callable[[int, float], None],
    on_iteration: Callable[[OnlineMetrics], None],
) -> list[timeline.Span]:
    """Warm-start a policy, then let it play and learn.

    A collective over all ranks. The reference is the policy as the warm start leaves it.

    Args:
        options: the job's flags.
        on_warm_start: called after each warm-start step with its number and loss, on every rank.
        on_iteration: called with each iteration's metrics, on every rank.

    Returns:
        when each micro-batch of the last iteration's first step ran.
    """
    policy, reference = build_policy_and_reference(
        dims,
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        max_sequence_length=MAX_TOKENS,
        hybrid_layer_pattern=options.hybrid_layer_pattern,
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
    )
    # Untrained weights win no game, and a group of equal rewards teaches nothing.
    warm_start(options, policy, on_warm_start)
    copy_weights(policy, reference)
    # A step counts as the games of its prompts, not as the samples, which grow with the turns.
    games_per_step = options.groups_per_step * options.trajectories_per_prompt
    num_steps = options.iterations * -(-options.prompts_per_iteration // options.groups_per_step)
    learner = Learner.of(options, policy, reference, num_steps * games_per_step)
    spans: list[timeline.Span] = []
    for iteration in range(options.iterations):
        uids = uids_of_iteration(options, iteration)
        mine = share_of_rank(uids, parallel_state.get_data_parallel_rank(), dims.data_parallel)
        games, sampled = _played(options, policy, mine)
        data = _with_advantages(samples_of(games, step_wise=options.step_wise), options)
        done = update(
            learner,
            options,
            data,
            steps=steps_of_rank(data["uids"], uids, options.groups_per_step),
            increment=games_per_step,
            record=iteration == options.iterations - 1,
        )
        spans = done.spans
        on_iteration(
            OnlineMetrics(
                iteration=iteration,
                log_prob_gap=_log_prob_gap(done.iterators),
                **done.figures(),
                **sampled,
                **_over_all_ranks(games, len(uids) * options.trajectories_per_prompt),
            )
        )
    return spans


def _played(
    options: argparse.Namespace, policy: list[Any], uids: Sequence[str]
) -> tuple[list[Trajectory], dict[str, Any]]:
    """Games of these names, played to their ends; what `OnlineMetrics` tells of sampling."""
    games = [
        Trajectory.begin(uid, number)
        for uid in uids
        for number in range(options.trajectories_per_prompt)
    ]
    started = time.monotonic()
    passes = play(games, options, policy)
    return games, {
        "sampling_passes": passes.count,
        "sampling_placeholders": passes.placeholders,
        "sampling_seconds": time.monotonic() - started,
    }


def _with_advantages(
    data: dict[str, list[Any]], options: argparse.Namespace
) -> dict[str, list[Any]]:
    # Over all ranks: samples of a group need not be on one.
    group = parallel_state.get_data_parallel_group()
    made = compute_advantages(data, "grpo", step_wise=options.step_wise, group=group)
    return data | {"advantages": made}


def uids_of_iteration(options: argparse.Namespace, iteration: int) -> list[str]:
    """Names of the games that an iteration plays; no two iterations or seeds share one."""
    return [f"{options.seed}/{iteration}/{index}" for index in range(options.prompts_per_iteration)]


def steps_of_rank(
    uids: Sequence[Hashable], all_uids: Sequence[Hashable], groups_per_step: int
) -> list[list[int]]:
    """This rank's samples of each optimizer step, as `get_data_iterator` takes them.

    The number of steps follows from the groups alone, so it is the same on all ranks, whatever
    they hold and however many samples a group has.

    Args:
        uids: the group of each sample of this rank.
        all_uids: the groups of all ranks, each once.
        groups_per_step: over all ranks.
    """
    groups = [
        {all_uids[index] for index in members} for members in group_steps(all_uids, groups_per_step)
    ]
    return [[i for i, uid in enumerate(uids) if uid in members] for members in groups]


def _over_all_ranks(games: Sequence[Trajectory], num_games: int) -> dict[str, Any]:
    """Reward, turns and games won over all data-parallel ranks."""
    each = {
        "reward": [game.reward for game in games],
        "turns": [len(game.turns) for game in games],
        "won": [game.reward == 1.0 for game in games],
    }
    group = parallel_state.get_data_parallel_group()
    found = sample_metrics(each, ["reward", "turns", "won"], group=group)
    return {
        "games": num_games,
        "turns": round(num_games * found["turns/mean"]),
        "reward": found["reward/mean"],
        "games_won": round(num_games * found["won/mean"]),
    }


def _log_prob_gap(iterators: Sequence[DataIterator]) -> float:
    """Largest difference between a token's log-probability as it was drawn and as it is trained."""
    gap = torch.zeros(1, device=torch.device(torch.cuda.current_device()))
    if is_last_stage():
        data = iterators[0].rollout_data
        for drawn, old, mask in zip(
            data["rollout_log_probs"], data["log_probs"], data["loss_masks"], strict=True
        ):
            gap = torch.maximum(gap, ((drawn - old) * mask).abs().max().to(gap.device))
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return gap.item()
