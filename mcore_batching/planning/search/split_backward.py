"""Which backward passes of a step are split."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_batching.planning.pipeline import SplitClock, SplitStage
from mcore_batching.planning.problem import Problem

Splits = tuple[tuple[SplitStage, ...], ...]
"""As `StepPlan.split_backward`."""


def split_backward(problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]) -> Splits:
    """Split passes of a step's micro-batches.

    Args:
        problem: of the step.
        ranks: samples of each micro-batch [ranks][slots].
    """
    made: list[tuple[SplitStage, ...]] = []
    limit = most_tokens(problem, ranks)
    for together in problem.dims.lockstep_groups:
        clock = split_clock(problem, ranks[together.start : together.stop], limit)
        clock.run(clock.layout.all_split)
        made += [clock.stages] * len(together)
    return tuple(made)


def most_tokens(problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]) -> int:
    """Most tokens that a stage of any of these ranks may hold, counted once for each chunk."""
    config, chunks = problem.config, problem.dims.virtual_pipeline
    most = int(chunks * max(map(problem.inflight_tokens, ranks)))
    limit = int(config.split_backward_memory * most)
    if config.max_inflight_tokens is not None:
        limit = min(limit, max(most, chunks * config.max_inflight_tokens))
    return limit


def split_clock(
    problem: Problem, ranks: Sequence[Sequence[Sequence[int]]], limit: int
) -> SplitClock:
    """The clock of ranks that run together [ranks][slots], each held to a limit of tokens."""
    empty, kept = problem.placeholder_tokens, problem.config.split_backward_held
    slots = list(zip(*ranks, strict=True))
    # A slot takes as long as its costliest micro-batch, and may hold what its largest does.
    tokens = [max(problem.row_tokens(samples) or empty for samples in slot) for slot in slots]
    return SplitClock(
        [max(map(problem.cost, slot)) for slot in slots],
        [max(map(problem.weights, slot)) for slot in slots],
        problem.schedule,
        overhead=problem.cost_model.split_backward_overhead,
        tokens=tokens,
        deferred=[math.ceil(kept * each) for each in tokens],
        limit=limit,
    )
