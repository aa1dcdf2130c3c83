"""Loss curves and times of a dynamic run beside the baseline of one sample per micro-batch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from metrics import IterationMetrics

WARM_UP_ITERATIONS = 1
"""Left out of step times where there are more: the first iteration builds caches and buffers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Difference of two runs of the same job.

    Attributes:
        losses: of every optimizer step, dynamic run first.
        step_seconds: of every optimizer step, dynamic run first.
        largest_loss_difference: over the optimizer steps, absolute.
        largest_loss: over both runs, absolute: what the difference is to be measured by.
        median_step_seconds: after the warm-up, dynamic run first.
        median_forward_only_seconds: of an iteration, after the warm-up, dynamic run first.
    """

    losses: tuple[list[float], list[float]]
    step_seconds: tuple[list[float], list[float]]
    largest_loss_difference: float
    largest_loss: float
    median_step_seconds: tuple[float, float]
    median_forward_only_seconds: tuple[float, float]

    @property
    def step_ratio(self) -> float:
        """Baseline's step time over the dynamic run's: above 1, dynamic is faster."""
        return self.median_step_seconds[1] / self.median_step_seconds[0]

    @property
    def forward_only_ratio(self) -> float:
        """The same for the forward-only passes."""
        return self.median_forward_only_seconds[1] / self.median_forward_only_seconds[0]

    def __str__(self) -> str:
        dynamic, baseline = self.median_step_seconds
        return (
            f"largest difference in loss over {len(self.losses[0])} optimizer steps: "
            f"{self.largest_loss_difference:.1e} (largest loss {self.largest_loss:.1e})\n"
            f"median optimizer step: dynamic {dynamic:.3f} s, one sample per micro-batch "
            f"{baseline:.3f} s, ratio {self.step_ratio:.2f}\n"
            f"median forward-only passes of an iteration: ratio {self.forward_only_ratio:.2f}"
        )


def compare(
    dynamic: Sequence[IterationMetrics], baseline: Sequence[IterationMetrics]
) -> Comparison:
    """Compare two runs of the same job.

    Raises:
        ValueError: the runs did not take the same optimizer steps.
    """
    taken = [[(each.samples, len(each.steps)) for each in run] for run in (dynamic, baseline)]
    if taken[0] != taken[1]:
        raise ValueError(
            "the runs differ in their samples and optimizer steps an iteration: "
            f"{taken[0]} against {taken[1]}; run both with the same settings"
        )
    losses = _of_steps(dynamic, "loss"), _of_steps(baseline, "loss")
    return Comparison(
        losses=losses,
        step_seconds=(_of_steps(dynamic, "seconds"), _of_steps(baseline, "seconds")),
        largest_loss_difference=max(abs(a - b) for a, b in zip(*losses, strict=True)),
        largest_loss=max(abs(loss) for run in losses for loss in run),
        median_step_seconds=(
            statistics.median(_of_steps(_warm(dynamic), "seconds")),
            statistics.median(_of_steps(_warm(baseline), "seconds")),
        ),
        median_forward_only_seconds=(
            statistics.median(each.forward_only_seconds for each in _warm(dynamic)),
            statistics.median(each.forward_only_seconds for each in _warm(baseline)),
        ),
    )


def _warm(run: Sequence[IterationMetrics]) -> Sequence[IterationMetrics]:
    return run[WARM_UP_ITERATIONS:] or run


def _of_steps(run: Sequence[IterationMetrics], name: str) -> list[float]:
    return [getattr(step, name) for each in run for step in each.steps]
