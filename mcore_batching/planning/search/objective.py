"""The end of a step, simulated, within a search budget.

The budget counts simulated passes of micro-batches, never time, so a search that stops after so
many stops at the same place everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.clock import clocks_of
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.assign import Slots

# Costs of leaving something out, here and in the other files, are means over 106 problems of eleven
# kinds unless they name a kind.
BUDGET = 125
"""A step's search budget is 125 · plan_effort · ⁴√((samples + stages of all ranks) · stages)
simulated passes; with a sixth less steps end 0.03 % later."""
SLACK = 0.0005
"""Share by which moves may raise an end at first; without, steps end 0.07 % later, single ones 2 %.
0 where ranks share rows: the budget buys too few simulations there to wander, and steps would end
0.4 % later. The search stops at a step within as much of a bound that no plan beats."""

Ranks = Sequence[Sequence[Sequence[int]]]
"""Samples of each micro-batch [ranks][slots]."""


@dataclass
class Step:
    """A whole step that was simulated."""

    ranks: list[Slots]
    """Micro-batches [ranks][slots]."""
    ends: list[float]
    """End of each rank's step, or of each group of ranks in lockstep."""
    sizes: list[list[int]] | None = None
    """Under dynamic CP the context-parallel size of each micro-batch [ranks][slots]; one that ranks
    share is listed on each of them."""

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)


class Objective:
    """Simulates steps of a problem within a search budget.

    Attributes:
        problem: under dynamic CP that of micro-batches which no ranks share.
        whole: the problem with all context-parallel sizes.
        budget: passes that may still be simulated.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = self.whole = problem
        dims = problem.dims
        depth = dims.pipeline_parallel * dims.virtual_pipeline
        size = problem.num_samples + dims.data_parallel * depth
        # Two square roots: a power may differ between platforms.
        per_effort = BUDGET * math.sqrt(math.sqrt(size * depth))
        self.budget = problem.config.plan_effort * per_effort
        self.floor = step_time_floor(problem) * (1.0 + SLACK)

    def is_best(self, end: float) -> bool:
        """True of an end before which no plan's step ends, or hardly."""
        return end <= self.floor

    def step(self, ranks: Ranks, sizes: Sequence[Sequence[int]] | None = None) -> Step:
        """A step of these micro-batches [ranks][slots], simulated; `sizes` under dynamic CP."""
        problems = self.whole.on_ranks
        if sizes is None:
            costs = [self.problem.slot_costs(slots) for slots in ranks]
        else:
            costs = [
                [
                    cost
                    for samples, size in zip(*of_rank, strict=True)
                    for cost in problems[size].slot_costs([samples])
                ]
                for of_rank in zip(ranks, sizes, strict=True)
            ]
        clocks = clocks_of(costs, self.problem.schedule, sizes)
        self.budget -= sum(clock.num_passes for clock in clocks)
        ends = [end for clock in clocks for end in clock.ends]
        own = [list(of_rank) for of_rank in sizes] if sizes is not None else None
        return Step([[list(samples) for samples in slots] for slots in ranks], ends, own)
