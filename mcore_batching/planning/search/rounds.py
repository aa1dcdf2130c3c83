"""Rounds: samples are assigned to targets, the step is simulated, late ranks get less work.

A step is made for each of several numbers of slots, in rounds:

    targets → assign → simulate → ranks that end late get less work in the next round

1. Numbers of slots a third apart, then those between the best two and their neighbours, until
   these are a twelfth apart.
2. Single samples are moved in the best four (`moves`), then in the best alone.

With many ranks, some of these stand for all in 1. A step that no plan beats ends the search. Work
is counted in simulated passes, never in time, so the same input gives the same plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import by_folds
from mcore_batching.planning.search.assign import Slots, assign, by_cost, fill_empty_slots
from mcore_batching.planning.search.moves import improve
from mcore_batching.planning.search.objective import Objective, Ranks, Step
from mcore_batching.planning.search.targets import Targets, even_ranks

COST_OF_ASSIGNING = 6
"""Assigning one sample counts as 6 simulated passes, about its CPU time."""
DAMPING = 0.7
"""Share of a rank's lateness that its work is cut by in the next round; with 1, uniform or mostly
equal lengths end 0.3 % later."""
EVEN = 1.005
"""Rounds go on until the latest rank ends within 0.5 % of the mean one, or one gains less; until
one gains nothing, uneven stages end 0.1 % later, as moves have less of the budget."""
SMALL = 8
"""The cheapest eighth of the samples are small; each slot is to hold at least their mean. With the
cheapest sample instead steps end 0.15 % later, single ones 3 %."""
MOST_SLOTS_PER_STAGE = 16
"""Most micro-batches tried per stage; with 8, steps under tight caps end 0.7 % later."""
COARSE = 3
"""The first numbers of slots grow by a third each, two at least; then those between are tried,
halving twice."""
MOST_MOVED = 4
"""Steps, of different numbers of slots, in which samples are moved before the best goes on, with
a third of the budget that is left: with the best alone 0.1 % later, single ones 2.9 %."""
FEW_RANKS, FEW_SAMPLES = 8, 512
"""Numbers are compared on 8 of the ranks, or as many as hold 512 samples, with that share of the
samples, unless that is more than half of the ranks. Without, the budget buys few rounds of 65,536
samples on 512 ranks: steps of like lengths end 5 % later, others up to 3 % sooner; on 32 ranks as
soon. With one rank, 16,384 samples on one stage take 2 × as long."""


class Rounds:
    """Makes steps of a problem.

    Args:
        objective: of the steps; its budget is used.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective, self._problem = objective, objective.problem
        problem = objective.problem
        self.ranks = problem.dims.data_parallel
        self.order = by_cost(range(problem.num_samples), problem.costs)
        """Samples, costliest first."""
        fixed = problem.cost_model.per_micro_batch
        self._alone = [problem.costs[sample] + fixed for sample in self.order]
        small = self._alone[-max(1, len(self.order) // SMALL) :]
        self._least = ordered_sum(small) / max(1, len(small))
        self._work = ordered_sum(problem.costs) / self.ranks
        self._targets_of: dict[int, Targets] = {}
        self.works: dict[int, list[float]] = {}
        """For each number of slots tried, the work that each rank, or all of a lockstep group, is
        to have in the next round."""
        self._longest: dict[int, list[float]] = {}
        """For each number of slots tried, the cost of each rank's longest sample, alone."""
        self.best: dict[int, Step] = {}
        """The step of each number of slots that ends first."""

    @property
    def is_done(self) -> bool:
        """True once a step was made that no plan's ends before, or one was and the budget is
        spent."""
        spent = self.objective.budget <= 0
        return any(spent or self.objective.is_best(step.end) for step in self.best.values())

    def soonest(self) -> list[int]:
        """The numbers of slots tried, by the end of their best step."""
        return sorted(self.best, key=lambda count: (self.best[count].end, count))

    def make(self, count: int) -> None:
        """Make steps of so many slots, in rounds until one makes the step end hardly sooner."""
        before = math.inf
        # Without a rise and a fall samples are best spread by differencing; rounds may do better.
        step = None if self._problem.schedule.alternates else self._folded(count)
        while step is None or not self.objective.is_best(step.end):
            step = self._round(count)
            if step is None or self.objective.budget <= 0:
                return
            mean = ordered_sum(step.ends) / len(step.ends)
            if step.end < EVEN * mean or step.end >= before / EVEN:
                return
            before = step.end

    def compare(self, fewest: int) -> None:
        """Make steps of numbers of slots far apart, then of those halfway between the best two and
        the numbers beside them, until the budget is spent."""
        problem = self._problem
        rows = max(problem.fewest_rows, fewest * self.ranks)
        near = useful_counts(rows, problem.num_samples, self.ranks, problem.dims)
        while new := sorted(set(near) - self.works.keys()):
            for count in new:
                if self.is_done:
                    return
                self.make(count)
            counts = sorted(self.works)
            places = [counts.index(count) for count in self.soonest()[:2]]
            pairs = [pair for at in places for pair in pairwise(counts[max(0, at - 1) : at + 2])]
            # Nearer numbers differ by chance alone, and the best are to differ.
            near = [(a + b) // 2 for a, b in pairs if b - a > a // (4 * COARSE)]
            near = list(map(problem.dims.round_up_num_microbatches, near))

    def _round(self, count: int) -> Step | None:
        """The step of one more assignment; None if samples do not fit into slots."""
        problem = self._problem
        self.objective.budget -= COST_OF_ASSIGNING * len(self.order)
        targets = self._targets(count)
        ranks = assign(self.order, targets, problem)
        if ranks is None:
            return None
        step = self.objective.step(list(map(self._arranged, ranks, targets)))
        mean = ordered_sum(step.ends) / len(step.ends)
        passes = problem.schedule.cost_of_passes
        self.works[count] = [
            work - DAMPING * (end - mean) / passes
            for work, end in zip(self.works[count], step.ends, strict=True)
        ]
        return self._added(count, step)

    def _added(self, count: int, step: Step) -> Step:
        if count not in self.best or step.end < self.best[count].end:
            self.best[count] = step
        return step

    def _targets(self, count: int) -> list[list[float]]:
        problem = self._problem
        if count not in self._targets_of:
            self._targets_of[count] = Targets(problem, count, self._least)
        targets = self._targets_of[count]
        if count not in self.works:
            groups = len(problem.dims.lockstep_groups)
            work = self._work + count * problem.cost_model.per_micro_batch
            self.works[count], self._longest[count] = even_ranks(targets, work, groups, self._alone)
        made = [
            targets.of_rank(max(work, longest), longest)
            for work, longest in zip(self.works[count], self._longest[count], strict=True)
        ]
        return made * self.ranks if problem.dims.in_lockstep else made

    def _arranged(self, slots: Slots, sizes: Sequence[float]) -> Slots:
        """A rank's slots without needless placeholders, as large in the order of their targets;
        of equal targets, the slots further inside are larger."""
        problem = self._problem
        filled = fill_empty_slots(slots, problem.costs)
        if not all(filled):
            # Placeholders delay others least while the pipeline fills.
            return sorted(filled, key=bool)
        if problem.dims.in_lockstep or not problem.schedule.order_matters:
            return filled
        inside = [min(at, len(sizes) - 1 - at) for at in range(len(sizes))]
        places = sorted(range(len(sizes)), key=[*zip(sizes, inside, strict=True)].__getitem__)
        by_place = sorted(zip(places, sorted(filled, key=problem.cost), strict=True))
        return [own for _, own in by_place]

    def _folded(self, count: int) -> Step | None:
        """The step of samples assigned to ranks in equal numbers, as evenly as that goes; None if
        they do not fit into the slots. Without, steps of long and short samples on one stage end
        2 % later, on many ranks 3 %, and take three times as long to plan."""
        problem = self._problem
        self.objective.budget -= COST_OF_ASSIGNING * len(self.order)
        ranks: list[Slots] = []
        for samples in self._even_in_number:
            even = problem.cost(samples) / count + problem.cost_model.per_micro_batch
            assigned = assign(samples, [[even] * count], problem)
            if assigned is None:
                return None
            ranks.append(fill_empty_slots(assigned[0], problem.costs))
        return self._added(count, self.objective.step(ranks))

    @cached_property
    def _even_in_number(self) -> list[list[int]]:
        """Samples of each rank, as many on all, costliest first."""
        costs = self._problem.costs
        folds = by_folds(costs, self.ranks, -(-len(costs) // self.ranks))
        return [by_cost(samples, costs) for samples in folds]


def useful_counts(rows: int, samples: int, ranks: int, dims: ParallelDims) -> list[int]:
    """Numbers of slots to try for so many samples on all ranks, which need so many rows."""
    fewest = max(1, -(-rows // ranks))
    if dims.pipeline_parallel == 1:
        # No bubble to shrink: further micro-batches only cost more.
        return [fewest, fewest + 1, fewest + 2]
    most = min(-(-samples // ranks), MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
    most = dims.round_up_num_microbatches(most)
    counts = [dims.round_up_num_microbatches(fewest)]
    while counts[-1] < most:
        further = counts[-1] * (COARSE + 1) // COARSE
        counts.append(min(most, dims.round_up_num_microbatches(max(counts[-1] + 2, further))))
    return counts


def thinned(rounds: Rounds, ranks: int) -> Rounds:
    """Rounds of about `ranks` of the ranks, and that share of the samples, from which much is
    learnt about all."""
    problem = rounds.objective.problem
    one_in = rounds.ranks // ranks
    few = rounds.ranks // one_in
    dims = dataclasses.replace(
        problem.dims, data_parallel=few, expert_parallel=few if problem.dims.in_lockstep else 1
    )
    # From the middle of every `one_in`: with the first of each the few ranks would have more work.
    samples = problem.subset(rounds.order[one_in // 2 :: one_in])
    objective = Objective(dataclasses.replace(samples, dims=dims))
    objective.budget = rounds.objective.budget
    return Rounds(objective)


def search(objective: Objective, starts: Iterable[Ranks]) -> list[Slots]:
    """Look for the step that ends first.

    Args:
        objective: of the step; its budget is used up at most.
        starts: legal plans [ranks][slots]; the result ends no later than any of them.

    Returns:
        every rank's slots, the same number for each.
    """
    found = list(map(objective.step, starts))
    # A start may be as good as the bound; then nothing is left to look for.
    if not any(objective.is_best(step.end) for step in found):
        fewest = min((len(step.ranks[0]) for step in found), default=1)
        found += _made(objective, fewest)
    best = min(improve_few(found, objective), key=lambda step: step.end)
    return improve(best, objective).ranks


def _made(objective: Objective, fewest: int) -> list[Step]:
    """Steps of the numbers of slots that do best; fewer than `fewest` hardly hold the samples."""
    whole = rounds = Rounds(objective)
    per_rank = max(1, objective.problem.num_samples) / whole.ranks
    few = max(FEW_RANKS, math.ceil(FEW_SAMPLES / per_rank))
    if whole.ranks < 2 * few:
        rounds.compare(fewest)
        return list(whole.best.values())
    rounds = thinned(whole, few)
    rounds.compare(fewest)
    objective.budget = rounds.objective.budget
    for count in rounds.soonest()[:MOST_MOVED]:
        if not whole.is_done:
            whole.make(count)
    return list(whole.best.values())


def improve_few(found: Sequence[Step], objective: Objective) -> list[Step]:
    """The best steps of different numbers of slots, after single samples were moved in each with a
    share of the budget."""
    # Of each number of slots one: steps of one number differ by what moves change anyway.
    of_count: dict[int, Step] = {}
    for step in sorted(found, key=attrgetter("end")):
        of_count.setdefault(len(step.ranks[0]), step)
    steps = list(of_count.values())[:MOST_MOVED]
    if len(steps) == 1 or objective.is_best(steps[0].end):
        return steps
    share = objective.budget / (3 * MOST_MOVED)
    return [improve(step, objective, keep=objective.budget - share) for step in steps]
