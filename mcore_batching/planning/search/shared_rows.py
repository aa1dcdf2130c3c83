"""Steps in which ranks share micro-batches, simulated; for the search under dynamic CP.

Where experts are spread over ranks all ranks run every slot together, whoever shares what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.coupled_ranks import (
    Ends,
    blocks_of,
    coupled_chain,
    coupled_ends,
    coupled_passes,
)
from mcore_batching.planning.critical_path import critical_path
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import FEW_COUNTED, Objective, Slots

EFFORT_OF_A_PASS, EFFORT_OF_A_RANK = 2.0, 1.3
"""A pass of all ranks takes about as long as so many simulated passes of one, and so many more for
each rank."""
MORE_EFFORT = 1.0
"""Effort over that of a search without shared micro-batches: a step is simulated whole."""
LIKE_SAMPLES = 16
"""Effort of few samples is that of so many for each rank and stage."""
Sizes = list[list[int]]
"""Context-parallel size of each micro-batch [ranks][slots]."""


@dataclass
class SharedStep:
    """A whole step with micro-batches that ranks share, simulated."""

    ranks: list[Slots]
    """Micro-batches [ranks][slots]; a shared one is listed on each of its ranks."""
    sizes: Sizes
    """Their context-parallel sizes."""
    ends: list[float]
    """End of each rank's step."""

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)

    def frozen(self) -> tuple[tuple[MicroBatches, ...], tuple[tuple[int, ...], ...]]:
        """Micro-batches, samples ascending, and sizes, as a plan has them."""
        ranks = tuple(tuple(tuple(sorted(samples)) for samples in slots) for slots in self.ranks)
        return ranks, tuple(map(tuple, self.sizes))


class SharedObjective:
    """Simulates steps of a problem under dynamic CP, and counts what that costs.

    Args:
        problem: under dynamic CP.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.alone = Objective(problem.on_ranks[1])
        """Of micro-batches that nobody shares; its effort is that of the whole search."""
        steps = problem.num_ranks * problem.dims.pipeline_parallel
        few = problem.config.plan_effort * min(LIKE_SAMPLES * steps, FEW_COUNTED)
        self.alone.effort = int(MORE_EFFORT * max(self.alone.effort, few))
        self._floor = step_time_floor(problem) * (1.0 + 1e-9)
        self.lockstep = problem.dims.expert_parallel > 1
        dims = problem.dims
        self._passes_per_slot = (
            (1 if problem.forward_only else 2) * dims.pipeline_parallel * dims.virtual_pipeline
        )

    def cannot_be_beaten(self, end: float) -> bool:
        """True of an end before which no plan's step ends."""
        return end <= self._floor

    @property
    def effort(self) -> float:
        """Effort that is left."""
        return self.alone.effort

    def spend(self, effort: float) -> None:
        """Count effort."""
        self.alone.effort -= int(effort)

    def step(self, ranks: Sequence[Sequence[Sequence[int]]], sizes: Sizes) -> SharedStep:
        """A step of these micro-batches and sizes, simulated."""
        problem = self.problem
        costs = [
            [problem.on_ranks[size].cost(samples) for samples, size in zip(slots, own, strict=True)]
            for slots, own in zip(ranks, sizes, strict=True)
        ]
        held = [[list(samples) for samples in slots] for slots in ranks]
        return SharedStep(held, sizes, self._ends(costs, sizes))

    def _ends(self, costs: Sequence[Sequence[float]], sizes: Sizes) -> list[float]:
        problem = self.problem
        dims, forward_only = problem.dims, problem.forward_only
        if self.lockstep:
            slowest = [max(slot) for slot in zip(*costs, strict=True)]
            self.spend(self._passes_per_slot * len(slowest))
            end = pipeline_time(
                slowest,
                dims,
                backward_ratio=problem.cost_model.backward_ratio,
                forward_only=forward_only,
            )
            return [end] * len(costs)
        ends, _, _ = self.coupled(list(zip(*costs, strict=True)), blocks_of(sizes), chain=False)
        return ends

    def coupled(
        self,
        slot_costs: Sequence[Sequence[float]],
        slot_blocks: Sequence[Sequence[tuple[int, int]]],
        *,
        chain: bool = True,
        before: tuple[Ends, int] | None = None,
    ) -> tuple[list[float], dict[tuple[int, int], float], Ends]:
        """End of each of some ranks that wait for each other, and the chain of the latest, as
        `coupled_chain` gives it.

        Args:
            slot_costs: as in `coupled_passes`.
            slot_blocks: likewise.
            chain: False leaves it out.
            before: as in `coupled_passes`.

        Returns:
            ends, weights of the chain, and what `coupled_passes` gave (nothing for a single rank).
        """
        problem = self.problem
        dims, forward_only = problem.dims, problem.forward_only
        ratio, count = problem.cost_model.backward_ratio, len(slot_costs)
        passes = self._passes_per_slot * (count + dims.pipeline_parallel)
        if len(slot_costs[0]) == 1:
            self.spend(passes + passes // 2)
            end, weights = critical_path(
                [cost for (cost,) in slot_costs],
                dims,
                backward_ratio=ratio,
                forward_only=forward_only,
            )
            return [end], {(0, slot): weight for slot, weight in enumerate(weights)}, []
        if before is not None:
            passes -= passes * before[1] // (count + dims.pipeline_parallel)
        self.spend(passes * (EFFORT_OF_A_PASS + EFFORT_OF_A_RANK * len(slot_costs[0])))
        made = coupled_passes(
            slot_costs,
            slot_blocks,
            dims,
            backward_ratio=ratio,
            forward_only=forward_only,
            before=before,
        )
        ends = coupled_ends(made, dims, count, forward_only=forward_only)
        if not chain:
            return ends, {}, made
        latest = ends.index(max(ends))
        weights_of_chain = coupled_chain(
            made, latest, slot_blocks, dims, backward_ratio=ratio, forward_only=forward_only
        )
        return ends, weights_of_chain, made
