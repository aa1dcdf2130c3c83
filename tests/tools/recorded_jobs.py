"""Jobs that write records, for the tests of records and of their replay."""

from __future__ import annotations

import random
from pathlib import Path

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.plans.records import StepRecorder

DIMS = ParallelDims(data_parallel=2, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=1000, balance="cost")
COSTS = CostModel(quadratic=1 / 3000, per_micro_batch=7.0)


def lengths_of(step: int, count: int = 24) -> list[int]:
    generator = random.Random(step)
    return [min(900, round(generator.lognormvariate(5, 1)) + 1) for _ in range(count)]


def recorded_job(directory: Path, seconds: list[float | None]) -> list[StepPlan]:
    """Record one step for each measured time."""
    recorder = StepRecorder(directory)
    plans = []
    for step, measured in enumerate(seconds):
        plans.append(plan_step(lengths_of(step), DIMS, CONFIG, COSTS))
        recorder.append(plans[-1], lengths_of(step), measured)
    recorder.close()
    return plans


def the_file(directory: Path) -> Path:
    (file,) = directory.glob("*.jsonl")
    return file
