"""Training steps planned by costs that are learnt, beside those planned by the model's shape.

    python tests/benchmarks/bench_learnt_costs.py [--steps 12] [--seconds-per-unit 4e-4]

Megatron's schedules on 4 gloo processes whose stages sleep what a hidden model says, with
``--dynamic-batch-cost-model`` at auto and at fixed: the same samples in the same steps. Seconds are
those of whole steps from the fifth on, when costs are known, on the slowest rank, added up;
predicted are the passes alone. Stages of a tiny model compute for some milliseconds beside.
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

HIDDEN: dict[str, dict[str, float]] = {
    "as guessed": {"per_micro_batch": 256.0, "quadratic": 0.03, "backward_ratio": 2.0},
    "cheap micro-batches": {"per_micro_batch": 4.0, "quadratic": 0.002, "backward_ratio": 2.0},
    "attention alone": {"per_micro_batch": 4.0, "quadratic": 0.08, "backward_ratio": 2.5},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "DP2 x PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "PP4": {"pipeline_parallel": 4},
}
_KNOWN_FROM = 4


def main() -> None:
    """Run, compare, print a row for each layout and hidden model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds-per-unit", type=float, default=4e-4)
    options = parser.parse_args()
    print(
        f"{'layout':<12}{'hidden model':<22}{'fixed s':>9}{'learnt s':>10}{'fixed / learnt':>16}"
        f"{'micro-batches: fixed, learnt':>30}{'measured over predicted':>25}"
    )
    for layout, dims in LAYOUTS.items():
        for name, hidden in HIDDEN.items():
            fixed, learnt = (steps(dims, hidden, options, kind) for kind in ("fixed", "auto"))
            seconds = [sum(step["seconds"] for step in each) for each in (fixed, learnt)]
            counts = [statistics.mean(step["count"] for step in each) for each in (fixed, learnt)]
            off = statistics.median(step["seconds"] / step["predicted"] for step in learnt)
            print(
                f"{layout:<12}{name:<22}{seconds[0]:>9.2f}{seconds[1]:>10.2f}"
                f"{seconds[0] / seconds[1]:>16.3f}{counts[0]:>23.1f},{counts[1]:>6.1f}{off:>25.2f}",
                flush=True,
            )


def steps(
    dims: dict[str, int], hidden: dict[str, float], options: argparse.Namespace, cost_model: str
) -> list[dict[str, Any]]:
    """Of each step from which costs are known, what the slowest rank saw."""
    job = Job(
        f"learnt-{cost_model}",
        "kit.learning:learn",
        4,
        dims,
        {
            "dims": dims,
            "hidden": hidden,
            "sleeps": True,
            "num_steps": options.steps,
            "seconds_per_unit": options.seconds_per_unit,
            "cost_model": cost_model,
        },
        seconds=600.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        ranks = results(run_jobs([job], Path(scratch))[job.name])
    slowest = [
        {key: max(step[key] for step in each) for key in ("seconds", "predicted")}
        | {"count": len(each[0]["ranks"][0])}
        for each in zip(*ranks, strict=True)
    ]
    return slowest[_KNOWN_FROM:]


if __name__ == "__main__":
    main()
