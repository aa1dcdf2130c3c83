"""Does a long job hold on to ever more? Memory, descriptors, threads and caches over many steps.

    python tests/benchmarks/bench_soak.py [--steps 10000] [--minutes 600] [--json OUT]

Two data-parallel ranks of two pipeline stages train a tiny model, each step on new random samples,
none on some ranks in some steps, with a forward-only pass every fifth step. Every rank looks every
--every steps at what it holds, after a garbage collection and with the allocator's free memory
given back. The first fifth of the steps is warm-up. What follows is judged by its Theil-Sen slope,
the median of the slopes between all pairs of looks, which a few outliers do not move. The exit
status is 1 if any rank's growth over those steps is above the bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, JobFailedError, run_jobs

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}
WARM_UP = 0.2
BOUNDS = {
    # A field kept of each step would be 100 bytes a step and more, a tensor 500.
    "resident": 50.0,
    "descriptors": 1e-4,
    "threads": 1e-4,
    "python threads": 1e-4,
    "objects": 0.05,
    "cached": 1e-4,
}
"""Growth a step that counts as none."""


def main() -> None:
    """Run the job, print what was held and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop short after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all looks there")
    options = parser.parse_args()
    if options.steps < 10 * options.every:
        parser.error("--steps must be at least 10 times --every, for a slope")
    names = ("steps", "every", "seed", "minutes")
    parameters = {name: getattr(options, name) for name in names}
    job = Job(
        "soak",
        "kit.soak:soak",
        4,
        LAYOUT,
        {"dims": LAYOUT, **parameters},
        seconds=180.0 + min(2.0 * options.steps, 60 * options.minutes),
    )
    # PyTorch keeps records of its collectives, some thousands: memory that grows for a while.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = run_jobs([job], Path(scratch))[job.name]
    if isinstance(outcome, JobFailedError):
        raise outcome
    if options.json:
        options.json.write_text(json.dumps(outcome))
    last = [looks[-1] for looks in outcome]
    empty = ", ".join(str(look["empty"]) for look in last)
    print(f"{last[0]['step']} steps in {time.monotonic() - began:.0f} s; without samples: {empty}")
    flat = [verdict(rank, looks) for rank, looks in enumerate(outcome)]
    sys.exit(0 if all(flat) else 1)


def verdict(rank: int, looks: list[dict[str, int]]) -> bool:
    """Print what a rank held; True if nothing grew."""
    judged = [look for look in looks if look["step"] >= WARM_UP * looks[-1]["step"]]
    middle = judged[len(judged) // 2]
    print(f"rank {rank}{'step':>10} {looks[0]['step']:>12} {judged[0]['step']:>12}", end="")
    print(f" {middle['step']:>12} {looks[-1]['step']:>12} {'growth a step':>14} {'bound':>8}")
    flat = True
    for name, bound in BOUNDS.items():
        slope = theil_sen([(look["step"], look[name]) for look in judged])
        values = "".join(f" {look[name]:>12}" for look in (looks[0], judged[0], middle, looks[-1]))
        grows = "" if slope <= bound else "  GROWS"
        print(f"{name:>16}{values} {slope:>14.4f} {bound:>8g}{grows}")
        flat &= slope <= bound
    return flat


def theil_sen(points: list[tuple[int, int]]) -> float:
    """The median of the slopes between all pairs of points."""
    return statistics.median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in itertools.combinations(points, 2)
    )


if __name__ == "__main__":
    main()
