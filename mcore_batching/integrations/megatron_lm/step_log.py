"""Statistics of a training step's plan, for Megatron's log line, TensorBoard and W&B.

    record_step(...)                    kept until stock code logs
    with_batching_statistics(losses)    the log's entries, of which the README explains five

A plan predicts units of cost, which are seconds where costs are learnt.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from mcore_batching.megatron.timing import is_over, seconds_between
from mcore_batching.planning import StepStatistics
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.plans.memory import PredictedMemory

PREFIX = "batching/"
REMEMBERED_STEPS = 32
# Entries without --dynamic-batch-log-all.
LOGGED = ("micro-batches a rank", "fill", "padding", "time over floor", "plan seconds")

# Values of the training step that ran last.
_last_step: dict[str, float] = {}
# Marks of steps that have not been timed yet.
_unread: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=REMEMBERED_STEPS)


def record_step(
    made: StepStatistics,
    *,
    plan_seconds: float,
    run: tuple[Any, Any],
    memory: PredictedMemory | None = None,
    learnt: Mapping[str, float] | None = None,
    truncated: int | None = None,
    log_all: bool = False,
) -> None:
    """Remember the training step that has just run, of whose plan ``made`` are statistics.

    ``run`` are marks before and after all its passes, on this rank. ``learnt``: `learnt_entries`.
    ``truncated`` counts rows of ``--sft`` that were; None: other data.
    """
    # First, as the last step's time is among the values logged with this one.
    _read_times()
    values = {
        "fill": made.fill,
        "padding": made.padding,
        "micro-batches a rank": made.num_microbatches,
        "placeholders": made.num_placeholders,
        "samples over the cap": made.num_oversize,
        "rank balance": made.rank_balance,
        "slot balance": made.slot_balance,
        "time over floor": made.time_over_floor,
        "tokens in flight": made.peak_inflight_tokens,
        "plan seconds": plan_seconds,
        "step seconds": _last_step.get("step seconds", 0.0),
    }
    if memory is not None:
        values["activations GiB"] = memory.first_stage_bytes / 2**30
        values["logits GiB"] = memory.logit_bytes / 2**30
    values |= dict(learnt or {})
    _last_step.clear()
    _last_step.update(values if log_all else {name: values[name] for name in LOGGED})
    if truncated is not None:
        _last_step["truncated"] = truncated
    _unread.append(run)


def learnt_entries(learnt: LearntCosts | None, step_time: float) -> dict[str, float]:
    """Entries of costs as they were known when the step was planned; none where nothing was.

    Args:
        learnt: of the schedule.
        step_time: of the plan, in units of cost.
    """
    if learnt is None:
        return {}
    costs = learnt.cost_model
    entries = {"quadratic cost": costs.quadratic, "micro-batch cost": costs.per_micro_batch}
    if learnt.seconds_per_unit is not None and step_time:
        entries["predicted step seconds"] = learnt.seconds_per_unit * step_time
    return entries


def _read_times() -> None:
    """Read the times of steps that are over on the device, without waiting for it."""
    while _unread and is_over(_unread[0][1]):
        seconds = seconds_between(*_unread.popleft())
        if "step seconds" in _last_step:
            _last_step["step seconds"] = seconds


def with_batching_statistics(loss_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that ``train_step`` returned, with ``batching/...`` entries for stock code to log.

    A copy; without them if it is empty, as but on the last stage, or no step was packed.
    """
    if not loss_dict:
        return {}
    # By now the optimizer has most likely waited for the device; if not, it is of the step before.
    _read_times()
    device = next(iter(loss_dict.values())).device
    return dict(loss_dict) | {
        f"{PREFIX}{name}": torch.tensor([float(value)], device=device)
        for name, value in _last_step.items()
    }
