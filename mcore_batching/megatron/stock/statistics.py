"""How a training step was packed, for Megatron's log line, TensorBoard and W&B."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_batching.planning import StepPlan, step_statistics

PREFIX = "batching/"


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


_last: StepNote | None = None


def note_step(
    plan: StepPlan, lengths: Sequence[int], *, plan_seconds: float, run_seconds: float
) -> None:
    """Remember the training step that has just run."""
    global _last
    _last = StepNote(plan, lengths, plan_seconds, run_seconds)


def last_step() -> StepNote | None:
    """The training step that ran last, None before the first."""
    return _last


def with_statistics(loss_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The losses of a step and how it was packed.

    Stock code prints every entry in its log line, averaged over the log interval, and writes it to
    TensorBoard and W&B.

    Args:
        loss_dict: as ``train_step`` returned it: empty but on the last pipeline stage.

    Returns:
        a copy with ``batching/...`` entries; the same where it is empty or nothing was packed.
    """
    if not loss_dict or _last is None:
        return dict(loss_dict)
    made = step_statistics(_last.plan, _last.lengths)
    values = {
        "fill": made.fill,
        "padding": made.padding,
        "micro-batches a rank": made.num_microbatches,
        "placeholders": made.num_placeholders,
        "rank balance": made.rank_balance,
        "slot balance": made.slot_balance,
        "plan seconds": _last.plan_seconds,
        "step seconds": _last.run_seconds,
    }
    device = next(iter(loss_dict.values())).device
    return dict(loss_dict) | {
        f"{PREFIX}{name}": torch.tensor([float(value)], device=device)
        for name, value in values.items()
    }
