"""Forms of steps in which ranks share micro-batches.

    sizes      every sample has a context-parallel size, no less than its length needs
    shared     samples of sizes above 1, each in a micro-batch of its own; laid out in as few slots
               as hold them, which take the largest places of a profile
    own        all others, dealt to the targets of the slots left (`deal`), so that shared and own
               work is even

A quick judge, who cuts samples to the profile, says about when a form's step ends; `form_search`
looks for the forms that are worth making.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.search.deal import deal, settle
from mcore_batching.planning.search.objective import Candidate, Sizes, Slots
from mcore_batching.planning.search.shared_rows import SharedObjective
from mcore_batching.planning.search.steps import (
    MOST_SLOTS_PER_STAGE,
    Kind,
    by_cost,
    steps_of_counts,
)
from mcore_batching.planning.search.targets import Targets

PASSES = 2
"""Times that samples are swapped after a deal."""


class Form(NamedTuple):
    """All that decides about a step before single samples are moved."""

    sizes: tuple[int, ...]
    """Context-parallel size of each sample [samples]."""
    kind: Kind
    skip: float
    """Share of the slots that nobody shares, the largest of the profile, which are larger than the
    shared ones."""


class Layout(NamedTuple):
    """The shared samples of a step in slots, and what is beside them."""

    layers: list[list[tuple[int, int]]]
    """First rank and sample of each shared micro-batch [slots][micro-batches], the slot of the
    costliest first."""
    load: list[float]
    """Cost of them on each rank [ranks]."""
    own: list[int]
    """The samples that nobody shares, costliest first."""
    work: float
    """Mean cost of all over ranks."""


class SharedForms:
    """Judges forms, and makes steps of them.

    Args:
        objective: its effort is used.
    """

    def __init__(self, objective: SharedObjective) -> None:
        self._objective = objective
        self._problem = problem = objective.whole
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._relative: dict[Kind, list[float]] = {}
        self._costs = problem.on_ranks[1].costs
        self._order = by_cost(range(problem.num_samples), self._costs)

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Numbers of slots to try."""
        problem = self._problem
        dims, ranks = problem.dims, problem.num_ranks
        own = [i for i, size in enumerate(sizes) if size == 1]
        shared = sum(size for size in sizes if size > 1)
        rows = problem.on_ranks[1].subset(own).fewest_rows
        fewest = dims.round_up_num_microbatches(-(-(rows + shared) // ranks))
        if dims.pipeline_parallel == 1:
            return [dims.round_up_num_microbatches(fewest + extra) for extra in range(3)]
        useful = -(-(len(own) + shared) // ranks)
        most = min(useful, MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
        return steps_of_counts(fewest, max(most, fewest), dims)

    def _laid_out(self, sizes: tuple[int, ...]) -> Layout:
        """The shared samples of these sizes in as few slots as hold them."""
        if sizes not in self._layouts:
            problem, ranks = self._problem, self._problem.num_ranks
            shared = sorted(
                (i for i in self._order if sizes[i] > 1), key=lambda sample: -sizes[sample]
            )
            layers: list[list[tuple[int, int]]] = []
            load, place = [0.0] * ranks, 0
            for sample in shared:
                if place % ranks == 0:
                    layers.append([])
                first = place % ranks
                layers[-1].append((first, sample))
                cost = problem.on_ranks[sizes[sample]].cost([sample])
                for rank in range(first, first + sizes[sample]):
                    load[rank] += cost
                place += sizes[sample]
            layers.sort(key=lambda layer: -max(self._cost(i, sizes) for _, i in layer))
            own = [i for i in self._order if sizes[i] == 1]
            work = ordered_sum(load) + ordered_sum(self._costs[i] for i in own)
            self._layouts[sizes] = Layout(layers, load, own, work / ranks)
        return self._layouts[sizes]

    def _cost(self, sample: int, sizes: Sequence[int]) -> float:
        return self._problem.on_ranks[sizes[sample]].cost([sample])

    def _places(self, layers: int, form: Form) -> list[int]:
        """Slots of the shared micro-batches, that of the costliest first: the largest of the
        profile but for those skipped."""
        profile = self._profile(form.kind)
        largest = sorted(range(len(profile)), key=lambda slot: (-profile[slot], slot))
        first = round(form.skip * (len(profile) - layers))
        return largest[first : first + layers]

    def _profile(self, kind: Kind) -> list[float]:
        """Sizes of slots relative to each other [slots]."""
        if kind not in self._relative:
            targets = Targets(self._objective, kind.num_slots, kind.first, 0.0, kind.gentle)
            self._relative[kind] = targets.relative
        return self._relative[kind]

    def judge(self, form: Form) -> float:
        """About the end of a form's step: the later of the first and the last rank's, if samples
        could be cut to the profile; infinite if the shared ones do not fit."""
        layout, count = self._laid_out(form.sizes), form.kind.num_slots
        if len(layout.layers) > count:
            return math.inf
        profile, fixed = self._profile(form.kind), self._problem.cost_model.per_micro_batch
        latest = 0.0
        for rank in (0, self._problem.num_ranks - 1):
            costs = [-1.0] * count
            for slot, layer in zip(
                self._places(len(layout.layers), form), layout.layers, strict=True
            ):
                for first, sample in layer:
                    if first <= rank < first + form.sizes[sample]:
                        costs[slot] = self._cost(sample, form.sizes)
            free = [slot for slot, cost in enumerate(costs) if cost < 0]
            whole = ordered_sum(profile[slot] for slot in free)
            full = max(0.0, layout.work - layout.load[rank]) / whole if free else 0.0
            for slot in free:
                costs[slot] = fixed + full * profile[slot]
            if free and layout.own:
                top = max(free, key=lambda slot: profile[slot])
                costs[top] = max(costs[top], fixed + self._costs[layout.own[0]])
            latest = max(latest, self._objective.end_of(costs))
        return latest

    def make(self, form: Form) -> Candidate | None:
        """The step of a form, simulated; None if its samples do not fit."""
        problem, count = self._problem, form.kind.num_slots
        ranks, layout = problem.num_ranks, self._laid_out(form.sizes)
        sizes: Sizes = [[1] * count for _ in range(ranks)]
        rows: list[Slots] = [[[] for _ in range(count)] for _ in range(ranks)]
        for slot, layer in zip(self._places(len(layout.layers), form), layout.layers, strict=True):
            for first, sample in layer:
                size = form.sizes[sample]
                for rank in range(first, first + size):
                    sizes[rank][slot], rows[rank][slot] = size, [sample]
        targets = self._targets(form, layout, sizes)
        if layout.own:
            if max(targets) < 0.0:
                return None
            dealt = deal(layout.own, targets, self._objective, passes=PASSES, per_rank=count)
            if dealt is None:
                return None
            for rank, slots in enumerate(rows):
                free = [slot for slot in range(count) if sizes[rank][slot] == 1]
                own = settle([dealt[rank * count + slot] for slot in free], self._costs)
                for slot, samples in zip(free, own, strict=True):
                    slots[slot] = samples
        _make_last_real(rows, sizes)
        return self._objective.candidate(rows, sizes)

    def _targets(self, form: Form, layout: Layout, sizes: Sizes) -> list[float]:
        """Cost that each micro-batch is to have [ranks * slots]; -1 where ranks share one."""
        profile, fixed = self._profile(form.kind), self._problem.cost_model.per_micro_batch
        targets: list[float] = []
        for load, of_rank in zip(layout.load, sizes, strict=True):
            whole = ordered_sum(p for p, size in zip(profile, of_rank, strict=True) if size == 1)
            full = max(0.0, layout.work - load) / whole if whole else 0.0
            targets += [
                fixed + full * p if size == 1 else -1.0
                for p, size in zip(profile, of_rank, strict=True)
            ]
        return targets


def _make_last_real(rows: list[Slots], sizes: Sizes) -> None:
    """Put the slot that most ranks share last where a rank has a placeholder there that it need
    not have."""
    count = len(rows[0])
    if not any(any(slots) and not slots[-1] for slots in rows):
        return
    shared = max(range(count), key=lambda slot: (sum(of[slot] > 1 for of in sizes), slot))
    for slots, own in zip(rows, sizes, strict=True):
        slots[shared], slots[-1] = slots[-1], slots[shared]
        own[shared], own[-1] = own[-1], own[shared]
