"""The end of a pipeline anew after a few costs changed (`planning/rounds.py`)."""

from __future__ import annotations

import random

import pytest

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import pipeline_operations, pipeline_time
from mcore_batching.planning.rounds import Rounds


@pytest.mark.parametrize("seed", range(8))
def test_ends_and_weights_are_those_of_the_whole_simulation(seed: int) -> None:
    """Of more and of fewer micro-batches than stages, after changes of one slot and of two, made
    one after the other and tried in between."""
    generator = random.Random(seed)
    for _ in range(60):
        stages, count = generator.randint(1, 8), generator.randint(1, 14)
        ratio = generator.choice((1.0, 1.6, 2.0, 3.0))
        costs = [generator.choice((1.0, 5 * generator.random())) for _ in range(count)]
        dims = ParallelDims(pipeline_parallel=stages)
        rounds = Rounds(costs, stages, ratio)
        for _ in range(4):
            operations = pipeline_operations(costs, dims, backward_ratio=ratio)
            assert rounds.end == max(operation.end for operation in operations)
            length = sum(
                weight * cost for weight, cost in zip(rounds.weights(), costs, strict=True)
            )
            assert length == pytest.approx(rounds.end, rel=1e-12)
            slot, other = generator.randrange(count), generator.randrange(count)
            change = slot, generator.random(), other, generator.choice((0.0, generator.random()))
            costs[slot] += change[1]
            costs[other] += change[3]
            ended = pipeline_time(costs, dims, backward_ratio=ratio)
            assert rounds.end_with(*change) == pytest.approx(ended, rel=1e-12)
            weights = rounds.weights_with(*change)
            length = sum(weight * cost for weight, cost in zip(weights, costs, strict=True))
            assert length == pytest.approx(ended, rel=1e-12)
            rounds.become(*change)
