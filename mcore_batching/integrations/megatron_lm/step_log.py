"""Statistics of a training step's plan, for Megatron's log line, TensorBoard and W&B.

    record_step(...)                    kept until stock code logs
    with_batching_statistics(losses)    the log's entries, which the README explains

A plan predicts units of cost, which are seconds where costs are learnt.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.timing import is_over, seconds_between
from mcore_batching.planning import step_statistics
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory

PREFIX = "batching/"
# Entries without --dynamic-batch-log-all.
LOGGED = ("micro-batches a rank", "fill", "padding", "time over floor", "plan seconds")

# Values of the training step that ran last.
_last_step: dict[str, float] = {}
# Marks of steps that have not been timed yet.
_unread: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=32)


def record_step(
    schedule: MicroBatchSchedule,
    shape: ModelShape,
    *,
    plan_seconds: float,
    run: tuple[Any, Any],
    truncated: int | None = None,
    log_all: bool = False,
) -> None:
    """Remember the training step that has just run: the schedule's only one.

    ``run`` are marks before and after all its passes, on this rank. ``truncated`` counts rows of
    ``--sft`` that were; None: other data.
    """
    # First, as the last step's time is among the values logged with this one.
    _read_times()
    plan, lengths = schedule.step_plan(0)
    made = step_statistics(plan, lengths)
    memory = predicted_memory(made, plan, shape)
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
        "activations GiB": memory.first_stage_bytes / 2**30,
        "logits GiB": memory.logit_bytes / 2**30,
    }
    # As they were known when the step was planned, in which times are predicted.
    learnt = schedule.settings.learnt
    if learnt is not None:
        values["quadratic cost"] = learnt.cost_model.quadratic
        values["micro-batch cost"] = learnt.cost_model.per_micro_batch
        if learnt.seconds_per_unit is not None and made.step_time:
            values["predicted step seconds"] = learnt.seconds_per_unit * made.step_time
    _last_step.clear()
    _last_step.update(values if log_all else {name: values[name] for name in LOGGED})
    if truncated is not None:
        _last_step["truncated"] = truncated
    _unread.append(run)


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
