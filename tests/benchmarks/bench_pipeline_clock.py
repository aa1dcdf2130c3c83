"""Predicted times of passes against recorded ones, on Megatron's own schedules.

    python tests/benchmarks/bench_pipeline_clock.py [--dynamic-cp] [--seconds-per-cost 0.1]

Every pass sleeps in proportion to its cost on top of a tiny model's work, so that a machine with
few cores keeps the clock of one with many. The simulation has the costs alone: what the schedules,
gloo and the tiny model add shows as error, a smaller one with more seconds per cost.

With --dynamic-cp whole training steps of the same samples, one nearly as long as the others
together, are planned with every row on one rank, and with dynamic CP. Recorded is the faster of two
steps, from the first pass to the last of all ranks.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from benchmark_cases import mean
from kit.harness import Job, results, run_jobs

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.schedule import Schedule
from mcore_batching.tools.report import Table

Layouts = dict[str, dict[str, int]]
LAYOUTS: Layouts = {
    "PP2": {"pipeline_parallel": 2},
    "PP4": {"pipeline_parallel": 4},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "PP4 VPP2": {"pipeline_parallel": 4, "virtual_pipeline": 2},
}
SHARED_LAYOUTS: Layouts = {
    "DP2 PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "DP2 PP2 VPP2": {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP4": {"data_parallel": 4},
}


def costs_of(dims: dict[str, int]) -> list[float]:
    """Costs between 1 and 6, as unequal as packed micro-batches of long-tailed samples."""
    generator = random.Random(7)
    count = ParallelDims(**dims).round_up_num_microbatches(3 * dims["pipeline_parallel"])
    return [round(1.0 + 5.0 * generator.random() ** 2, 2) for _ in range(count)]


def one_rank(name: str, dims: dict[str, int], seconds_per_cost: float) -> Iterator[tuple[str, ...]]:
    """The row of one rank's pipeline."""
    # Each model chunk sleeps the whole cost, so a stage's costs are those of all its chunks.
    chunks = dims.get("virtual_pipeline", 1)
    costs = costs_of(dims)
    parameters = {
        "dims": dims,
        "steps": [(costs, False)] * 2,
        "seconds_per_cost": seconds_per_cost,
    }
    stages = ran(name, "kit.operations:operations", dims["pipeline_parallel"], dims, parameters)
    schedule = Schedule(dims=ParallelDims(**dims))
    passes = Clock([chunks * cost for cost in costs], schedule).operations()
    expected = [each.end * seconds_per_cost for each in passes]
    # The second step: the first one warms up.
    until, recorded = ends_of([stage[1] for stage in stages])
    yield (name, str(len(costs)), *figures(max(expected), expected, until, recorded))


def shared(name: str, dims: dict[str, int], seconds_per_cost: float) -> Iterator[tuple[str, ...]]:
    """The rows of every plan of one layout, and how much sooner the second ends."""
    # A micro-batch costs hundreds of units there, and 1 to 6 in the other table.
    parameters = {"dims": dims, "seconds_per_unit": seconds_per_cost / 10, "repeats": 2}
    ranks = ran(name, "kit.operations:asleep", 4, dims, parameters)
    first: tuple[float, float] | None = None
    for plan in ranks[0]:
        clocks = [rank[plan] for rank in ranks]
        predicted = clocks[0]["predicted"]
        expected = [end for clock in clocks for end in clock["pass_ends"]]
        until, recorded = min(map(ends_of, zip(*(c["passes"] for c in clocks), strict=True)))
        sooner = f"{first[0] / predicted:.2f}; {first[1] / until:.2f}" if first else ""
        first = first or (predicted, until)
        sizes = " ".join(map(str, clocks[0]["sizes"]))
        yield (
            name,
            f"{plan} ({sizes})",
            *figures(predicted, expected, until, recorded),
            sooner,
        )


def figures(
    predicted: float, expected: Sequence[float], until: float, recorded: Sequence[float]
) -> tuple[str, ...]:
    """Predicted and recorded end, its error, and the mean error of a pass's end."""
    errors = [abs(r - e) / predicted for r, e in zip(recorded, expected, strict=True)]
    shown = f"{until / predicted - 1:+.1%}", f"{mean(errors):.1%}"
    return f"{predicted:.2f} s", f"{until:.2f} s", *shown


def ends_of(ranks: Sequence[Any]) -> tuple[float, list[float]]:
    """The end of the last rank, and of each pass of each rank, since the first began."""
    began = min(start for passes in ranks for *_, start, _ in passes)
    ends = [end - began for passes in ranks for *_, end in passes]
    return max(ends), ends


def ran(
    name: str, function: str, processes: int, dims: dict[str, int], parameters: dict[str, Any]
) -> list[Any]:
    """What every rank of a job returned."""
    name = name.replace(" ", "-").replace(",", "")
    job = Job(name, function, processes, dims, parameters, seconds=300.0)
    with tempfile.TemporaryDirectory() as scratch:
        return results(run_jobs([job], Path(scratch))[job.name])


def main() -> None:
    """Run every layout and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds-per-cost", type=float, default=0.02)
    parser.add_argument("--dynamic-cp", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="layouts that have it in the name"
    )
    options = parser.parse_args()
    layouts, row_of = (SHARED_LAYOUTS, shared) if options.dynamic_cp else (LAYOUTS, one_rank)
    rows = [
        row
        for name, dims in layouts.items()
        if options.only in name
        for row in row_of(name, dims, options.seconds_per_cost)
    ]
    columns: tuple[str, ...] = ("layout", "plan (sizes of rank 0's rows)", "predicted", "recorded")
    columns += ("error", "mean error of a pass's end", "sooner: predicted; recorded")
    if not options.dynamic_cp:
        columns = ("layout", "micro-batches", *columns[2:-1])
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
