"""Steps planned by the first guess of a model's costs, beside those planned by its true costs.

    python tests/benchmarks/bench_model_costs.py

512 samples of mooncake_conv on DP4×PP4 under a cap of 131072. True costs are multiplications of
each layer, pairs of tokens counted one by one, on the stage that holds the layer.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planning"))

from model_configs import FAMILIES

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.costs.layer_costs import LayerCost, cut_layers
from mcore_batching.planning.costs.layers_of import first_guess
from mcore_batching.planning.pipeline import Clock, Schedule
from mcore_batching.planning.planner import _plan_global
from mcore_batching.planning.problem import Problem

LENGTHS = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conv_lengths.txt"
DIMS = ParallelDims(data_parallel=4, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=131072)
MTP = {"num_nextn_predict_layers": 1}
Ranks = Sequence[Sequence[Sequence[int]]]


@functools.lru_cache(maxsize=1 << 14)
def counted_pairs(length: int, window: int) -> int:
    """Pairs of a token and one before it, or itself, of the `window` next ones; 0: of all."""
    return sum(min(place, window or place) for place in range(1, length + 1))


def true_costs(model: CostModel, lengths: Sequence[int]) -> list[tuple[float, list[float]]]:
    """Of each stage the cost of a micro-batch and of each sample, of its own layers."""
    costs = {letter: LayerCost(*cost) for letter, *cost in model.layer_costs}
    found = []
    for chunk in cut_layers(model.layers, DIMS.pipeline_parallel).split("|"):
        layers = [costs[each] for each in chunk]
        token, pair, far, read = (sum(each) for each in zip(*layers, strict=True))
        near = pair - far  # a pair costs twice what it does where masked ones count
        found.append(
            (
                256 * read,
                [
                    token * n
                    + 2 * far * counted_pairs(n, 0)
                    + 2 * near * counted_pairs(n, model.window or 0)
                    for n in lengths
                ],
            )
        )
    return found


def planned(
    model: CostModel, lengths: Sequence[int], truth: list[tuple[float, list[float]]] | None = None
) -> Ranks:
    """Micro-batches by a model's costs, or by true ones."""
    problem = Problem.of(lengths, DIMS, CONFIG, model)
    if truth is not None:
        which = tuple((stage,) for stage in range(len(truth)))
        mean = [sum(each) / len(truth) for each in zip(*(costs for _, costs in truth), strict=True)]
        fixed = sum(each for each, _ in truth) / len(truth)
        problem = replace(
            problem, cost_model=CostModel(linear=0.0, quadratic=0.0, per_micro_batch=fixed)
        )
        # Cached properties: what the planner would make of a cost model.
        vars(problem).update(
            costs=mean, costs_of_stages=truth, schedule=Schedule(dims=DIMS, which_cost=which)
        )
    return _plan_global(problem)


def end(ranks: Ranks, truth: Sequence[tuple[float, list[float]]]) -> float:
    """End of the step by true costs."""
    schedule = Schedule(dims=DIMS, which_cost=tuple((stage,) for stage in range(len(truth))))
    return max(
        Clock(
            [
                fixed + sum(costs[sample] for sample in samples)
                for samples in rank
                for fixed, costs in truth
            ],
            schedule,
        ).end
        for rank in ranks
    )


def ends_of(config: dict[str, Any], lengths: Sequence[int]) -> dict[str, float]:
    """Ends of steps planned by each costs, by the true ones."""
    guess = first_guess(config)
    truth = true_costs(guess, lengths)
    equal = replace(guess, layers="", layer_costs=())
    made = {
        "default": planned(CostModel(), lengths),
        "equal stages": planned(equal, lengths),
        "first guess": planned(guess, lengths),
        "true": planned(guess, lengths, truth),
    }
    return {name: end(ranks, truth) for name, ranks in made.items()}


def mooncake(number: int = 512) -> list[int]:
    """The first lengths of the trace."""
    with LENGTHS.open(encoding="utf-8") as lines:
        return [int(line) for line in itertools.islice(lines, number)]


def main() -> None:
    """A row for each family, without and with multi-token prediction."""
    lengths = mooncake()
    names = ("default", "equal stages", "first guess")
    print("| planned by | " + " | ".join(names) + " |\n|---|---|---|---|")
    for family, config in FAMILIES.items():
        for name, more in ((family, {}), (f"{family}, MTP", MTP)):
            ends = ends_of(config | more, lengths)
            over = (f"{ends[each] / min(ends.values()) - 1:+.1%}" for each in names)
            print(f"| {name} | " + " | ".join(over) + " |", flush=True)


if __name__ == "__main__":
    main()
