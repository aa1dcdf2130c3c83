"""Statistics of a training step's plan over all ranks, each of which knows only its own part.

    figures = StepFigures(schedule)
    agreed = job.agree_after_pipeline("training", failed, figures.own, figures.says)
    figures.statistics(agreed)     # as `step_statistics` of the plan of all ranks

Each rank sends a few numbers, and one per micro-batch, as figures of the agreement that ends the
step anyway.
"""

from __future__ import annotations

from mcore_batching.batch.agreement.consensus import Agreement, Statement
from mcore_batching.batch.agreement.figures import Figure, largest, total
from mcore_batching.megatron.learning.cost_learning import predicted_seconds
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import StepStatistics, step_statistics
from mcore_batching.planning.plans.shard_statistics import joined_statistics, shard_statistics
from mcore_batching.planning.problem import Problem

_Figures = dict[str, Figure]


class StepFigures:
    """The figures of the one step of a schedule.

    Args:
        schedule: of the step.
        left_bytes: most that waited for weight gradients on this rank.

    Attributes:
        problem: this rank's samples, from `own` on.
    """

    problem: Problem

    def __init__(self, schedule: MicroBatchSchedule, left_bytes: int = 0) -> None:
        self._schedule, self._left_bytes = schedule, left_bytes

    def own(self) -> _Figures:
        """This rank's part."""
        schedule, micro_batches = self._schedule, self._schedule.steps[0]
        lengths = [int(length) for length in schedule.rollout_data["total_lengths"]]
        self.problem = Problem.of(lengths, schedule.dims, schedule.config, schedule.cost_model)
        figures = {
            "predicted seconds": largest(predicted_seconds(schedule, 0)),
            "left bytes": largest(self._left_bytes),
        }
        if schedule.plans:  # samples were exchanged, so every rank knows the plan of all
            return figures
        totals, maxima = shard_statistics(self.problem, micro_batches)
        figures |= {name: total(value) for name, value in totals.items()}
        return figures | {name: largest(value) for name, value in maxima.items()}

    def says(self, own: _Figures) -> Statement:
        """This rank's part in the agreement."""
        return Statement(figures=own)

    def statistics(self, agreed: Agreement[_Figures]) -> StepStatistics:
        """Of the plan over all ranks."""
        if self._schedule.plans:
            return step_statistics(*self._schedule.step_plan(0))
        return joined_statistics(self.problem, agreed.figures)

    def predicted_seconds(self, agreed: Agreement[_Figures]) -> float:
        """Of the slowest rank by learnt costs; 0 where there are none."""
        return float(agreed.figures["predicted seconds"])

    def left_bytes(self, agreed: Agreement[_Figures]) -> int:
        """Most that waited for weight gradients on any rank."""
        return int(agreed.figures["left bytes"])
