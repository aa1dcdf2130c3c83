"""Statistics of a training step's plan over all ranks, each of which knows only its own part.

    agreed = job.agree_after_pipeline(
        "training", failed, lambda: own_figures(schedule, 0), lambda own: Statement(figures=own[1])
    )
    statistics_of(schedule, agreed)     # as `step_statistics` of the plan of all ranks

Each rank sends a few numbers, and one per micro-batch, as figures of the agreement that ends the
step anyway.
"""

from __future__ import annotations

from mcore_batching.batch.agreement.consensus import Agreement
from mcore_batching.batch.agreement.figures import Figure, largest, total
from mcore_batching.megatron.learning.cost_learning import predicted_seconds
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import StepStatistics, step_statistics
from mcore_batching.planning.plans.shard_statistics import joined_statistics, shard_statistics
from mcore_batching.planning.problem import Problem

PREDICTED_SECONDS = "predicted seconds"
"""Of the slowest rank by learnt costs; 0 where there are none."""
LEFT_BYTES = "left bytes"
"""Most that waited for weight gradients on any rank."""

OwnFigures = tuple[Problem, dict[str, Figure]]


def own_figures(schedule: MicroBatchSchedule, left_bytes: int) -> OwnFigures:
    """This rank's samples, and its part of the step's figures.

    Args:
        schedule: of the step.
        left_bytes: most that waited for weight gradients on this rank.
    """
    lengths = [int(length) for length in schedule.rollout_data["total_lengths"]]
    problem = Problem.of(lengths, schedule.dims, schedule.config, schedule.cost_model)
    figures = {
        PREDICTED_SECONDS: largest(predicted_seconds(schedule, 0)),
        LEFT_BYTES: largest(left_bytes),
    }
    if not schedule.plans:  # where samples were exchanged, every rank knows the plan of all
        totals, maxima = shard_statistics(problem, schedule.steps[0])
        figures |= {name: total(value) for name, value in totals.items()}
        figures |= {name: largest(value) for name, value in maxima.items()}
    return problem, figures


def statistics_of(schedule: MicroBatchSchedule, agreed: Agreement[OwnFigures]) -> StepStatistics:
    """Of the plan over all ranks."""
    if schedule.plans:
        return step_statistics(*schedule.step_plan(0))
    return joined_statistics(agreed.result[0], agreed.figures)
