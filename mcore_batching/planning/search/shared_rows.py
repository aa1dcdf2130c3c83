"""Steps in which ranks share micro-batches: made of forms, and simulated.

    sizes     each sample's context-parallel size
    shared    samples of sizes above 1, each in a micro-batch of its own; laid out in as few slots
              as hold them, which take the largest places of a profile but for a few
    own       all others, dealt to the targets of the slots left (`deal`), so that shared and own
              work is even

Where experts are spread over ranks all ranks run every slot together, whoever shares what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.pipeline import clocks_of
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.deal import deal, settle
from mcore_batching.planning.search.lockstep_targets import over_mean_stage
from mcore_batching.planning.search.objective import Candidate, Objective, Ranks, Slots
from mcore_batching.planning.search.pipelines import EFFORT_OF_A_SHARED_PASS
from mcore_batching.planning.search.steps import MOST_SLOTS_PER_STAGE, by_cost
from mcore_batching.planning.search.targets import Kind, Targets

FEW_COUNTED = 1024
"""Steps of few samples take as much effort as those of so many at most."""
EFFORT_OF_SHARING = 4
"""So many times the effort of a step without dynamic CP, for all that is tried. With 3 steps end
0.3 % later in the mean of five cases, for a sixth less CPU time."""


class SharedObjective(Objective):
    """Simulates steps of a problem under dynamic CP, and counts what that costs.

    Its `problem` is that of micro-batches which nobody shares.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.on_ranks[1])
        self.whole = problem
        # Few samples get the effort of one for each slot of the longest step.
        slots = problem.num_ranks * problem.dims.pipeline_parallel * MOST_SLOTS_PER_STAGE
        few = problem.config.plan_effort * min(slots, FEW_COUNTED)
        self.effort = EFFORT_OF_SHARING * max(self.effort, few)
        self._floor = step_time_floor(problem) * (1.0 + 1e-9)

    def _ends(self, ranks: Ranks, sizes: Sequence[Sequence[int]] | None) -> list[float]:
        assert sizes is not None
        problems = self.whole.on_ranks
        costs = [
            [
                cost
                for own, size in zip(*of, strict=True)
                for cost in problems[size].slot_costs([own])
            ]
            for of in zip(ranks, sizes, strict=True)
        ]
        return self.ends_of(costs, sizes)

    def ends_of(
        self, costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]
    ) -> list[float]:
        """Ends of ranks with micro-batches of these costs and sizes, as in `clocks_of`; costs
        effort."""
        (clock,) = clocks_of(costs, self.problem.schedule, sizes)
        is_one = self.problem.dims.in_lockstep
        self.effort -= clock.passes_run * (1.0 if is_one else EFFORT_OF_A_SHARED_PASS)
        return clock.ends


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


class Form(NamedTuple):
    """All that decides about a step before single samples are moved."""

    sizes: tuple[int, ...]
    """Context-parallel size of each sample [samples]."""
    kind: Kind
    skip: float = 0.0
    """Share of the slots that nobody shares, the largest of the profile, which are larger than the
    shared ones."""


class Layout(NamedTuple):
    """The shared samples of a step in slots, and what is beside them."""

    layers: list[list[tuple[int, int, float]]]
    """First rank, sample and cost of each shared micro-batch [slots][micro-batches], the slot of
    the costliest first."""
    own: list[int]
    """The samples that nobody shares, costliest first."""
    work: float
    """Mean cost of all over ranks."""


class Forms:
    """Makes steps of forms, and judges when these end; uses the objective's effort."""

    def __init__(self, objective: SharedObjective) -> None:
        self._objective = objective
        self._problem = problem = objective.whole
        self._costs = problem.on_ranks[1].costs
        # Forms that are tried have much in common.
        self._laid_out = functools.cache(self._lay_out)
        self._profile = functools.cache(lambda kind: Targets(objective, kind, 0.0).relative)
        self.order = by_cost(range(problem.num_samples), self._costs)
        """Samples, costliest first."""
        self._ratios = over_mean_stage(problem.on_ranks[1], self.order)

    def sizes_under(self, limit: float) -> tuple[int, ...]:
        """The least size of each sample that its length needs and that brings its cost to a limit
        or below, if one does."""
        problem = self._problem
        sizes = list(problem.least_sizes)
        for sample in self.order:
            if self._costs[sample] <= limit:
                break
            for size in problem.row_sizes:
                if size >= sizes[sample]:
                    sizes[sample] = size
                    if problem.on_ranks[size].costs[sample] <= limit:
                        break
        return tuple(sizes)

    def judge(self, form: Form) -> float:
        """About the end of a form's step, if samples could be cut to what each slot is to cost;
        infinite if the shared ones do not fit."""
        own, ratios = self._laid_out(form.sizes).own, self._ratios
        rows, sizes, targets = self._targets(form)
        longest = self._problem.on_ranks[1].cost(own[:1])
        for shared, costs in zip(rows, targets, strict=True):
            free = [slot for slot, samples in enumerate(shared) if not samples]
            if free and own:
                top = max(free, key=costs.__getitem__)
                costs[top] = max(costs[top], longest)
        on_stages = [[cost * ratio for cost in costs for ratio in ratios] for costs in targets]
        return max(self._objective.ends_of(on_stages, sizes)) if rows else math.inf

    def make(self, form: Form) -> Candidate | None:
        """The step of a form, simulated; None if its samples do not fit."""
        own = self._laid_out(form.sizes).own
        rows, sizes, targets = self._targets(form)
        if not rows:
            return None
        if own:
            # A deal puts nothing where a target is negative.
            wanted = [
                [-1.0 if samples else cost for samples, cost in zip(*of_rank, strict=True)]
                for of_rank in zip(rows, targets, strict=True)
            ]
            if max(map(max, wanted)) < 0.0:
                return None
            dealt = deal(own, wanted, self._objective)
            if dealt is None:
                return None
            for slots, of_rank in zip(rows, dealt, strict=True):
                free = [slot for slot, samples in enumerate(slots) if not samples]
                settled = settle([of_rank[slot] for slot in free], self._costs)
                for slot, samples in zip(free, settled, strict=True):
                    slots[slot] = samples
        make_last_real(rows, sizes)
        return self._objective.candidate(rows, sizes)

    def _lay_out(self, sizes: tuple[int, ...]) -> Layout:
        """The shared samples of these sizes in as few slots as hold them."""
        ranks, on_ranks = self._problem.num_ranks, self._problem.on_ranks
        shared = [sample for sample in self.order if sizes[sample] > 1]
        layers = [
            [(first, i, on_ranks[sizes[i]].cost([i])) for first, i in layer]
            for layer in layers_of(shared, sizes, ranks)
        ]
        every = [sizes[i] * cost for layer in layers for _, i, cost in layer]
        layers.sort(key=lambda layer: -max(cost for *_, cost in layer))
        own = [sample for sample in self.order if sizes[sample] == 1]
        work = ordered_sum(every) + ordered_sum(self._costs[sample] for sample in own)
        return Layout(layers, own, work / ranks)

    def _targets(self, form: Form) -> tuple[list[Slots], list[list[int]], list[list[float]]]:
        """The shared samples, their sizes, and what each slot is to cost [ranks][slots]; of no
        ranks if there are too few slots."""
        layout, profile = self._laid_out(form.sizes), self._profile(form.kind)
        fixed = self._problem.cost_model.per_micro_batch
        ranks, count = self._problem.num_ranks, len(profile)
        if len(layout.layers) > count:
            return [], [], []
        rows: list[Slots] = [[[] for _ in profile] for _ in range(ranks)]
        sizes = [[1] * count for _ in rows]
        targets = [[0.0] * count for _ in rows]
        largest = sorted(range(count), key=lambda slot: (-profile[slot], slot))
        skipped = round(form.skip * (count - len(layout.layers)))
        for slot, layer in zip(largest[skipped:], layout.layers, strict=False):
            for first, sample, cost in layer:
                for rank in range(first, first + form.sizes[sample]):
                    rows[rank][slot], sizes[rank][slot] = [sample], form.sizes[sample]
                    targets[rank][slot] = cost
        for shared, costs in zip(rows, targets, strict=True):
            rest = max(0.0, layout.work - ordered_sum(costs))
            free = [slot for slot, samples in enumerate(shared) if not samples]
            whole = ordered_sum(profile[slot] for slot in free)
            for slot in free:
                costs[slot] = fixed + rest * profile[slot] / whole
        return rows, sizes, targets


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
            # A micro-batch that nobody shares may run in any of the rank's own slots.
            alone = [slot for slot in range(count) if own[slot] == 1 and slots[slot]]
            last = alone[-1] if alone else -1
            slots[last], slots[-1] = slots[-1], slots[last]
