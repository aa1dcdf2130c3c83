"""The share of a step that planning, collating and the failure watch take, on real processes.

    python tests/benchmarks/bench_step_share.py

Two data-parallel ranks of two pipeline stages; a small model, so the share is an upper bound for
any model that one would train. The denominator is one optimizer step with its forward-only pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, JobFailedError, run_jobs

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


def main() -> None:
    """Run the job and print a line a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=64, help="a step, over all ranks")
    parser.add_argument("--median-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = vars(parser.parse_args())
    job = Job(
        "step-share",
        "kit.timing:step_share",
        4,
        LAYOUT,
        {"dims": LAYOUT, **options},
        seconds=500.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        outcome = run_jobs([job], Path(scratch))[job.name]
    if isinstance(outcome, JobFailedError):
        raise outcome
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


if __name__ == "__main__":
    main()
