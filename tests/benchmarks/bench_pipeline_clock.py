"""Predicted times of passes against recorded ones, on Megatron's own schedules.

    python tests/benchmarks/bench_pipeline_clock.py

Every pass sleeps in proportion to its cost on top of a tiny model's work, so that a machine with
few cores keeps the clock of one with many. The simulation is given the costs alone; what the
schedules, gloo and the tiny model add shows as error.

With ``--exchange-shapes`` neighbours exchange the shape of every tensor first and wait for each
other to do so, as Megatron does by itself: the simulation leaves that out.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, JobFailedError, run_jobs

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import pipeline_operations

LAYOUTS: dict[str, dict[str, int]] = {
    "PP2": {"pipeline_parallel": 2},
    "PP4": {"pipeline_parallel": 4},
    "PP2 x VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "PP4 x VPP2": {"pipeline_parallel": 4, "virtual_pipeline": 2},
}


def costs_of(dims: dict[str, int], seed: int) -> list[float]:
    """Costs between 1 and 6, as unequal as packed micro-batches of long-tailed samples."""
    generator = random.Random(seed)
    count = ParallelDims(**dims).round_up_num_microbatches(3 * dims["pipeline_parallel"])
    return [round(1.0 + 5.0 * generator.random() ** 2, 2) for _ in range(count)]


def main() -> None:
    """Run, compare, print a row a layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds-per-cost", type=float, default=0.02)
    parser.add_argument("--exchange-shapes", action="store_true")
    options = parser.parse_args()
    print(
        f"{'layout':<12}{'micro-batches':>14}{'predicted s':>13}{'recorded s':>12}"
        f"{'error':>9}{'mean error of a pass end':>26}"
    )
    for name, dims in LAYOUTS.items():
        # Each model chunk sleeps the whole cost, so a stage's costs are those of all its chunks.
        chunks = dims.get("virtual_pipeline", 1)
        costs = costs_of(dims, seed=7)
        job = Job(
            name.replace(" ", "-"),
            "kit.operations:operations",
            dims["pipeline_parallel"],
            dims,
            {
                "dims": dims,
                "steps": [(costs, False)] * 2,
                "seconds_per_cost": options.seconds_per_cost,
                "exchange_shapes": options.exchange_shapes,
            },
        )
        with tempfile.TemporaryDirectory() as scratch:
            outcome = run_jobs([job], Path(scratch))[job.name]
        if isinstance(outcome, JobFailedError):
            raise outcome
        predicted = pipeline_operations([chunks * cost for cost in costs], ParallelDims(**dims))
        report(name, costs, predicted, outcome, options.seconds_per_cost)


def report(
    name: str, costs: list[float], predicted: list[Any], outcome: list[Any], seconds: float
) -> None:
    """One row, of the second step: the first one warms up."""
    recorded = [end for stage in outcome for *_, end in stage[1]]
    expected = [operation.end * seconds for operation in predicted]
    errors = [abs(r - e) / max(expected) for r, e in zip(recorded, expected, strict=True)]
    last, until = max(expected), max(recorded)
    print(
        f"{name:<12}{len(costs):>14}{last:>13.3f}{until:>12.3f}{until / last - 1:>+9.1%}"
        f"{sum(errors) / len(errors):>26.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
