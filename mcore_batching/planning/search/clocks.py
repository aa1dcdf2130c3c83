"""Clocks of pipelines whose costs change: their ends, and which places these hang on."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.coupled_ranks import Blocks, Ends, coupled_chain, coupled_passes
from mcore_batching.planning.critical_path import critical_path
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.rounds import Rounds

Changes = Sequence[tuple[int, float]]


class Clock:
    """One pipeline, simulated anew after every change."""

    def __init__(self, costs: Sequence[float], problem: Problem) -> None:
        self._problem, self._costs = problem, list(costs)
        dims, self.passes_run = problem.dims, 0
        self._stages = dims.pipeline_parallel
        self._per_slot = (1 if problem.forward_only else 2) * self._stages * dims.virtual_pipeline
        self._options = {
            "backward_ratio": problem.cost_model.backward_ratio,
            "forward_only": problem.forward_only,
        }
        self._last: tuple[list[tuple[int, float]], float, list[float]] = ([], 0.0, [])
        self.become([])

    def end_with(self, changes: Changes) -> float:
        """End of the step if the costs at these places grew by so much."""
        costs = self._costs[:]
        for place, more in changes:
            costs[place] += more
        self.passes_run += self._per_slot * (len(costs) + self._stages) * 3 // 2
        end, weights = critical_path(costs, self._problem.dims, **self._options)  # type: ignore[arg-type]
        self._last = [*changes], end, weights
        return end

    def weights_with(self) -> list[float]:
        """Weights [places] of a longest chain of what `end_with` tried last."""
        return self._last[2]

    def weights(self) -> list[float]:
        """Likewise of the costs as they are."""
        return self._weights

    def become(self, changes: Changes) -> None:
        """Keep changes."""
        if not changes or self._last[0] != [*changes]:
            self.end_with(changes)
        _, self.end, self._weights = self._last
        for place, more in changes:
            self._costs[place] += more


class RoundsClock(Clock):
    """1F1B, of which the rounds that a change touches run anew."""

    _rounds: Rounds

    def become(self, changes: Changes) -> None:
        """Keep changes."""
        if changes:
            self._rounds.become(*_two(changes))
        else:
            ratio = self._problem.cost_model.backward_ratio
            self._rounds = Rounds(self._costs, self._stages, ratio)
        self.passes_run += self._per_slot * len(self._costs)
        self.end = self._rounds.end

    def end_with(self, changes: Changes) -> float:
        """End of the step if the costs at these places grew by so much."""
        self._tried = _two(changes)
        self.passes_run += self._per_slot * self._rounds.span(self._tried[0], self._tried[2])
        return self._rounds.end_with(*self._tried)

    def weights_with(self) -> list[float]:
        """Weights [places] of a longest chain of what `end_with` tried last."""
        self.passes_run += self._per_slot * len(self._costs)
        return self._rounds.weights_with(*self._tried)

    def weights(self) -> list[float]:
        """Likewise of the costs as they are."""
        return self._rounds.weights()


def _two(changes: Changes) -> tuple[int, float, int, float]:
    (place, more), (other, other_more) = (*changes, (changes[0][0], 0.0))[:2]
    return place, more, other, other_more


class CoupledClock(Clock):
    """Ranks that share rows: places are slot * ranks + rank, that of a row its first rank's."""

    def __init__(self, costs: Sequence[float], blocks: Sequence[Blocks], problem: Problem) -> None:
        self._blocks, self._width = blocks, len(costs) // len(blocks)
        self._passes: Ends = []
        super().__init__(costs, problem)

    def end_with(self, changes: Changes) -> float:
        """End of the step if the costs at these places grew by so much."""
        costs, width, slots = self._costs[:], self._width, len(self._blocks)
        for place, more in changes:
            slot, rank = divmod(place, width)
            stop = next((b for a, b in self._blocks[slot] if a == rank), rank + 1)
            for each in range(place, slot * width + stop):
                costs[each] += more
        first = min((place // width for place, _ in changes), default=0)
        passes = self._per_slot * (slots + self._stages)
        passes -= passes * first // (slots + self._stages)
        self.passes_run += int(passes * (2.0 + 1.3 * width))
        made = coupled_passes(
            [costs[at : at + width] for at in range(0, len(costs), width)],
            self._blocks,
            self._problem.dims,
            before=(self._passes, first) if self._passes else None,
            **self._options,  # type: ignore[arg-type]
        )
        self._newest = [*changes], costs, made
        return max(made[-1])

    def weights_with(self) -> list[float]:
        """Weights [places] of a longest chain of what `end_with` tried last."""
        _, costs, made = self._newest
        rank = made[-1].index(max(made[-1]))
        chain = coupled_chain(made, rank, self._blocks, self._problem.dims, **self._options)  # type: ignore[arg-type]
        weights = [0.0] * len(costs)
        for (first, slot), weight in chain.items():
            weights[slot * self._width + first] = weight
        return weights

    def weights(self) -> list[float]:
        """Likewise of the costs as they are."""
        return self._weights

    def become(self, changes: Changes) -> None:
        """Keep changes."""
        if not changes or self._newest[0] != [*changes]:
            self.end_with(changes)
        _, self._costs, self._passes = self._newest
        self.ends = self._passes[-1]
        self.end, self._weights = max(self.ends), self.weights_with()


def clock_of(costs: Sequence[float], blocks: Sequence[Blocks] | None, problem: Problem) -> Clock:
    """The clock of one rank's micro-batches, or of ranks that share some of them."""
    if blocks is not None:
        return CoupledClock(costs, blocks, problem)
    in_rounds = problem.dims.virtual_pipeline == 1 and not problem.forward_only
    return (RoundsClock if in_rounds else Clock)(costs, problem)
