"""A stage's split backward passes of a step, and the parts of W that run before each pass."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state

from mcore_batching.flags import FLAGS
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.planning.pipeline import Schedule, SplitStage


def planned_split(job: Job, schedule: MicroBatchSchedule, step: int) -> tuple[SplitStage, ...]:
    """Split passes of each stage of this replica in a step; empty where no pass is split."""
    config, dims = schedule.config, schedule.dims
    if config.split_backward == "off":
        return ()
    reason = ""
    if dims.pipeline_parallel == 1:
        reason = "without pipeline stages: none waits for another"
    elif dims.in_lockstep and not schedule.plans:
        reason = (
            "with expert parallelism where each rank plans its own samples: the others would wait "
            f"for W that it runs; set {FLAGS['exchange']}"
        )
    if reason:
        flag = FLAGS["split_backward"]
        job.say_once(flag, f"{flag} has no effect {reason}")
        return ()
    if schedule.plans:  # of all ranks
        assert schedule.moves is not None
        planned = schedule.plans[step].plan.split_backward
        return planned[schedule.moves.own] if planned else ()
    return schedule.splits[step] if schedule.splits else ()


@dataclass
class LastStep:
    """Weight gradients that this rank left for later in the job's last training step, or None."""

    weights: WeightGradients | None = None


def most_left_bytes(job: Job) -> int:
    """Most that waited for weight gradients on this rank in the last training step."""
    weights = job.memory.only(LastStep).weights
    return 0 if weights is None else weights.peak_bytes


def deferred_weights(job: Job, prepared: PreparedStep) -> WeightGradients | None:
    """Weight gradients that this stage will leave for later in a step; None if it leaves none."""
    last = job.memory.only(LastStep)
    last.weights = None  # also where this step fails: a log is not to tell of an earlier one
    if prepared.split_backward:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = prepared.split_backward[rank]
        order = Schedule(dims=prepared.schedule.dims).order(rank, len(prepared.rows))
        if any(stage.split):
            last.weights = WeightGradients(order, stage)
    return last.weights
