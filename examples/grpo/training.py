"""The GRPO loop over recorded rollouts on this rank."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence

import timeline
import torch
from batches import groups_of_iteration, rollout_data, share_of_rank
from megatron.core import parallel_state
from metrics import IterationMetrics
from policy import build_policy_and_reference
from rollouts import Rollout
from update import Learner, update

from mcore_batching.planning import ParallelDims


def train(
    options: argparse.Namespace,
    dims: ParallelDims,
    groups: Sequence[list[Rollout]],
    *,
    one_sample_a_micro_batch: bool,
    on_iteration: Callable[[IterationMetrics], None],
) -> list[timeline.Span]:
    """Train a policy from its initial weights.

    A collective over all ranks.

    Args:
        options: the job's flags.
        dims: of the job.
        groups: all rollouts; every rank has read the whole file.
        one_sample_a_micro_batch: run the baseline.
        on_iteration: called with each iteration's metrics, on every rank.

    Returns:
        when each micro-batch of the last iteration's first step ran.
    """
    longest = max(len(rollout_data([group])["tokens"][0]) for group in groups)
    policy, reference = build_policy_and_reference(
        dims,
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        max_sequence_length=longest,
        hybrid_layer_pattern=options.hybrid_layer_pattern,
        seed=options.seed,
        dtype=getattr(torch, options.dtype),
    )
    chosen_groups = [
        groups_of_iteration(groups, iteration, options.prompts_per_iteration)
        for iteration in range(options.iterations)
    ]
    # Steps of samples count as the global batch size, the last of an iteration, too.
    samples_per_step = options.global_batch_size
    num_steps = sum(-(-sum(map(len, chosen)) // samples_per_step) for chosen in chosen_groups)
    learner = Learner.of(options, policy, reference, num_steps * samples_per_step)
    args = baseline_arguments(options) if one_sample_a_micro_batch else options
    spans: list[timeline.Span] = []
    for iteration, chosen in enumerate(chosen_groups):
        mine = share_of_rank(chosen, parallel_state.get_data_parallel_rank(), dims.data_parallel)
        done = update(learner, args, rollout_data(mine), record=iteration == options.iterations - 1)
        spans = done.spans
        rewards = [rollout.reward for group in chosen for rollout in group]
        on_iteration(
            IterationMetrics(
                iteration=iteration,
                reward=sum(rewards) / len(rewards),
                **done.figures(),
            )
        )
    return spans


def baseline_arguments(options: argparse.Namespace) -> argparse.Namespace:
    """The flags with one sample to each micro-batch, as they come; samples stay on their rank."""
    args = copy.copy(options)
    args.dynamic_batch_max_samples_per_row = 1
    args.dynamic_batch_packing, args.dynamic_batch_balance = "first-fit", "none"
    args.dynamic_batch_fill = "placeholder"
    args.dynamic_batch_exchange = False
    args.dynamic_batch_context_parallel = None
    args.dynamic_batch_forward_only_max_tokens_per_gpu = None
    args.dynamic_batch_share_prefixes = False
    return args
