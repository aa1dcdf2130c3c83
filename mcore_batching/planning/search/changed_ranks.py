"""Ranks and micro-batches of a step while single samples are moved (`local_moves`)."""

from __future__ import annotations

from mcore_batching.planning.integers import round_up
from mcore_batching.planning.pipeline import inflight_tokens
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective


class Row:
    """A micro-batch, with what it costs and holds on each rank that shares it."""

    __slots__ = (
        "capacity",
        "cost",
        "costs",
        "offset",
        "problem",
        "ranks",
        "samples",
        "tokens",
        "tokens_of",
    )

    def __init__(self, samples: list[int], problem: Problem, ranks: range) -> None:
        self.samples = samples
        self.problem = problem
        """Of rows of this context-parallel size."""
        self.ranks = ranks
        self.costs, self.tokens_of, self.capacity = problem.costs, problem.tokens, problem.capacity
        self.cost = problem.cost(samples)
        self.tokens = sum(problem.tokens[i] for i in samples)
        self.offset = 0
        """Its first rank among those of its pipeline that are told apart."""

    @property
    def held_tokens(self) -> int:
        """Padded tokens over all ranks that share it."""
        return round_up(self.tokens, self.problem.row_multiple) or self.problem.placeholder_tokens


class Rank:
    """A rank's micro-batches."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.find_empty()

    def find_empty(self) -> None:
        """Note the first placeholder's slot; None if there is none."""
        self.empty = next((slot for slot, row in enumerate(self.rows) if not row.samples), None)

    def fits_in_memory(self, objective: Objective) -> bool:
        """True if the first stage holds no more than it may."""
        bound = objective.max_inflight_tokens
        return bound is None or self.inflight_tokens(objective) <= bound

    def inflight_tokens(self, objective: Objective) -> float:
        """Most padded tokens whose activations the first stage holds at a time, over the
        context-parallel ranks of the dims."""
        dims = objective.whole.dims
        size = dims.context_parallel
        held = [row.held_tokens * size // row.problem.dims.context_parallel for row in self.rows]
        return inflight_tokens(held, dims, forward_only=objective.problem.forward_only)


def ranks_of(step: Candidate, objective: Objective) -> list[Rank]:
    """The ranks of a step; those that share a micro-batch have the same `Row` there."""
    ranks: list[Rank] = []
    for number, slots in enumerate(step.ranks):
        rows = []
        for slot, samples in enumerate(slots):
            size = step.sizes[number][slot] if step.sizes else 1
            if number % size:
                rows.append(ranks[-1].rows[slot])
            else:
                problem = objective.whole.on_ranks[size] if step.sizes else objective.problem
                rows.append(Row(list(samples), problem, range(number, number + size)))
        ranks.append(Rank(rows))
    return ranks
