"""Learnt costs, kept with a stock script's checkpoints.

Megatron saves its arguments in every checkpoint, and hands them to one function when it loads it:
so what was learnt is one of them, and each checkpoint brings back what was known when it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.megatron.arguments import learns_cost_model
from mcore_batching.megatron.cost_learning import cost_learner
from mcore_batching.planning import StepPlan

_NAME = "dynamic_batch_learnt_costs"


def keep_learnt_costs(args: Any, plan: StepPlan, lengths: Sequence[int]) -> dict[str, float]:
    """Let the next checkpoint hold what was learnt.

    Args:
        args: Megatron's arguments.
        plan: of the step that has just run, over all data-parallel ranks.
        lengths: total length of each sample of the plan, in tokens.

    Returns:
        what to log of it; nothing where costs are not learnt.
    """
    if not learns_cost_model(args):
        return {}
    learner = cost_learner()
    if learner.learnt is None:
        return {}
    setattr(args, _NAME, learner.state_dict())
    rows = [[[lengths[i] for i in ids] for ids in rank] for rank in plan.micro_batches]
    predicted = [learner.learnt.predicted_seconds(rank, plan.dims) or 0.0 for rank in rows]
    return learner.statistics() | (
        {"predicted step seconds": max(predicted)} if any(predicted) else {}
    )


def with_learnt_costs(check_checkpoint_args: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's check of a checkpoint's arguments, which also takes over what was learnt."""

    @functools.wraps(check_checkpoint_args)
    def check_and_take_over(checkpoint_args: Any, *rest: Any, **options: Any) -> Any:
        checked = check_checkpoint_args(checkpoint_args, *rest, **options)
        cost_learner().load_state_dict(getattr(checkpoint_args, _NAME, {}))
        return checked

    return check_and_take_over
