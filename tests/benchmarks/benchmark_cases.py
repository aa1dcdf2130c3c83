"""Lengths, layouts, costs and figures that the benchmarks share.

The traces are files in the folder --data; those that are not there are left out. Two come from
serving; an agent's turns, grade-school answers and rollouts are counted as characters over 4.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.tools.lengths_file import read_lengths

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MODEL = CostModel()
PP1 = ParallelDims(data_parallel=8)
PP4 = ParallelDims(data_parallel=8, pipeline_parallel=4)
PP8 = ParallelDims(data_parallel=4, pipeline_parallel=8)
VPP2 = replace(PP4, virtual_pipeline=2)
POOL = 20_000  # lengths of each kind that is made up
SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@dataclass(frozen=True)
class Lengths:
    """A pool that steps are drawn from, and the cap; None: 64 over the longest of a draw."""

    name: str
    pool: list[int]
    cap: int | None

    def draw(self, count: int, seed: int, *, cut: bool = True) -> tuple[list[int], int]:
        """`count` lengths, cut at the cap or not, and the cap."""
        lengths = random.Random(seed).sample(self.pool, count)
        cap = self.cap or max(lengths) + 64
        return [min(length, cap) if cut else length for length in lengths], cap


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of all benchmarks that draw lengths."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the traces' files")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that have it in the name")
    return parser


def layout_name(dims: ParallelDims) -> str:
    name = f"DP{dims.data_parallel} PP{dims.pipeline_parallel}"
    return name + (f" VPP{dims.virtual_pipeline}" if dims.virtual_pipeline > 1 else "")


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def timed_plan(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, model: CostModel = MODEL
) -> tuple[StepPlan, float]:
    """A plan, and the milliseconds of processor time that it took."""
    started = time.process_time()
    step = plan_step(lengths, dims, config, model)
    return step, 1000 * (time.process_time() - started)


def log_normal(median: float, sigma: float, most: int | None = None) -> list[int]:
    generator = random.Random(5)
    lengths = [int(median * generator.lognormvariate(0, sigma)) + 1 for _ in range(POOL)]
    return lengths if most is None else [min(length, most) for length in lengths]


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _turns(path: Path) -> list[int]:
    return [sum(turn) for trajectory in _rows(path) for turn in trajectory]


def _answers(path: Path) -> list[int]:
    return [(len(row["question"]) + len(row["answer"])) // 4 for row in _rows(path)]


def _rollouts(path: Path) -> list[int]:
    solutions = [
        (row["question"], row[name]["solution"]) for row in _rows(path) for name in SOLVERS
    ]
    return [(len(question) + len(solution)) // 4 for question, solution in solutions]


TRACES: list[tuple[str, str, Callable[[Path], Iterable[int]], int]] = [
    ("azure_conv", "azure_conv_lengths.txt", read_lengths, 16384),
    ("mooncake_conv", "mooncake_conv_lengths.txt", read_lengths, 131072),
    ("agent's turns", "tau_airline_turns.jsonl", _turns, 16384),
    ("gsm8k answers", "gsm8k_test.jsonl", _answers, 4096),
    ("gsm8k rollouts", "gsm8k_example_model_solutions.jsonl", _rollouts, 4096),
]


def traces(data: Path) -> dict[str, Lengths]:
    """The recorded lengths that are there, under the cap that a job would have."""
    found = {}
    for name, file, pool_of, cap in TRACES:
        if (data / file).exists():
            found[name] = Lengths(name, list(pool_of(data / file)), cap)
        else:
            print(f"{name}: left out, there is no {data / file}; set --data to its folder")
    return found


def made_up() -> dict[str, Lengths]:
    """Lengths from distributions; nothing in the search was chosen on the last six."""
    draw = random.Random(11)

    def reasoning() -> int:
        """An answer, a chain of thought, or one of the tenth cut at the limit on new tokens."""
        kind = draw.random()
        if kind < 0.1:
            return 32768
        median, sigma = (1200, 0.6) if kind < 0.7 else (7000, 0.5)
        return min(32768, int(median * draw.lognormvariate(0, sigma)) + 1)

    def short_or_long() -> int:
        median, sigma = (600, 0.2) if draw.random() < 0.8 else (12000, 0.1)
        return int(median * draw.lognormvariate(0, sigma)) + 1

    def heavy_tailed() -> int:
        return min(16384, int(600 * draw.paretovariate(1.3)))

    def many_equal() -> int:
        return 2048 if draw.random() < 0.7 else draw.randint(100, 4096)

    all_kinds = [
        Lengths("long-tailed", log_normal(2048, 1.6, 200_000), 200_000),
        Lengths("short questions", log_normal(200, 0.6, 4096), 4096),
        Lengths("code-like", log_normal(1500, 1.0, 8192), 8192),
        Lengths("σ 1.3", log_normal(2048, 1.3, 16384), 16384 + 64),
        Lengths("σ 1.3 uncut", log_normal(2048, 1.3), None),
        Lengths("truncated reasoning", [reasoning() for _ in range(POOL)], 34816),
        Lengths("uniform", [draw.randint(64, 16384) for _ in range(POOL)], 24576),
        Lengths("powers of two", [256 << draw.randrange(8) for _ in range(POOL)], 40960),
        Lengths("short or long", [short_or_long() for _ in range(POOL)], 24576),
        Lengths("heavy-tailed", [heavy_tailed() for _ in range(POOL)], 16384),
        Lengths("many equal", [many_equal() for _ in range(POOL)], 8192),
    ]
    return {each.name: each for each in all_kinds}
