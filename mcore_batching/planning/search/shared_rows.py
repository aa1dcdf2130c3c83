"""Steps in which ranks share micro-batches, simulated; for the search under dynamic CP.

Where experts are spread over ranks all ranks run every slot together, whoever shares what.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.pipeline import clocks_of
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective, Sizes
from mcore_batching.planning.search.steps import MOST_SLOTS_PER_STAGE

EFFORT_OF_A_PASS, EFFORT_OF_A_RANK = 2.0, 1.3
"""A pass of all ranks takes about as long as so many simulated passes of one, and so many more for
each rank."""
FEW_COUNTED = 1024
"""Steps of few samples take as much effort as those of so many at most."""
EFFORT_OF_SHARING = 4
"""So many times the effort, beside that for steps of one size: those that wait for each other are
simulated together, at several times the cost. Steps of 512 samples of mooncake_conv end 3 % sooner
than with 1, and 0.8 % later than with 16."""


class SharedObjective(Objective):
    """Simulates steps of a problem under dynamic CP, and counts what that costs.

    Its `problem` is that of micro-batches which nobody shares.

    Args:
        problem: under dynamic CP.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.on_ranks[1])
        self.whole = problem
        # Few samples get the effort of one for each slot of the longest step.
        slots = problem.num_ranks * problem.dims.pipeline_parallel * MOST_SLOTS_PER_STAGE
        few = problem.config.plan_effort * min(slots, FEW_COUNTED)
        self.effort = EFFORT_OF_SHARING * max(self.effort, few)
        self.max_inflight_tokens = problem.config.max_inflight_tokens
        self._floor = step_time_floor(problem) * (1.0 + 1e-9)

    def candidate(
        self, ranks: Sequence[Sequence[Sequence[int]]], sizes: Sizes | None = None
    ) -> Candidate:
        """A step of these micro-batches and sizes, simulated; all of 1 if there are none."""
        held = [[list(samples) for samples in slots] for slots in ranks]
        sizes = sizes or [[1] * len(slots) for slots in ranks]
        problems = self.whole.on_ranks
        costs = [
            [problems[size].cost(samples) for samples, size in zip(slots, own, strict=True)]
            for slots, own in zip(held, sizes, strict=True)
        ]
        (clock,) = clocks_of(costs, self.whole.on_ranks[1].schedule, sizes)
        ranks_told_apart = len(clock.ends)
        effort = EFFORT_OF_A_PASS / ranks_told_apart + EFFORT_OF_A_RANK
        self.effort -= clock.passes_run * (1.0 if self.lockstep else effort)
        return Candidate(held, clock.ends, sizes)
