"""Training steps planned by costs that are learnt, beside those planned by the model's shape.

    python tests/benchmarks/bench_learnt_costs.py [--steps 12] [--seconds-per-unit 4e-4]
    python tests/benchmarks/bench_learnt_costs.py --real ../shared/data --steps 40

Megatron's schedules on 4 gloo processes whose stages sleep what a hidden model says, with
``--dynamic-batch-cost-model`` at auto and at fixed: the same samples in the same steps. Seconds are
those of whole steps from the fifth on, when costs are known, on the slowest rank, added up;
predicted are the passes alone. Stages of a tiny model compute for some milliseconds beside.

``--real``: nothing sleeps. A model of 4 layers trains on 2 processes, on each step's samples once
by either kind, in turns: fine-tuning on questions and answers (GSM8K's test set, a byte a token),
policy gradients on rollouts (example solutions, four to a question). Printed is the median of
fixed over auto, step by step from the fifth on, with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
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
TWO: dict[str, dict[str, int]] = {
    "DP2": {"data_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
}
"""Layouts of 2 processes."""
_KNOWN_FROM = 4


def main() -> None:
    """Run, compare, print a row for each layout and hidden model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds-per-unit", type=float, default=4e-4)
    parser.add_argument("--real", type=Path, help="folder of the GSM8K files")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--cap", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args()
    if options.real:
        real(options)
        return
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


def real(options: argparse.Namespace) -> None:
    """Steps of real passes on real lengths, by either kind in turns."""
    print(f"{'job':<12}{'layout':<8}{'fixed / auto':>14}{'quartiles':>16}{'micro-batches':>16}")
    for name, objective, batches in (
        ("fine-tuning", "token-mean", fine_tuning(options)),
        ("GRPO", "token-mean-with-kl", rollouts(options)),
    ):
        for layout, dims in TWO.items():
            job = Job(
                "in-turns",
                "kit.learning:in_turns",
                2,
                dims,
                {
                    "dims": dims,
                    "steps": batches,
                    "cap": options.cap,
                    "kinds": ["auto", "fixed"],
                    "objective": objective,
                    "hidden_size": options.hidden_size,
                },
                seconds=3000.0,
            )
            with tempfile.TemporaryDirectory() as scratch:
                ranks = results(run_jobs([job], Path(scratch))[job.name])
            ratios, counts = [], []
            for each in list(zip(*ranks, strict=True))[_KNOWN_FROM:]:
                auto, fixed = (max(step[kind][0] for step in each) for kind in ("auto", "fixed"))
                ratios.append(fixed / auto)
                counts.append([each[0][kind][1] for kind in ("fixed", "auto")])
            low, middle, high = statistics.quantiles(ratios, n=4)
            means = [f"{statistics.mean(kind):.1f}" for kind in zip(*counts, strict=True)]
            print(
                f"{name:<12}{layout:<8}{middle:>14.3f}{f'{low:.3f}, {high:.3f}':>16}"
                f"{', '.join(means):>16}",
                flush=True,
            )


def fine_tuning(options: argparse.Namespace) -> list[list[tuple[int, int]]]:
    """Total and response lengths of questions and answers, in batches."""
    rows = _rows(options.real / "gsm8k_test.jsonl")
    return _batches([(row["question"], row["answer"]) for row in rows], options)


def rollouts(options: argparse.Namespace) -> list[list[tuple[int, int]]]:
    """Total and response lengths of solutions that models wrote, in batches."""
    pairs = []
    for row in _rows(options.real / "gsm8k_example_model_solutions.jsonl"):
        written = [value for value in row.values() if isinstance(value, dict)]
        pairs += [(row["question"], value["solution"]) for value in written]
    return _batches(pairs, options)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _batches(
    pairs: list[tuple[str, str]], options: argparse.Namespace
) -> list[list[tuple[int, int]]]:
    pool = [(len(first) + len(second), len(second)) for first, second in pairs]
    pool = [(total, response) for total, response in pool if 0 < response < total <= options.cap]
    random.Random(0).shuffle(pool)
    many = options.samples
    return [(pool * 9)[step * many : (step + 1) * many] for step in range(options.steps)]


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
