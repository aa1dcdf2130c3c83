"""Predicted times of passes against recorded ones, on Megatron's own schedules.

    python tests/benchmarks/bench_pipeline_clock.py [--dynamic-cp]

Every pass sleeps in proportion to its cost on top of a tiny model's work, so that a machine with
few cores keeps the clock of one with many. The simulation is given the costs alone; what the
schedules, gloo and the tiny model add shows as error.

With ``--exchange-shapes`` neighbours exchange the shape of every tensor first and wait for each
other to do so, as Megatron does by itself: the simulation leaves that out. What each pass takes
beside its sleep is a smaller share with a larger ``--seconds-per-cost``.

With ``--dynamic-cp`` whole training steps of the same samples, one of them as long as half of the
others together, are planned with every row on one rank, and with dynamic CP: the table has both,
and how much sooner the second ends, as predicted and as recorded. Recorded is the fastest of the
repeats, from the first pass to the last of all ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, results, run_jobs

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import Clock, Schedule

LAYOUTS: dict[str, dict[str, int]] = {
    "PP2": {"pipeline_parallel": 2},
    "PP4": {"pipeline_parallel": 4},
    "PP2 x VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "PP4 x VPP2": {"pipeline_parallel": 4, "virtual_pipeline": 2},
}
SLOW_LAST = "PP4, last 1.5"
"""A fourth stage of 1.5 times the mean's work on tokens, and as much on pairs of tokens."""

SHARED_LAYOUTS: dict[str, dict[str, int]] = {
    "DP2 x PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "DP2 x PP2 x VPP2": {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP4": {"data_parallel": 4},
    "DP2 x PP2 x EP2": {"data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
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
    parser.add_argument("--dynamic-cp", action="store_true")
    options = parser.parse_args()
    if options.dynamic_cp:
        dynamic_cp(options.seconds_per_cost)
    else:
        fixed_rows(options.seconds_per_cost, options.exchange_shapes)


def fixed_rows(seconds_per_cost: float, exchange_shapes: bool) -> None:
    """A table of one rank's rows on several pipelines."""
    print(
        f"{'layout':<12}{'micro-batches':>14}{'predicted s':>13}{'recorded s':>12}"
        f"{'error':>9}{'mean error of a pass end':>26}"
    )
    for name, dims in (*LAYOUTS.items(), (SLOW_LAST, LAYOUTS["PP4"])):
        # Each model chunk sleeps the whole cost, so a stage's costs are those of all its chunks.
        chunks = dims.get("virtual_pipeline", 1)
        costs, which = costs_of(dims, seed=7), []
        if name == SLOW_LAST:
            which, tokens = [[0], [0], [0], [1]], costs_of(dims, seed=8)
            costs = [
                (share * n + pairs) / 2
                for n, pairs in zip(tokens, costs, strict=True)
                for share in (2.5 / 3, 1.5)
            ]
        job = Job(
            name.replace(" ", "-").replace(",", ""),
            "kit.operations:operations",
            dims["pipeline_parallel"],
            dims,
            {
                "dims": dims,
                "steps": [(costs, False)] * 2,
                "seconds_per_cost": seconds_per_cost,
                "exchange_shapes": exchange_shapes,
                "which_cost": which,
            },
        )
        outcome = ran(job)
        schedule = Schedule(dims=ParallelDims(**dims), which_cost=tuple(map(tuple, which)))
        predicted = Clock([chunks * cost for cost in costs], schedule).operations()
        report(name, costs[:: 2 if which else 1], predicted, outcome, seconds_per_cost)


def dynamic_cp(seconds_per_cost: float) -> None:
    """A table of steps with every row on one rank, and with dynamic CP."""
    print(
        f"{'layout':<18}{'rows':<12}{'sizes on rank 0':<17}{'predicted s':>13}{'recorded s':>12}"
        f"{'error':>9}{'mean error of a pass end':>26}{'whole step s':>14}"
    )
    for name, dims in SHARED_LAYOUTS.items():
        job = Job(
            name.replace(" ", "-"),
            "kit.shared_clock:asleep",
            4,
            dims,
            # A micro-batch costs hundreds of units there, and 1 to 6 in the other table.
            {"dims": dims, "seconds_per_unit": seconds_per_cost / 10, "repeats": 2},
            seconds=300.0,
        )
        ranks = ran(job)
        first, *others = (report_steps(name, rows, [r[rows] for r in ranks]) for rows in ranks[0])
        for ends in others:
            predicted, recorded = (one / other for one, other in zip(first, ends, strict=True))
            print(f"{name:<18}sooner: {predicted:.2f} x predicted, {recorded:.2f} x recorded")


def report_steps(name: str, rows: str, clocks: list[Any]) -> tuple[float, float]:
    """One row of the table; predicted and recorded end of the step."""
    predicted = clocks[0]["predicted"]
    expected = [end for clock in clocks for end in clock["pass_ends"]]
    steps = zip(*(clock["passes"] for clock in clocks), strict=True)
    until, recorded = min(map(ends_of, steps))
    errors = [abs(r - e) / predicted for r, e in zip(recorded, expected, strict=True)]
    whole = min(max(seconds) for seconds in zip(*(c["step_seconds"] for c in clocks), strict=True))
    sizes = " ".join(map(str, clocks[0]["sizes"]))
    print(
        f"{name:<18}{rows:<12}{sizes:<17}{predicted:>13.3f}{until:>12.3f}"
        f"{until / predicted - 1:>+9.1%}{sum(errors) / len(errors):>26.1%}{whole:>14.3f}",
        flush=True,
    )
    return predicted, until


def ends_of(ranks: Sequence[Any]) -> tuple[float, list[float]]:
    """The end of the last rank, and of each pass of each rank, since the first began."""
    began = min(start for passes in ranks for *_, start, _ in passes)
    ends = [end - began for passes in ranks for *_, end in passes]
    return max(ends), ends


def ran(job: Job) -> list[Any]:
    """What every rank of a job returned."""
    with tempfile.TemporaryDirectory() as scratch:
        return results(run_jobs([job], Path(scratch))[job.name])


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
