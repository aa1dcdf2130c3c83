"""What planning costs a training step: in line, in a thread, and in a process, while it trains.

    python tests/benchmarks/bench_plan_ahead.py [--samples 512] [--dp 8] [--pp 4] [--json OUT]

A training step is imitated by its host: one that launches kernels all the time (pure Python work),
and one that mostly waits for the device (a tenth of the work, the rest asleep). Both take about
`--step-seconds` by themselves. What is measured is the time from one step's begin to the next
one's, over `--steps` steps: on the clock, least and median, and on the processor for the training
thread alone, median. The plan is of log-normal lengths, anew for every step. The process needs a
core of its own: where others load the machine, clock times say more of them than of it, and the
least are the better ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_batching.planning import Layout, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.ahead import PlanAhead
from mcore_batching.report import Table, print_table

CAP = 16384
Arguments = tuple[list[int], Layout, PlannerConfig]


def launch(units: int) -> int:
    """Python work, as much as `units` say."""
    total = 0
    for number in range(units * 1000):
        total += number & 7
    return total


def units_for(seconds: float) -> int:
    """How much work takes that long on this processor."""
    started = time.thread_time()
    launch(2000)
    return max(1, round(2000 * seconds / (time.thread_time() - started)))


def host_bound(units: int, seconds: float) -> Callable[[], None]:
    """A step that works all the time."""

    def step() -> None:
        launch(units)

    return step


def device_bound(units: int, seconds: float) -> Callable[[], None]:
    """A step that works a tenth of its time and waits for the rest of it."""

    def step() -> None:
        ends = time.perf_counter() + seconds
        launch(units // 10)
        time.sleep(max(0.0, ends - time.perf_counter()))

    return step


def run(
    step: Callable[[], None], steps: list[Arguments], where: str
) -> tuple[list[float], list[float], list[StepPlan]]:
    """Clock and processor time of each step with its planning, and the plans.

    Args:
        step: the training step.
        steps: what to plan for each.
        where: "nowhere", "in line", "thread" or "process".
    """
    times, processor, plans = [], [], []
    with contextlib.ExitStack() as stack:
        ahead: PlanAhead[StepPlan] | None = None
        if where in ("thread", "process"):
            ahead = stack.enter_context(PlanAhead(plan_step, where=where))  # type: ignore[arg-type]
            ahead.start(*steps[0])
            plans.append(ahead.result())
        for index, arguments in enumerate(steps):
            started, processor_started = time.perf_counter(), time.thread_time()
            following = index + 1 < len(steps)
            if ahead is not None and following:
                ahead.start(*steps[index + 1])
            elif where == "in line":
                plans.append(plan_step(*arguments))
            step()
            if ahead is not None and following:
                plans.append(ahead.result())
            times.append(time.perf_counter() - started)
            processor.append(time.thread_time() - processor_started)
    # Nothing is planned during the last step.
    measured = slice(-1) if ahead is not None else slice(None)
    return times[measured], processor[measured], plans


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each kind of step and place of planning."""
    generator = random.Random(0)
    layout = Layout(data_parallel=options.dp, pipeline_parallel=options.pp)
    config = PlannerConfig(max_tokens_per_gpu=CAP)
    steps = [
        (
            [
                max(1, min(CAP, round(generator.lognormvariate(math.log(2048), 1))))
                for _ in range(options.samples)
            ],
            layout,
            config,
        )
        for _ in range(options.steps)
    ]
    units = units_for(options.step_seconds)
    records: list[dict[str, Any]] = []
    expected = [plan_step(*arguments) for arguments in steps]
    for kind, make in (("host-bound", host_bound), ("device-bound", device_bound)):
        step = make(units, options.step_seconds)
        alone: dict[str, float] = {}
        for where in ("nowhere", "in line", "thread", "process"):
            times, processor, plans = run(step, steps, where)
            if plans and plans != expected:
                raise RuntimeError(f"plans made in {where} differ: their times mean nothing")
            found = {
                "least_seconds": min(times),
                "median_seconds": statistics.median(times),
                "processor_seconds": statistics.median(processor),
            }
            alone = alone or found
            extra = {f"extra_{name}": found[name] - alone[name] for name in found}
            records.append({"step": kind, "planned": where, **found, **extra})
    return records


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the records here")
    options = parser.parse_args()
    records = measure(options)
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {options.samples} samples, DP{options.dp} x PP{options.pp}"
    )
    names = ("least_seconds", "median_seconds", "processor_seconds")
    rows = tuple(
        (
            record["step"],
            record["planned"],
            *(
                f"{1000 * record[name]:.0f} ms {1000 * record[f'extra_{name}']:+.0f}"
                for name in names
            ),
        )
        for record in records
    )
    columns = ("training step", "planned", "least", "median", "processor")
    print_table(Table(columns=columns, rows=rows), sys.stdout)
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
