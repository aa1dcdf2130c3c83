"""Steps of one problem, made by dealing samples to targets in rounds.

A step has a number of slots and a size of its first slots. In each round samples are dealt to the
targets of all ranks (`targets`, `deal`) and the step is simulated; ranks that end late get less
work in the next, since one that holds a very long sample waits for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import by_folds
from mcore_batching.planning.search.deal import deal, settle
from mcore_batching.planning.search.lockstep_targets import Samples, lockstep_targets
from mcore_batching.planning.search.objective import Candidate, Objective, Slots
from mcore_batching.planning.search.targets import Kind, Targets, all_targets

FIRSTS = (0.06, 0.1, 0.16, 0.25, 0.4, 0.6)
"""Sizes of the first slot over the plateau that are tried. With one of them alone steps end 0.5 %
later."""
USUAL = 0.25
"""The one by which numbers of slots are compared. With 0.16 or 0.4 steps end up to 0.05 % later."""
EVEN = 1.0
"""All slots equally large."""
DAMPING = 0.7
"""Share of a rank's lateness that its work is cut by in the next round. With 0.35 or 1.0 the mean
moves by 0.01 %, single steps by 0.3 %."""
CLEARLY_SOONER = 0.995
"""Rounds go on while each gains 0.5 %. With 1 % or 0.25 % the mean moves by 0.01 %."""
SMALL = 8
"""The cheapest eighth of the samples are small; each slot is to hold at least their mean. With a
fourth or a sixteenth the mean moves by 0.01 %."""
MOST_SLOTS_PER_STAGE = 16
"""Most micro-batches tried per stage: beyond them the bubble is under a sixteenth."""
STEPS_OF_COUNTS = 7
"""Numbers of slots tried grow by a seventh each. By a fourth, steps end 0.08 % later in the mean;
by a fourteenth, no sooner."""


class Steps:
    """Makes steps of a problem.

    Args:
        objective: of the steps; its effort is used.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._problem = problem = objective.problem
        self.ranks = problem.dims.data_parallel
        self.order = by_cost(range(problem.num_samples), problem.costs)
        """Samples, costliest first."""
        fixed = problem.cost_model.per_micro_batch
        self.alone = [problem.costs[sample] + fixed for sample in self.order]
        """Costs of micro-batches of each of them alone."""
        small = self.alone[-max(1, len(self.order) // SMALL) :]
        self._least = ordered_sum(small) / max(1, len(small))
        self._work = ordered_sum(problem.costs) / self.ranks
        self.made: dict[Kind, Sequence[float]] = {}
        """Kinds that steps were made of, and the work that each rank, or all of a lockstep group,
        is to have beyond the mean in the next round [lockstep groups]."""
        self.best: dict[Kind, Candidate] = {}
        """The step of each that ends first."""
        self.perfect = False
        """True once a step was made that no plan's ends before."""

    @cached_property
    def _samples(self) -> Samples:
        """As in `lockstep_targets`."""
        problem, filled = self._problem, []
        cost = tokens = 0.0
        for sample, alone in zip(reversed(self.order), reversed(self.alone), strict=True):
            room = max(0.0, problem.capacity - problem.tokens[sample])
            filled.append(alone + (room * cost / tokens if tokens else 0.0))
            cost += problem.costs[sample]
            tokens += problem.tokens[sample]
        shares = (problem.costs[sample] / self.ranks for sample in self.order)
        return Samples(self.alone, filled[::-1], list(itertools.accumulate(shares)))

    def counts(self) -> list[int]:
        """Numbers of slots to try, from the fewest that may hold the samples."""
        problem = self._problem
        return useful_counts(problem.fewest_rows, problem.num_samples, self.ranks, problem.dims)

    @property
    def soonest(self) -> list[Kind]:
        """The kinds of the best steps, the one whose step ends first before the others."""
        return sorted(self.best, key=lambda kind: (self.best[kind].end, kind))

    def make(self, kind: Kind, *, in_vain: int = 1, like: Kind | None = None) -> None:
        """Make steps of a kind, in rounds until `in_vain` in a row made one end hardly sooner;
        `like` is a kind whose ranks are already even, to begin with."""
        if kind not in self.made:
            groups = self._problem.dims.lockstep_groups
            self.made[kind] = self.made[like] if like else [0.0] * len(groups)
        left, before = in_vain, math.inf
        while left:
            end = self._round(kind)
            if end is None:
                break
            if self.objective.cannot_be_beaten(end):
                self.perfect = True
                break
            left = in_vain if end < CLEARLY_SOONER * before else left - 1
            before = min(before, end)
            if len(self.made[kind]) == 1 or self.objective.spent:
                break

    def folded(self, num_slots: int) -> Candidate | None:
        """The step of as many samples on each rank, as even as that goes; None if they do not fit
        into the slots."""
        problem = self._problem
        per_rank = max(1, -(-problem.num_samples // self.ranks))
        ranks: list[Slots] = []
        for samples in by_folds(problem.costs, self.ranks, per_rank):
            work = num_slots * problem.cost_model.per_micro_batch
            work += ordered_sum(problem.costs[sample] for sample in samples)
            even = [[work / num_slots] * num_slots]
            dealt = deal(by_cost(samples, problem.costs), even, self.objective)
            if dealt is None:
                return None
            ranks += dealt
        return self.objective.candidate([settle(slots, problem.costs) for slots in ranks])

    def _round(self, kind: Kind) -> float | None:
        """The end of the step of one more deal; None if samples do not fit into slots."""
        objective = self.objective
        ranks = deal(self.order, self._targets(kind), objective)
        if ranks is None:
            return None
        step = objective.candidate(self._arranged(ranks))
        mean = ordered_sum(step.ends) / len(step.ends)
        passes = self._problem.schedule.cost_of_passes
        self.made[kind] = [
            more - DAMPING * (end - mean) / passes
            for more, end in zip(self.made[kind], step.ends, strict=True)
        ]
        if kind not in self.best or step.end < self.best[kind].end:
            self.best[kind] = step
        return step.end

    def _targets(self, kind: Kind) -> list[list[float]]:
        problem = self._problem
        work = self._work + kind.num_slots * problem.cost_model.per_micro_batch
        targets = Targets(self.objective, kind, self._least)
        if problem.dims.in_lockstep:
            return [lockstep_targets(targets, work, self._samples, self.objective)] * self.ranks
        return all_targets(targets, [work + more for more in self.made[kind]], self.alone)

    def _arranged(self, slots: list[Slots]) -> list[Slots]:
        """The slots of all ranks without needless placeholders, in an order that ends
        soon."""
        settled = [settle(rank, self._problem.costs) for rank in slots]
        arranged: list[Slots] = []
        for group in self._problem.dims.lockstep_groups:
            arranged += self._soonest_order(settled[group.start : group.stop])
        return arranged

    def _soonest_order(self, ranks: list[Slots]) -> list[Slots]:
        """The slots of ranks that run together, those of each group of micro-batches the cheapest
        first; if some are placeholders as they are, or these before all others."""
        if not all(map(all, ranks)):
            orders = [ranks, *(self._sorted(ranks, times) for times in (0.0, 1.0, -1.0))]
            return min(orders, key=self.objective.end_together)
        group = self._problem.dims.slots_per_group
        flat = self.objective.costs_together(ranks)
        each = self._problem.schedule.num_costs
        costs = [flat[at : at + each] for at in range(0, len(flat), each)]
        order = sorted(range(len(costs)), key=lambda slot: (slot // group, costs[slot], slot))
        return [[slots[at] for at in order] for slots in ranks]

    def _sorted(self, ranks: list[Slots], times: float) -> list[Slots]:
        """Placeholders first, then by `times` the cost."""

        def key(own: Sequence[int]) -> tuple[bool, float]:
            return bool(own), times * self._problem.cost(own)

        return [sorted(slots, key=key) for slots in ranks]


def by_cost(samples: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The samples, costliest first, ties in index order."""
    return sorted(samples, key=lambda sample: (-costs[sample], sample))


def useful_counts(rows: int, samples: int, ranks: int, dims: ParallelDims) -> list[int]:
    """Numbers of slots to try for so many samples on all ranks, which need so many rows."""
    fewest = -(-rows // ranks)
    if dims.pipeline_parallel == 1:
        # No bubble to shrink: further micro-batches only cost more.
        return [max(1, fewest) + extra for extra in range(3)]
    most = min(-(-samples // ranks), MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
    return steps_of_counts(fewest, most, dims)


def steps_of_counts(fewest: int, most: int, dims: ParallelDims) -> list[int]:
    """Numbers of slots that the schedule can run, from the fewest to the most; one at least."""
    most = dims.round_up_num_microbatches(most)
    counts = [dims.round_up_num_microbatches(fewest)]
    while counts[-1] < most:
        further = counts[-1] * (STEPS_OF_COUNTS + 1) // STEPS_OF_COUNTS
        counts.append(min(most, dims.round_up_num_microbatches(max(counts[-1] + 1, further))))
    return counts


def thinned(steps: Steps, ranks: int) -> Steps:
    """Steps of about `ranks` of the ranks, and that share of the samples, from which much is learnt
    about those of all."""
    problem = steps.objective.problem
    one_in = steps.ranks // ranks
    few = steps.ranks // one_in
    dims = dataclasses.replace(
        problem.dims, data_parallel=few, expert_parallel=few if problem.dims.in_lockstep else 1
    )
    # From the middle of every `one_in`: with the first of each the few ranks would have more work
    # each than a rank has.
    samples = problem.subset(steps.order[one_in // 2 :: one_in])
    objective = Objective(dataclasses.replace(samples, dims=dims))
    objective.effort = steps.objective.effort
    return Steps(objective)
