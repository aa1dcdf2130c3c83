"""The search under dynamic CP: a context-parallel size for each sample, beside targets.

    limit     each sample has the least size that brings its cost below
    shared    samples of sizes above 1, each in a micro-batch of its own; laid out in as few slots
              as hold them, which take the largest places of a profile except for a few
    own       all others, assigned to the targets of the slots left, so that shared and own work is
              even

1. Limits from the costliest sample down, numbers of slots and first sizes are judged by the targets
   of a mean rank, then what differs from the best in one part, as long as that is better; the steps
   of the best are made.
2. Steps in which every micro-batch has one size come from the search without dynamic CP.
3. Single samples are moved in those made, then in the best of all.

Where experts are spread over ranks all ranks run every slot together, whichever rows are shared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from mcore_batching.planning.clock import Clock
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.assign import Slots, assign, by_cost, fill_empty_slots
from mcore_batching.planning.search.moves import improve
from mcore_batching.planning.search.objective import Objective, Step
from mcore_batching.planning.search.rounds import (
    MOST_MOVED,
    MOST_SLOTS_PER_STAGE,
    improve_few,
    useful_counts,
)
from mcore_batching.planning.search.targets import STEEP, Targets

LIMIT_STEP = math.sqrt(math.sqrt(0.5))
"""Limits below the costliest sample, four for each halving; with one, steps end 0.4 % later, single
ones 3 %."""
SKIPS = 0.1, 0.3
"""Shares of the slots, the largest, that no ranks share, beside 0; with 0 alone long samples' steps
end 1 % later."""
MOST_MADE = 12
"""Steps that are made; with 4 steps end 0.5 % later, single ones 8 %."""
BUDGET_OF_SHARING = 3
"""The budget is 3 times that of a step without dynamic CP; with 4 times steps end 0.1 % sooner for
20 % more CPU time."""
LITTLE_EFFORT = 250
"""Most `plan_effort` with which one size is tried; all of it if the best step has that size alone.
With all of it for each, steps end no sooner for 30 % more CPU time."""

SharedStep = tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
"""Micro-batches and their context-parallel sizes [ranks][slots]."""


class CpAssignment(NamedTuple):
    """All that decides about a step before single samples are moved."""

    limit: int
    """Number of the layout."""
    num_slots: int
    first: float = 1.0
    """First slot over the usual."""
    skip: float = 0.0
    """Share of the slots that no ranks share, the largest of the profile, which are larger than the
    shared ones."""


class Layout(NamedTuple):
    """Samples under a limit, the shared ones in slots."""

    sizes: tuple[int, ...]
    """Context-parallel size of each sample [samples]."""
    layers: list[list[tuple[int, int, float]]]
    """First rank, sample and cost of each shared micro-batch [slots][micro-batches], the slot of
    the costliest first."""
    means: list[float]
    """Mean cost of each of these slots, over the ranks that share it [slots]."""
    own: list[int]
    """The samples that no ranks share, costliest first."""
    work: float
    """Mean cost of all over ranks."""
    counts: list[int]
    """Numbers of slots to try."""


def search_dynamic(
    problem: Problem, start: SharedStep, of_one_size: Callable[[Problem], list[Slots]]
) -> Step:
    """The step that ends first of those found.

    It ends no later than `start`, and than any that the search without dynamic CP, `of_one_size`,
    finds with `LITTLE_EFFORT` for a size that all samples fit under.

    Args:
        problem: under dynamic CP, with a sample or more.
        start: a legal step.
        of_one_size: the search without dynamic CP.
    """
    objective, effort = shared_objective(problem), problem.config.plan_effort
    found = improve_few([objective.step(*start), *SharedSteps(objective).best()], objective)
    for size in problem.row_sizes:
        floor = step_time_floor(problem.on_ranks[size])
        if size >= max(problem.least_sizes) and floor < min(step.end for step in found):
            rows = _searched(problem.on_ranks[size], size, min(effort, LITTLE_EFFORT), of_one_size)
            found.append(objective.step(*rows))
    best = min(found, key=attrgetter("end"))
    places = zip(chain(*best.ranks), chain(*best.sizes or []), strict=True)
    size, *others = {size for samples, size in places if samples}
    if others:
        return improve(best, objective)
    # Of one size, ranks that share no rows or all are best searched for by themselves.
    if effort <= LITTLE_EFFORT:
        return best
    searched = objective.step(*_searched(problem.on_ranks[size], size, effort, of_one_size))
    return min(best, searched, key=attrgetter("end"))


def _searched(
    problem: Problem, size: int, effort: int, of_one_size: Callable[[Problem], list[Slots]]
) -> tuple[list[Slots], list[list[int]]]:
    """Micro-batches, all of one size, that are searched for with this effort, and their sizes."""
    config = dataclasses.replace(problem.config, plan_effort=effort)
    found = of_one_size(dataclasses.replace(problem, config=config))
    slots = [of_rank for of_rank in found for _ in range(size)]
    # Placeholders are those of one rank.
    return slots, [[size if own else 1 for own in of_rank] for of_rank in slots]


def shared_objective(problem: Problem) -> Objective:
    """The objective of a problem under dynamic CP."""
    objective = Objective(problem.on_ranks[1])
    objective.whole = problem
    objective.budget *= BUDGET_OF_SHARING
    objective.floor = step_time_floor(problem) * (1.0 + 1e-9)
    return objective


class SharedSteps:
    """Makes steps of context-parallel assignments."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._problem = objective, objective.whole
        self._costs = objective.problem.costs
        self._order = by_cost(range(self._problem.num_samples), self._costs)
        self._targets: dict[int, Targets] = {}
        self._judged: dict[CpAssignment, float] = {}
        # A single stage has no use for sizes of slots that differ, nor for another order.
        is_deep = self._problem.dims.pipeline_parallel > 1
        self._firsts = [1.0, STEEP] if is_deep else [1.0]
        self._skips = [0.0, *SKIPS] if is_deep else [0.0]
        self.layouts = self._layouts()

    def best(self) -> list[Step]:
        """The steps judged best of those with samples that fit."""
        new = [
            CpAssignment(limit, count, first)
            for limit, layout in enumerate(self.layouts)
            for count in layout.counts
            for first in self._firsts
        ]
        while new:
            self._judged |= {each: self.judge(each) for each in new}
            order = sorted(self._judged, key=lambda each: (self._judged[each], each))
            best: dict[int, CpAssignment] = {}
            for each in order:
                best.setdefault(each.num_slots, each)
            near = chain(*map(self._neighbors, list(best.values())[:MOST_MOVED]))
            new = [each for each in near if each not in self._judged]
        return list(islice(filter(None, map(self.make, order)), MOST_MADE))

    def _neighbors(self, assignment: CpAssignment) -> Iterable[CpAssignment]:
        """Assignments that differ in one part."""
        for limit in (assignment.limit - 1, assignment.limit + 1):
            if 0 <= limit < len(self.layouts):
                yield assignment._replace(limit=limit)
        for count in range(max(1, assignment.num_slots - 2), assignment.num_slots + 3):
            near = self._problem.dims.round_up_num_microbatches(count)
            yield assignment._replace(num_slots=near)
        for skip in self._skips:
            yield assignment._replace(skip=skip)
        for first in self._firsts:
            yield assignment._replace(first=first)

    def _layouts(self) -> list[Layout]:
        """The layout under each limit."""
        limit = max(self._costs)
        least = min(filter(None, self._costs), default=limit)
        found = {sizes: self._layout(sizes) for sizes in [self.sizes_under(limit)]}
        # Under the lowest limits shared rows need more slots than a step has use for.
        most = MOST_SLOTS_PER_STAGE * self._problem.dims.pipeline_parallel
        while limit > least:
            limit *= LIMIT_STEP
            layout = self._layout(self.sizes_under(limit))
            if layout.counts[0] > most:
                break
            found[layout.sizes] = layout
        return list(found.values())

    def sizes_under(self, limit: float) -> tuple[int, ...]:
        """The least size of each sample that its length needs and that brings its cost to a limit
        or below, if one does."""
        problem = self._problem
        sizes = list(problem.least_sizes)
        for sample in self._order:
            if self._costs[sample] <= limit:
                break
            for size in problem.row_sizes:
                if size >= sizes[sample]:
                    sizes[sample] = size
                    if problem.on_ranks[size].costs[sample] <= limit:
                        break
        return tuple(sizes)

    def _layout(self, sizes: tuple[int, ...]) -> Layout:
        """The shared samples of these sizes in as few slots as hold them."""
        problem, ranks = self._problem, self._problem.num_ranks
        shared = [sample for sample in self._order if sizes[sample] > 1]
        layers = [
            [(first, i, problem.on_ranks[sizes[i]].cost([i])) for first, i in layer]
            for layer in layers_of(shared, sizes, ranks)
        ]
        layers.sort(key=lambda layer: -max(cost for *_, cost in layer))
        works = [ordered_sum(sizes[i] * cost for _, i, cost in layer) for layer in layers]
        places = [sum(sizes[i] for _, i, _ in layer) for layer in layers]
        means = [work / many for work, many in zip(works, places, strict=True)]
        own = [sample for sample in self._order if sizes[sample] == 1]
        work = ordered_sum(works) + ordered_sum(self._costs[sample] for sample in own)
        rows = self._objective.problem.subset(own).fewest_rows + sum(places)
        counts = useful_counts(rows, len(own) + sum(places), ranks, problem.dims)
        return Layout(sizes, layers, means, own, work / ranks, counts)

    def judge(self, assignment: CpAssignment) -> float:
        """About the end of the step, if samples could be cut to what each slot of the mean rank is
        to cost; infinite if the shared ones do not fit."""
        layout, problem = self.layouts[assignment.limit], self._objective.problem
        if len(layout.layers) > assignment.num_slots:
            return math.inf
        profile, slots = self._profile(assignment)
        shared = dict(zip(slots, layout.means, strict=True))
        costs = self._costs_of_slots(profile, shared, layout.work)
        free = [slot for slot in range(len(costs)) if slot not in shared]
        if free and layout.own:
            top = max(free, key=costs.__getitem__)
            costs[top] = max(costs[top], problem.cost(layout.own[:1]))
        on_stages = [cost * ratio for cost in costs for ratio in problem.cost_ratios]
        clock = Clock(on_stages, problem.schedule)
        self._objective.budget -= clock.num_passes
        return clock.end

    def make(self, assignment: CpAssignment) -> Step | None:
        """The step of an assignment, simulated; None if its samples do not fit."""
        layout, ranks = self.layouts[assignment.limit], range(self._problem.num_ranks)
        if len(layout.layers) > assignment.num_slots:
            return None
        profile, slots = self._profile(assignment)
        rows: list[Slots] = [[[] for _ in profile] for _ in ranks]
        sizes = [[1 for _ in profile] for _ in ranks]
        shared = [dict[int, float]() for _ in ranks]
        for slot, layer in zip(slots, layout.layers, strict=True):
            for first, sample, cost in layer:
                size = layout.sizes[sample]
                for rank in range(first, first + size):
                    rows[rank][slot], sizes[rank][slot] = [sample], size
                    shared[rank][slot] = cost
        wanted = [self._costs_of_slots(profile, of_rank, layout.work) for of_rank in shared]
        for of_rank, costs in zip(shared, wanted, strict=True):
            for slot in of_rank:
                costs[slot] = -1.0  # nothing is assigned there
        assigned = assign(layout.own, wanted, self._objective.problem)
        if assigned is None:
            return None
        for slots_of, own in zip(rows, assigned, strict=True):
            free = [slot for slot, samples in enumerate(slots_of) if not samples]
            filled = fill_empty_slots([own[slot] for slot in free], self._costs)
            for slot, samples in zip(free, filled, strict=True):
                slots_of[slot] = samples
        make_last_real(rows, sizes)
        return self._objective.step(rows, sizes)

    def _profile(self, assignment: CpAssignment) -> tuple[list[float], list[int]]:
        """Relative sizes of slots [slots], and the slots that ranks share, the largest first."""
        count, shared = assignment.num_slots, len(self.layouts[assignment.limit].layers)
        if count not in self._targets:
            self._targets[count] = Targets(self._objective.problem, count, 0.0)
        profile, _ = self._targets[count].shape(count, assignment.first)
        largest = sorted(range(count), key=lambda slot: (-profile[slot], slot))
        skipped = round(assignment.skip * (count - shared))
        return profile, largest[skipped : skipped + shared]

    def _costs_of_slots(
        self, profile: Sequence[float], shared: dict[int, float], work: float
    ) -> list[float]:
        """Target cost of each slot of a rank [slots]: given for shared ones {slot: cost}, for the
        others the rest of the rank's work in proportion to the profile."""
        rest = max(0.0, work - ordered_sum(shared.values()))
        whole = ordered_sum(size for slot, size in enumerate(profile) if slot not in shared)
        fixed = self._problem.cost_model.per_micro_batch
        return [
            shared[slot] if slot in shared else fixed + rest * size / whole
            for slot, size in enumerate(profile)
        ]


def layers_of(
    samples: Sequence[int], sizes: Sequence[int], ranks: int
) -> list[list[tuple[int, int]]]:
    """First rank and sample of shared rows, of these context-parallel sizes [samples], in as few
    slots as hold them [slots][rows]; all but the last are full."""
    layers: list[list[tuple[int, int]]] = []
    place = 0  # counts ranks through the slots
    # By descending size every row begins at a multiple of its size, since all before it are
    # multiples of that.
    for sample in sorted(samples, key=lambda sample: -sizes[sample]):
        if place % ranks == 0:
            layers.append([])
        layers[-1].append((place % ranks, sample))
        place += sizes[sample]
    return layers


def make_last_real(rows: list[Slots], sizes: list[list[int]]) -> None:
    """Put the slot that most ranks share last where a rank has a placeholder there that it need
    not have; one that then has a placeholder there, a micro-batch of its own."""
    count = len(rows[0])
    if not any(any(slots) and not slots[-1] for slots in rows):
        return
    shared = max(range(count), key=lambda slot: (sum(of[slot] > 1 for of in sizes), slot))
    for slots, own in zip(rows, sizes, strict=True):
        slots[shared], slots[-1] = slots[-1], slots[shared]
        own[shared], own[-1] = own[-1], own[shared]
        if not slots[-1]:
            # A micro-batch that no ranks share may run in any of the rank's own slots.
            alone = [slot for slot in range(count) if own[slot] == 1 and slots[slot]]
            last = alone[-1] if alone else -1
            slots[last], slots[-1] = slots[-1], slots[last]
