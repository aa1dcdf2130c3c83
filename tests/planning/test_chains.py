"""What chains of passes say of a change of costs (`planning/search/chains.py`)."""

from __future__ import annotations

import random

import pytest

from mcore_batching.planning.search.chains import MOST_CHAINS, Chains


def some(generator: random.Random, count: int) -> tuple[Chains, list[list[float]], list[float]]:
    """Up to 5 chains of so many micro-batches, and what these cost."""
    costs = [generator.random() for _ in range(count)]
    chains, weights = Chains(), []
    for _ in range(generator.randint(1, 5)):
        weights.append([generator.choice((0.0, 1.0, 3.0, 4.0)) for _ in range(count)])
        chains.remember(weights[-1], costs)
    return chains, weights, costs


def length(weights: list[float], costs: list[float]) -> float:
    return sum(weight * cost for weight, cost in zip(weights, costs, strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_what_a_micro_batch_may_cost_more(seed: int) -> None:
    """The most is what makes the longest chain end in time; before that, what makes a step of both
    pipelines, or of the one whose longest chain is known, end soonest."""
    generator = random.Random(seed)
    chains, weights, costs = some(generator, 4)
    end = max(length(each, costs) for each in weights)
    slope = generator.choice((0.5, 3.0, 7.0))
    longest = max(weights, key=lambda each: length(each, costs))
    at, place = longest.index(max(longest)), longest.index(min(longest))
    within = at != place and bool(seed % 2)
    if within:
        slope = longest[at] - longest[place]
        room = chains.room_within(at, place, slope, 0.0, end)
    else:
        end *= generator.choice((1.0, 1.2))
        room = chains.room(place, slope, 0.0, end)
    if room is None:
        room = 0.0, 0.0  # rounded it is less than nothing
    even, most = room

    def ends(more: float) -> float:
        changed = costs[:]
        changed[place] += more
        changed[at] -= more if within else 0.0
        return max(length(each, changed) for each in weights)

    def step(more: float) -> float:
        return max(end - slope * more, ends(more))

    assert even <= most <= end
    if most < end:
        assert ends(most) <= end * (1 + 1e-9) < ends(most + 1e-6)
        for other in (0.5 * even, 0.5 * (even + most), most):
            assert step(even) <= step(other) + 1e-9


@pytest.mark.parametrize("seed", range(50))
def test_what_costs_too_little_is_refused(seed: int) -> None:
    generator = random.Random(seed)
    chains, weights, costs = some(generator, 4)
    end = 1.1 * max(length(each, costs) for each in weights)
    room, within = chains.room(1, 2.0, 0.0, end), chains.room_within(0, 1, 2.0, 0.0, end)
    assert room is not None
    assert within is not None
    assert chains.room(1, 2.0, room[1], end) == room
    assert chains.room_within(0, 1, 2.0, within[1], end) == within
    assert room[1] == end or chains.room(1, 2.0, 1.01 * room[1], end) is None
    assert within[1] == end or chains.room_within(0, 1, 2.0, 1.01 * within[1], end) is None


@pytest.mark.parametrize("seed", range(50))
def test_changes_change_lengths(seed: int) -> None:
    generator = random.Random(seed)
    chains, weights, costs = some(generator, 4)
    soonest = chains.soonest(0, 0.3, 2, -0.2, float("inf"))
    chains.change(0, 0.3, 2, -0.2)
    costs[0] += 0.3
    costs[2] -= 0.2
    assert soonest == pytest.approx(max(length(each, costs) for each in weights))
    for *each, how_long in chains:
        assert how_long == pytest.approx(length(each, costs))


def test_the_newest_are_remembered_and_what_refused_is_looked_at_first() -> None:
    chains = Chains()
    for number in range(MOST_CHAINS + 3):
        chains.add([float(number)], float(number))
    assert [chain[-1] for chain in chains] == list(range(MOST_CHAINS + 2, 2, -1))
    assert chains.soonest(0, 0.0, 0, 0.0, 1000.0) == MOST_CHAINS + 2
    chains.add([9.0], 1.0)
    assert chains.soonest(0, 1.0, 0, 0.0, 40.0) > 40.0
    assert next(iter(chains))[-1] != 1.0
