"""Jobs that write records, for the tests of records and of their replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.plans.records import StepRecord, StepRecorder, read_records

DIMS = ParallelDims(data_parallel=2, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=1000, balance="cost")
COSTS = CostModel(quadratic=1 / 3000, per_micro_batch=7.0)


def lengths_of(step: int, count: int = 24) -> list[int]:
    generator = random.Random(step)
    return [min(900, round(generator.lognormvariate(5, 1)) + 1) for _ in range(count)]


def recorded(
    directory: Path, *steps: tuple[StepPlan, Sequence[int], float | None, float | None]
) -> list[StepRecord]:
    """Records, read back, of one job's plans, lengths, seconds, and seconds of a unit of cost."""
    recorder = StepRecorder(directory)
    for plan, lengths, seconds, unit in steps:
        recorder.append(plan, lengths, seconds, seconds_per_unit=unit)
    recorder.close()
    return read_records(directory)


def recorded_job(directory: Path, seconds: list[float | None]) -> list[StepPlan]:
    """Record one step for each measured time."""
    plans = [plan_step(lengths_of(step), DIMS, CONFIG, COSTS) for step in range(len(seconds))]
    recorded(directory, *((p, lengths_of(i), seconds[i], None) for i, p in enumerate(plans)))
    return plans


def the_file(directory: Path) -> Path:
    (file,) = directory.glob("*.jsonl")
    return file
