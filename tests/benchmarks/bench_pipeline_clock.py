"""Predicted times of passes against recorded ones, on Megatron's own schedules.

    python tests/benchmarks/bench_pipeline_clock.py [--seconds-per-unit 0.002] [--only TEXT]

Training steps of the same samples, one nearly as long as the others together, planned with every
row on one rank, and with dynamic CP. Every pass sleeps in proportion to its cost on top of a tiny
model's work, so that a machine with few cores keeps the clock of one with many. The simulation has
the costs alone: what the schedules, gloo and the tiny model add shows as error, a smaller one with
more seconds per unit. Recorded is the faster of two steps, from the first pass to the last of all
ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from benchmark_cases import mean
from kit.harness import Job, results, run_jobs

from mcore_batching.tools.report import Table

LAYOUTS: dict[str, dict[str, int]] = {
    "DP2 PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "DP2 PP2 VPP2": {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP4": {"data_parallel": 4},
}


def rows_of(name: str, seconds_per_unit: float) -> Iterator[tuple[str, ...]]:
    """The rows of every plan of one layout, and how much sooner the second ends."""
    given = {"seconds_per_unit": seconds_per_unit, "repeats": 2}
    job = Job.of("asleep", "kit.operations:asleep", LAYOUTS[name], **given)
    job = replace(job, seconds=300.0)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = results(run_jobs([job], Path(scratch))[job.name])
    first: tuple[float, float] | None = None
    for plan in ranks[0]:
        clocks = [rank[plan] for rank in ranks]
        predicted = clocks[0]["predicted"]
        expected = [end for clock in clocks for end in clock["pass_ends"]]
        until, recorded = min(map(ends_of, zip(*(c["passes"] for c in clocks), strict=True)))
        errors = [abs(r - e) / predicted for r, e in zip(recorded, expected, strict=True)]
        sooner = f"{first[0] / predicted:.2f}; {first[1] / until:.2f}" if first else ""
        first = first or (predicted, until)
        sizes = " ".join(map(str, clocks[0]["sizes"]))
        yield (
            *(name, f"{plan} ({sizes})", f"{predicted:.2f} s", f"{until:.2f} s"),
            *(f"{until / predicted - 1:+.1%}", f"{mean(errors):.1%}", sooner),
        )


def ends_of(ranks: Sequence[Any]) -> tuple[float, list[float]]:
    """The end of the last rank, and of each pass of each rank, since the first began."""
    began = min(start for passes in ranks for *_, start, _ in passes)
    ends = [end - began for passes in ranks for *_, end in passes]
    return max(ends), ends


def main() -> None:
    """Run every layout and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds-per-unit", type=float, default=0.002)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="layouts that have it in the name"
    )
    options = parser.parse_args()
    chosen = [name for name in LAYOUTS if options.only in name]
    rows = [row for name in chosen for row in rows_of(name, options.seconds_per_unit)]
    columns = ("layout", "plan (sizes of rank 0's rows)", "predicted", "recorded", "error")
    columns += ("mean error of a pass's end", "sooner: predicted; recorded")
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
