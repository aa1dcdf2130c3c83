"""The share of a step that planning, collating and the failure watch take, on real processes.

    python tests/benchmarks/bench_step_share.py [--rollouts]

Two data-parallel ranks of two pipeline stages; a small model, so the share is an upper bound for
any model that one would train. The denominator is one optimizer step with its forward-only pass.

With ``--rollouts`` of several steps instead: how long `get_data_iterator` takes, and how long the
second step then waits for its plan, where later steps are planned while the first runs, and where
they are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, results, run_jobs

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


def main() -> None:
    """Run the job and print a line a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=64, help="a step, over all ranks")
    parser.add_argument("--median-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rollouts", action="store_true")
    options = vars(parser.parse_args())
    if options.pop("rollouts"):
        rollouts()
        return
    job = Job(
        "step-share",
        "kit.timing:step_share",
        4,
        LAYOUT,
        {"dims": LAYOUT, **options},
        seconds=500.0,
    )
    outcome = ran(job)
    slowest = [
        {part: max(rank[repeat][part] for rank in outcome) for part in outcome[0][repeat]}
        for repeat in range(options["repeats"])
    ]
    medians = {part: statistics.median(times[part] for times in slowest) for part in slowest[0]}
    whole = medians["plan"] + medians["forward_only"] + medians["train_step"]
    print(f"{'part':<22}{'median ms':>11}{'share':>9}   (slowest rank, {options['repeats']} steps)")
    for part, seconds in medians.items():
        # Collation happens inside each pass, twice a step; it was timed once by itself.
        times = 2 if part == "collate" else 1
        print(f"{part:<22}{1e3 * seconds * times:>11.1f}{seconds * times / whole:>8.1%}")
    ratios = [times["train_step"] / times["train_step, unwatched"] for times in slowest]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a step over one without the failure watch: {middle:.4f} ({low:.4f} to {high:.4f})")


def rollouts() -> None:
    """A line a job and way: the call, and the wait at the second step, of three rollouts."""
    exchange, shared = {"dynamic_batch_exchange": True}, {"dynamic_batch_context_parallel": 2}
    for layout, planner, steps, a_step in (
        (LAYOUT, {}, 16, 128),
        (LAYOUT, exchange, 16, 512),
        (LAYOUT, shared, 4, 128),
        ({"pipeline_parallel": 4}, {}, 16, 64),
    ):
        name = " ".join(
            [*(f"{key}={value}" for key, value in layout.items()), *planner, f"{steps} x {a_step}"]
        )
        given = {"dims": layout, "planner": planner, "steps": steps, "a_step": a_step}
        given["first_step"] = 4.0
        job = Job("rollouts", "kit.timing:planned_rollouts", 4, layout, given, seconds=500.0)
        outcome = ran(job)
        for way in outcome[0]:
            ranks = [rank[way] for rank in outcome]
            slowest = [list(map(max, *each)) for each in zip(*ranks, strict=True)]
            calls, waits = (
                " ".join(f"{t:.2f}" for t in each) for each in zip(*slowest, strict=True)
            )
            print(f"{name}, {way}: calls {calls} s, waits {waits} s", flush=True)


def ran(job: Job) -> list[Any]:
    """What every rank of a job returned."""
    with tempfile.TemporaryDirectory() as scratch:
        return results(run_jobs([job], Path(scratch))[job.name])


if __name__ == "__main__":
    main()
