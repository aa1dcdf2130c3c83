"""Ranks and pipelines of a step while single samples are moved (`local_moves`).

A pipeline remembers the longest chains of passes that its simulations found, by which most changes
are refused unsimulated: it ends no sooner than any chain takes (`critical_path`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.search.objective import Objective, Slots

MOST_CHAINS = 16
"""Chains of passes that are remembered of each pipeline."""


class Rank:
    """A rank's micro-batches, with what they cost and hold."""

    def __init__(self, slots: Slots, objective: Objective) -> None:
        tokens = objective.problem.tokens
        self.slots = slots
        self.costs = objective.slot_costs(slots)
        self.tokens = [sum(tokens[i] for i in samples) for samples in slots]
        self.empty = slots.index([]) if [] in slots else None


class Pipeline:
    """A rank, or all that run each slot together, with what decides about moves between slots."""

    def __init__(self, ranks: Sequence[Rank], objective: Objective) -> None:
        self._objective = objective
        self.ranks = ranks
        self.costs = [max(costs) for costs in zip(*(rank.costs for rank in ranks), strict=True)]
        self.end, self.weights = objective.longest_chain(self.costs)
        self._newest = self.weights
        self.chains: list[list[float]] = [[*self.weights, self.end]]
        """Weights of slots of chains, and last how long the chain is."""

    def costliest(self, slot: int) -> Rank:
        """The first rank whose micro-batch in a slot costs most."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        return max(self.ranks, key=lambda rank: rank.costs[slot])

    def soonest(self, change: Change, limit: float) -> float:
        """A time before which the pipeline does not end after a change; the first found beyond
        `limit`."""
        _, slot, more, other, other_more = change
        latest = 0.0
        for number, chain in enumerate(self.chains):
            end = chain[-1] + more * chain[slot] + other_more * chain[other]
            if end > latest:
                latest = end
                if end > limit:
                    if number:
                        self.chains.insert(0, self.chains.pop(number))
                    return latest
        return latest

    def simulated(self, change: Change) -> float:
        """End of the pipeline after a change; the chain found is remembered."""
        _, slot, more, other, other_more = change
        costs = self.costs[:]
        costs[slot] += more
        costs[other] += other_more
        end, self._newest = self._objective.longest_chain(costs)
        weights = self._newest
        length = 0.0
        for weight, cost in zip(weights, self.costs, strict=True):
            length += weight * cost
        self.chains.insert(0, [*weights, length])
        del self.chains[MOST_CHAINS:]
        return end

    def become(self, change: Change, end: float) -> None:
        """Make the change that was simulated last, with its end."""
        _, slot, more, other, other_more = change
        for chain in self.chains:
            chain[-1] += more * chain[slot] + other_more * chain[other]
        self.costs[slot] += more
        self.costs[other] += other_more
        self.end, self.weights = end, self._newest


Change = tuple[Pipeline, int, float, int, float]
"""A pipeline, one of its slots and how much more that costs, and another (or the same) likewise."""
