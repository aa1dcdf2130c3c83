"""The end of a step, simulated, and the effort that is left for simulating.

Effort counts units of work, never time, so that a search which stops after so many units stops at
the same place everywhere. One unit is one pass of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.packing.bounds import step_time_floor, way_of_longest
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.problem import Problem

EFFORT = 70
"""Effort of a step is `plan_effort` · √(70 · (samples + stages of all ranks) · (4 + stages)): 550
simulated passes for each unit of `plan_effort` with 512 samples on DP8×PP4, 3,700 with 16,384 on
DP64×PP8. With 60 steps end 0.06 % later in the mean."""
EFFORT_ON_UNEVEN_STAGES = 4
"""Effort is four times as much where stages differ: more moves help there. A step then takes up to
twice as long to plan as on equal stages; with half of it steps end 0.4 % later in the mean of four,
with more than that half as much sooner."""
GOOD_ENOUGH = 1.0001
"""The search stops at a step within 0.01 % of a bound that no plan beats."""

Ranks = Sequence[Sequence[Sequence[int]]]
"""Samples of each micro-batch [ranks][slots]."""
Slots = list[list[int]]
"""One rank's micro-batches in slot order: samples each, an empty list for a placeholder."""


@dataclass
class Candidate:
    """A whole step that was simulated."""

    ranks: list[Slots]
    """Micro-batches [ranks][slots]."""
    ends: list[float]
    """End of each rank's step; with ranks in lockstep a single one."""
    sizes: list[list[int]] | None = None
    """Under dynamic CP the context-parallel size of each micro-batch [ranks][slots]; one that ranks
    share is listed on each of them."""

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)


class Objective:
    """Simulates steps of a problem, and counts what that costs.

    With expert parallelism ranks run in lockstep: each slot is as slow as its slowest rank.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.whole = problem
        """The problem with all context-parallel sizes."""
        dims = problem.dims
        depth = dims.pipeline_parallel * dims.virtual_pipeline
        size = problem.num_samples + dims.data_parallel * depth
        self.effort = problem.config.plan_effort * math.sqrt(EFFORT * size * (4 + depth))
        passes = 1 if problem.forward_only else 2
        self._effort_per_slot = passes * depth
        if problem.schedule.which_cost:
            self.effort *= EFFORT_ON_UNEVEN_STAGES
        self._floor = max(step_time_floor(problem), way_of_longest(problem)) * GOOD_ENOUGH

    @property
    def spent(self) -> bool:
        """True if no effort is left."""
        return self.effort <= 0

    def cannot_be_beaten(self, end: float) -> bool:
        """True of an end before which no plan's step ends, or hardly."""
        return end <= self._floor

    def costs_together(self, ranks: Ranks) -> list[float]:
        """Costs of slots that ranks run together, each as slow as its slowest rank
        [slots * kinds of stages]."""
        costs = map(self.problem.slot_costs, ranks)
        return [max(slot) for slot in zip(*costs, strict=True)]

    def end_together(self, ranks: Ranks) -> float:
        """End of ranks whose slots run together; costs effort."""
        schedule = self.problem.schedule
        num_slots = len(ranks[0]) + schedule.dims.pipeline_parallel
        self.effort -= self._effort_per_slot * num_slots
        return Clock(self.costs_together(ranks), schedule).end

    def candidate(self, ranks: Ranks, sizes: Sequence[Sequence[int]] | None = None) -> Candidate:
        """A step of these micro-batches [ranks][slots], simulated; `sizes` under dynamic CP."""
        held = [[list(samples) for samples in slots] for slots in ranks]
        own = None if sizes is None else [list(of_rank) for of_rank in sizes]
        return Candidate(held, self._ends(held, sizes), own)

    def _ends(self, ranks: Ranks, sizes: Sequence[Sequence[int]] | None) -> list[float]:
        del sizes  # nothing is shared without dynamic CP: `SharedObjective` takes them
        groups = self.problem.dims.lockstep_groups
        return [self.end_together(ranks[group.start : group.stop]) for group in groups]
