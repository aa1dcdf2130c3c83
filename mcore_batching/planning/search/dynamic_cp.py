"""The search under dynamic CP: a context-parallel size for each sample, beside targets.

    sizes     each sample's context-parallel size
    shared    samples of sizes above 1, each in a micro-batch of its own; laid out in as few slots
              as hold them, which take the largest places of a profile except for a few
    own       all others, assigned to the targets of the slots left, so that shared and own work is
              even

1. Under limits from the costliest sample down, each sample has the least size that brings its cost
   below. Limits, numbers of slots and first sizes are judged by simulated targets, then what
   differs from the best in one part, as long as that is better; the steps of the best are made.
2. Steps in which every micro-batch has one size come from the search without dynamic CP.
3. Single samples are moved in these, then in the best of all.

Where experts are spread over ranks all ranks run every slot together, whichever rows are shared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from mcore_batching.planning.clock import clocks_of
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
    useful_counts,
)
from mcore_batching.planning.search.targets import STEEP, Targets

LIMIT_STEP = math.sqrt(math.sqrt(0.5))
"""Limits below the costliest sample, four for each halving."""
SKIPS = 0.0, 0.05, 0.15, 0.3
"""Shares of the slots, the largest, that no ranks share; with 0 and 0.15 alone steps end 0.2 %
later."""
FIRSTS = 1.0, 0.5, STEEP
"""First slots over the usual that are tried; without the second steps end 0.7 % later."""
BUDGET_OF_SHARING = 2
"""The budget is twice that of a step without dynamic CP; with 3 times steps end 0.1 % sooner for
40 % more CPU time."""
LITTLE_EFFORT = 250
"""Most `plan_effort` with which one size is tried; all of it if the best step has that size
alone."""

SharedStep = tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
"""Micro-batches and their context-parallel sizes [ranks][slots]."""


class CpAssignment(NamedTuple):
    """All that decides about a step before single samples are moved."""

    sizes: tuple[int, ...]
    """Context-parallel size of each sample [samples]."""
    num_slots: int
    steeper: float = 1.0
    """First slot over the usual."""
    skip: float = 0.0
    """Share of the slots that no ranks share, the largest of the profile, which are larger than the
    shared ones."""


class Layout(NamedTuple):
    """The shared samples of a step in slots, and what is beside them."""

    layers: list[list[tuple[int, int, float]]]
    """First rank, sample and cost of each shared micro-batch [slots][micro-batches], the slot of
    the costliest first."""
    own: list[int]
    """The samples that no ranks share, costliest first."""
    work: float
    """Mean cost of all over ranks."""


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
    objective = shared_objective(problem)
    share = objective.budget / (3 * MOST_MOVED)
    found = [objective.step(*start)]
    for step in SharedSteps(objective).best():
        found.append(improve(step, objective, keep=objective.budget - share))
    for size in problem.row_sizes:
        _add_step_of_one_size(found, size, LITTLE_EFFORT, objective, of_one_size)
    best = min(found, key=lambda step: step.end)
    places = zip(chain(*best.ranks), chain(*best.sizes or []), strict=True)
    size, *others = {size for samples, size in places if samples}
    if others:
        return improve(best, objective)
    # Of one size, ranks that share no rows or all are best searched for by themselves.
    if problem.config.plan_effort > LITTLE_EFFORT:
        effort = problem.config.plan_effort
        _add_step_of_one_size(found, size, effort, objective, of_one_size)
    return min(found, key=lambda step: step.end)


def shared_objective(problem: Problem) -> Objective:
    """The objective of a problem under dynamic CP."""
    objective = Objective(problem.on_ranks[1])
    objective.whole = problem
    objective.budget *= BUDGET_OF_SHARING
    objective.floor = step_time_floor(problem) * (1.0 + 1e-9)
    return objective


def _add_step_of_one_size(
    found: list[Step],
    size: int,
    effort: int,
    objective: Objective,
    of_one_size: Callable[[Problem], list[Slots]],
) -> None:
    """Add the step in which every micro-batch has one size, searched for with this `plan_effort`
    at most, if it may be best."""
    rows = objective.whole.on_ranks[size]
    earliest = min(step.end for step in found)
    if size < max(objective.whole.least_sizes) or earliest <= step_time_floor(rows):
        return
    config = dataclasses.replace(rows.config, plan_effort=min(rows.config.plan_effort, effort))
    planned = dataclasses.replace(rows, config=config)
    # Placeholders are those of one rank.
    slots = [of_rank for of_rank in of_one_size(planned) for _ in range(size)]
    sizes = [[size if own else 1 for own in of_rank] for of_rank in slots]
    found.append(objective.step(slots, sizes))


class SharedSteps:
    """Makes steps of context-parallel assignments."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._problem = problem = objective.whole
        self._costs = problem.on_ranks[1].costs
        self._order = by_cost(range(problem.num_samples), self._costs)
        self._ratios = problem.on_ranks[1].cost_ratios
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._judged: dict[CpAssignment, float] = {}

    def best(self) -> list[Step]:
        """The steps that are judged best, of different numbers of slots, best first."""
        limited = list(self._limited())
        firsts = FIRSTS if self._problem.dims.pipeline_parallel > 1 else FIRSTS[:1]
        for sizes in limited:
            for count in self._counts(sizes):
                for steeper in firsts:
                    self.judge(CpAssignment(sizes, count, steeper))
        changed, soonest = list[CpAssignment](), self._soonest()
        while soonest != changed:
            changed = soonest
            for assignment in changed:
                for other in self._neighbors(assignment, limited):
                    self.judge(other)
            soonest = self._soonest()
        return sorted(filter(None, map(self.make, soonest)), key=attrgetter("end"))

    def _soonest(self) -> list[CpAssignment]:
        """The assignments judged best, of different numbers of slots."""
        best: dict[int, CpAssignment] = {}
        for assignment in sorted(self._judged, key=self._judged.__getitem__):
            best.setdefault(assignment.num_slots, assignment)
        return list(best.values())[:MOST_MOVED]

    def _neighbors(
        self, assignment: CpAssignment, limited: Sequence[tuple[int, ...]]
    ) -> Iterable[CpAssignment]:
        """Assignments that differ in one part."""
        at, dims = limited.index(assignment.sizes), self._problem.dims
        for sizes in limited[max(0, at - 1) : at + 2]:
            yield assignment._replace(sizes=sizes)
        for more in (-2, -1, 1, 2):
            near = dims.round_up_num_microbatches(max(1, assignment.num_slots + more))
            yield assignment._replace(num_slots=near)
        # A single stage has no use for sizes of slots that differ, nor for another order.
        if dims.pipeline_parallel > 1:
            for skip in SKIPS:
                yield assignment._replace(skip=skip)
            for steeper in FIRSTS:
                yield assignment._replace(steeper=steeper)

    def _limited(self) -> Iterable[tuple[int, ...]]:
        """Sizes of samples under each limit."""
        limit = max(self._costs)
        least = min(filter(None, self._costs), default=limit)
        found = {self.sizes_under(limit): None}
        # Under the lowest limits shared rows need more slots than a step has use for.
        most = MOST_SLOTS_PER_STAGE * self._problem.dims.pipeline_parallel
        while limit > least:
            limit *= LIMIT_STEP
            sizes = self.sizes_under(limit)
            if self._counts(sizes)[0] > most:
                break
            found[sizes] = None
        return found

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

    def _counts(self, sizes: Sequence[int]) -> list[int]:
        """Numbers of slots to try."""
        problem = self._problem
        own = [i for i, size in enumerate(sizes) if size == 1]
        # A shared one takes a place on each of its ranks.
        shared = sum(size for size in sizes if size > 1)
        rows = problem.on_ranks[1].subset(own).fewest_rows
        return useful_counts(rows + shared, len(own) + shared, problem.num_ranks, problem.dims)

    def judge(self, assignment: CpAssignment) -> float:
        """About the end of the step, if samples could be cut to what each slot is to cost; infinite
        if the shared ones do not fit."""
        if assignment in self._judged:
            return self._judged[assignment]
        self._judged[assignment] = math.inf
        own = self._layout(assignment.sizes).own
        rows, sizes, targets = self._targets(assignment)
        if not rows:
            return math.inf
        longest = self._problem.on_ranks[1].cost(own[:1])
        for shared, costs in zip(rows, targets, strict=True):
            free = [slot for slot, samples in enumerate(shared) if not samples]
            if free and own:
                top = max(free, key=costs.__getitem__)
                costs[top] = max(costs[top], longest)
        # Ranks that share all their rows are alike, so one of them is simulated.
        alike = min((size for size in assignment.sizes if size > 1), default=len(rows))
        on_stages = [
            [cost * ratio for cost in costs for ratio in self._ratios] for costs in targets[::alike]
        ]
        fewer = [[-(-size // alike) for size in of_rank] for of_rank in sizes[::alike]]
        clocks = clocks_of(on_stages, self._objective.problem.schedule, fewer)
        self._objective.budget -= sum(clock.num_passes for clock in clocks)
        self._judged[assignment] = max(clock.end for clock in clocks)
        return self._judged[assignment]

    def make(self, assignment: CpAssignment) -> Step | None:
        """The step of an assignment, simulated; None if its samples do not fit."""
        own = self._layout(assignment.sizes).own
        rows, sizes, targets = self._targets(assignment)
        if not rows:
            return None
        if own:
            # Nothing is assigned where a target is negative.
            wanted = [
                [-1.0 if samples else cost for samples, cost in zip(*of_rank, strict=True)]
                for of_rank in zip(rows, targets, strict=True)
            ]
            assigned = assign(own, wanted, self._objective.problem)
            if assigned is None:
                return None
            for slots, of_rank in zip(rows, assigned, strict=True):
                free = [slot for slot, samples in enumerate(slots) if not samples]
                filled = fill_empty_slots([of_rank[slot] for slot in free], self._costs)
                for slot, samples in zip(free, filled, strict=True):
                    slots[slot] = samples
        make_last_real(rows, sizes)
        return self._objective.step(rows, sizes)

    def _layout(self, sizes: tuple[int, ...]) -> Layout:
        """The shared samples of these sizes in as few slots as hold them."""
        if sizes not in self._layouts:
            ranks, on_ranks = self._problem.num_ranks, self._problem.on_ranks
            shared = [sample for sample in self._order if sizes[sample] > 1]
            layers = [
                [(first, i, on_ranks[sizes[i]].cost([i])) for first, i in layer]
                for layer in layers_of(shared, sizes, ranks)
            ]
            every = [sizes[i] * cost for layer in layers for _, i, cost in layer]
            layers.sort(key=lambda layer: -max(cost for *_, cost in layer))
            own = [sample for sample in self._order if sizes[sample] == 1]
            work = ordered_sum(every) + ordered_sum(self._costs[sample] for sample in own)
            self._layouts[sizes] = Layout(layers, own, work / ranks)
        return self._layouts[sizes]

    def _targets(
        self, assignment: CpAssignment
    ) -> tuple[list[Slots], list[list[int]], list[list[float]]]:
        """The shared samples, their sizes, and what each slot is to cost [ranks][slots]; of no
        ranks if there are too few slots."""
        layout = self._layout(assignment.sizes)
        by_rank = Targets(self._objective.problem, assignment.num_slots, 0.0)
        profile = by_rank.usual
        if not by_rank.even:
            profile, _ = by_rank.shape(by_rank.count, assignment.steeper)
        fixed = self._problem.cost_model.per_micro_batch
        ranks, count = self._problem.num_ranks, len(profile)
        if len(layout.layers) > count:
            return [], [], []
        rows: list[Slots] = [[[] for _ in profile] for _ in range(ranks)]
        sizes = [[1] * count for _ in rows]
        targets = [[0.0] * count for _ in rows]
        largest = sorted(range(count), key=lambda slot: (-profile[slot], slot))
        skipped = round(assignment.skip * (count - len(layout.layers)))
        for slot, layer in zip(largest[skipped:], layout.layers, strict=False):
            for first, sample, cost in layer:
                for rank in range(first, first + assignment.sizes[sample]):
                    rows[rank][slot] = [sample]
                    sizes[rank][slot] = assignment.sizes[sample]
                    targets[rank][slot] = cost
        for shared, costs in zip(rows, targets, strict=True):
            rest = max(0.0, layout.work - ordered_sum(costs))
            free = [slot for slot, samples in enumerate(shared) if not samples]
            whole = ordered_sum(profile[slot] for slot in free)
            for slot in free:
                costs[slot] = fixed + rest * profile[slot] / whole
        return rows, sizes, targets


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
