"""How a training step was packed, for Megatron's log line, TensorBoard and W&B.

The planner predicts times in units of cost. What a unit takes in seconds is the median over the
steps before; the first two steps have no prediction.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_batching.planning import StepPlan, StepStatistics, step_statistics

PREFIX = "batching/"
REMEMBERED_STEPS = 32


@dataclasses.dataclass(frozen=True)
class StepNote:
    """One training step.

    Attributes:
        plan: over all data-parallel ranks.
        lengths: that the plan refers to, in tokens.
        plan_seconds: reading, planning and collating, on this rank.
        run_seconds: all forward and backward passes, on this rank.
    """

    plan: StepPlan
    lengths: Sequence[int]
    plan_seconds: float
    run_seconds: float


@dataclasses.dataclass
class _History:
    """The last step, and how long a unit of cost took in those before."""

    last: StepNote | None = None
    made: StepStatistics | None = None
    predicted_seconds: float | None = None
    seconds_a_unit: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=REMEMBERED_STEPS)
    )


_history = _History()


def note_step(
    plan: StepPlan, lengths: Sequence[int], *, plan_seconds: float, run_seconds: float
) -> None:
    """Remember the training step that has just run.

    Args:
        plan: over all data-parallel ranks.
        lengths: that the plan refers to, in tokens.
        plan_seconds: reading, planning and collating, on this rank.
        run_seconds: all forward and backward passes, on this rank.
    """
    made = step_statistics(plan, lengths)
    _history.last = StepNote(plan, lengths, plan_seconds, run_seconds)
    _history.made = made
    units = _history.seconds_a_unit
    # Stock code averages the first two steps in one log line, and both must have every entry.
    known = len(units) >= 2
    _history.predicted_seconds = statistics.median(units) * made.step_time if known else None
    if made.step_time:
        units.append(run_seconds / made.step_time)


def last_step() -> StepNote | None:
    """The training step that ran last, None before the first."""
    return _history.last


def with_statistics(loss_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The losses of a step and how it was packed.

    Stock code prints every entry in its log line, averaged over the log interval, and writes it to
    TensorBoard and W&B.

    Args:
        loss_dict: as ``train_step`` returned it: empty but on the last pipeline stage.

    Returns:
        a copy with ``batching/...`` entries; the same where it is empty or nothing was packed.
    """
    last, made = _history.last, _history.made
    if not loss_dict or last is None or made is None:
        return dict(loss_dict)
    values = {
        "fill": made.fill,
        "padding": made.padding,
        "micro-batches a rank": made.num_microbatches,
        "placeholders": made.num_placeholders,
        "rank balance": made.rank_balance,
        "slot balance": made.slot_balance,
        "time over floor": made.time_over_floor,
        "plan seconds": last.plan_seconds,
        "step seconds": last.run_seconds,
    }
    if _history.predicted_seconds is not None:
        values["predicted step seconds"] = _history.predicted_seconds
    device = next(iter(loss_dict.values())).device
    return dict(loss_dict) | {
        f"{PREFIX}{name}": torch.tensor([float(value)], device=device)
        for name, value in values.items()
    }
