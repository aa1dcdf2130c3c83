"""1F1B in rounds: in round j every stage runs forward j, then the backward that it has due.

Stage s is `stages - 1 - s` micro-batches behind with its backward passes, so what backward i of
stage s needs, backward i of stage s + 1, ran one round before. Later rounds see of earlier ones
only when each stage is free, so a step's end is, for any j, the largest sum over stages of

    heads[j]    when each stage is free before round j
    tails[j]    the longest chain of passes from then on that begins on each stage

and after a change of few costs only rounds from the first changed micro-batch's forward passes to
the last one's backward pass on the first stage run anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_batching.planning.compiled import Numbers, Table, as_list, kernel, numbers, table

NEVER = -math.inf


def rounds_end(costs: Sequence[float], stages: int, backward_ratio: float) -> float:
    """End of a step with these forward costs [num_microbatches]."""
    rounds = len(costs) + stages - 1
    forward, backward = numbers(costs), numbers([backward_ratio * cost for cost in costs])
    clocks = table(rounds + 1, stages)
    _run(clocks[0], clocks, 0, rounds, forward, backward)
    return float(clocks[rounds][0])


class Rounds:
    """The rounds of one pipeline, kept for changes of its costs.

    Args:
        costs: forward cost of each micro-batch [num_microbatches].
        stages: of the pipeline.
        backward_ratio: cost of a backward pass over its forward pass.
    """

    def __init__(self, costs: Sequence[float], stages: int, backward_ratio: float) -> None:
        self._stages, self._ratio = stages, backward_ratio
        self._forward = numbers(costs)
        self._backward = numbers([backward_ratio * cost for cost in costs])
        self._rounds = len(costs) + stages - 1
        self._heads = table(self._rounds + 1, stages)
        self._tails = table(self._rounds + 1, stages, NEVER)
        self._tails[self._rounds][0] = 0.0
        self._tails_from = self._rounds
        """Tails of rounds before this one are out of date."""
        self._tried = table(self._rounds + 1, stages)
        _run(self._heads[0], self._heads, 0, self._rounds, self._forward, self._backward)

    @property
    def end(self) -> float:
        """End of the step."""
        return float(self._heads[self._rounds][0])

    def span(self, slot: int, other: int) -> int:
        """Rounds that run anew if the costs of two slots change."""
        return abs(slot - other) + self._stages

    def end_with(self, slot: int, more: float, other: int, other_more: float) -> float:
        """End of the step with further cost in two slots, or one twice; exact but for rounding."""
        first, stop = min(slot, other), max(slot, other) + self._stages
        if stop < self._tails_from:
            _run_back(self._tails, self._tails_from, stop, self._forward, self._backward)
            self._tails_from = stop
        forward, backward = self._forward, self._backward
        before = forward[slot], backward[slot], forward[other], backward[other]
        self._add(slot, more, other, other_more)
        _run(self._heads[first], self._tried, first, stop, forward, backward)
        forward[slot], backward[slot], forward[other], backward[other] = before
        return _joined(self._tried[stop], self._tails[stop])

    def become(self, slot: int, more: float, other: int, other_more: float) -> None:
        """Add cost to two slots, or one twice."""
        first, stop = min(slot, other), max(slot, other) + self._stages
        self._add(slot, more, other, other_more)
        self._tails_from = max(self._tails_from, stop)
        _run(self._heads[first], self._heads, first, self._rounds, self._forward, self._backward)

    def _add(self, slot: int, more: float, other: int, other_more: float) -> None:
        for place, each in ((slot, more), (other, other_more)):
            self._forward[place] += each
            self._backward[place] = self._ratio * self._forward[place]

    def weights(self) -> list[float]:
        """Weight of each micro-batch on a chain that is as long as the step."""
        return self._weights(self._heads, 0)

    def weights_with(self, slot: int, more: float, other: int, other_more: float) -> list[float]:
        """Likewise with further cost, for which `end_with` was asked last."""
        first, stop = min(slot, other), max(slot, other) + self._stages
        forward, backward = self._forward, self._backward
        before = forward[slot], backward[slot], forward[other], backward[other]
        self._add(slot, more, other, other_more)
        _run(self._tried[stop], self._tried, stop, self._rounds, forward, backward)
        weights = self._weights(self._tried, first)
        forward[slot], backward[slot], forward[other], backward[other] = before
        return weights

    def _weights(self, clocks: Table, first: int) -> list[float]:
        weights = numbers([0.0] * len(self._forward))
        ready = numbers([0.0] * self._stages)
        _weigh(
            self._heads, clocks, first, self._forward, self._backward, self._ratio, ready, weights
        )
        return as_list(weights)


@kernel
def _run(
    before: Numbers, clocks: Table, first: int, stop: int, forward: Numbers, backward: Numbers
) -> None:
    """Run rounds; `clocks[j + 1]` is when stages are free after round j, of those that have passes
    left; `before` when before the first."""
    count, stages = len(forward), len(before)
    last = stages - 1
    for number in range(first, stop):
        clock = clocks[number + 1]
        due = number - last
        stage = 0
        if due < 0:
            if number < count:
                cost, ready = forward[number], 0.0
                for free in before:
                    ready = (free if free > ready else ready) + cost
                    clock[stage] = ready
                    stage += 1
            else:
                for free in before:
                    clock[stage] = free
                    stage += 1
            for stage in range(-due, min(stages, count - due)):
                start = clock[stage]
                if stage < last and before[stage + 1] > start:
                    start = before[stage + 1]
                clock[stage] = start + backward[due + stage]
        elif number < count:
            cost, ready, free = forward[number], 0.0, before[0]
            for after in before[1:]:
                ready = (free if free > ready else ready) + cost
                clock[stage] = (after if after > ready else ready) + backward[due]
                free = after
                stage += 1
                due += 1
            clock[last] = (free if free > ready else ready) + cost + backward[number]
        else:
            for free, after, back in zip(before, before[1:], backward[due:]):  # noqa: B905
                clock[stage] = (after if after > free else free) + back
                stage += 1
        before = clock


@kernel
def _run_back(tails: Table, first: int, stop: int, forward: Numbers, backward: Numbers) -> None:
    """Tails of rounds `stop` to `first - 1`, from that of `first`."""
    count, stages = len(forward), len(tails[0])
    last = stages - 1
    for number in range(first - 1, stop - 1, -1):
        after, tail, due = tails[number + 1], tails[number], number - last
        cost = forward[number] if number < count else 0.0
        rest = NEVER
        for stage in range(last, -1, -1):
            slot, own = due + stage, after[stage]
            passes_back = 0 <= slot < count
            if passes_back:
                own += backward[slot]
            if own > rest or number >= count:
                rest = own
            rest += cost
            tail[stage] = rest
            if passes_back and stage < last and own > tail[stage + 1]:
                tail[stage + 1] = own


@kernel
def _joined(head: Numbers, tail: Numbers) -> float:
    """The largest sum."""
    end = 0.0
    for free, rest in zip(head, tail):  # noqa: B905
        if free + rest > end:
            end = free + rest
    return end


@kernel
def _weigh(
    heads: Table,
    later: Table,
    first: int,
    forward: Numbers,
    backward: Numbers,
    backward_ratio: float,
    ready: Numbers,
    weights: Numbers,
) -> None:
    """The way back from the end: how often each micro-batch is on it, forward passes counting 1.
    After round `first` stages are free as `later` says. `ready` is written over."""
    count, last = len(forward), len(ready) - 1
    stage, number = 0, count + last - 1
    while number >= 0:
        slot = number - last + stage
        before = later[number] if number > first else heads[number]
        if slot >= 0:
            weights[slot] += backward_ratio
            ended = later[number + 1][stage] if number >= first else heads[number + 1][stage]
            if stage < last and before[stage + 1] + backward[slot] == ended:
                stage, number = stage + 1, number - 1
                continue
        if number < count:
            cost, end = forward[number], 0.0
            for each in range(stage + 1):
                end = (before[each] if before[each] > end else end) + cost
                ready[each] = end
            weights[number] += 1.0
            while stage > 0 and (number == 0 or before[stage] <= ready[stage - 1]):
                stage -= 1
                weights[number] += 1.0
        number -= 1
