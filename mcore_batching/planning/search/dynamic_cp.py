"""The search under dynamic CP: each sample's context-parallel size, beside targets and a deal.

    sizes     every sample has the least size that its length needs and that brings its cost below
              a limit
    shared    samples of sizes above 1, each in a micro-batch of its own; laid out in as few slots
              as hold them, which take the largest places of a profile but for a few
    own       all others, dealt to the targets of the slots left (`deal`), so that shared and own
              work is even

A quick judge, who cuts samples to the profile, says about when the step of such a form ends. Steps
of the forms judged best are made, then of the best few with one part changed: the limit, the size
of a sample, the number of slots, the profile, the place of shared slots. Single samples are moved
in the best (`moves`). Steps in which every micro-batch has one size come from the search without
dynamic CP: with little effort, and where that is nearly the best with all that a plan for that size
alone gets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.errors import InflightBoundError
from mcore_batching.planning.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.deal import deal, settle
from mcore_batching.planning.search.moves import (
    counter,
    fits_in_memory,
    improve,
    most_in_flight,
    rows_of,
)
from mcore_batching.planning.search.objective import Candidate, Sizes, Slots
from mcore_batching.planning.search.shared_rows import SharedObjective
from mcore_batching.planning.search.steps import (
    FIRSTS,
    MOST_SLOTS_PER_STAGE,
    Kind,
    by_cost,
    steps_of_counts,
)
from mcore_batching.planning.search.targets import Targets

LIMITS = 12
"""Most limits from the costliest sample down, two for each halving."""
FIRSTS_TO_BEGIN_WITH = (0.1, 0.4)
"""Sizes of the first slot over the plateau that are judged first."""
FORMS_TO_BEGIN_WITH, STEPS_KEPT = 12, 4
"""Forms, judged best, that steps are made of at first, and the best steps, of different numbers of
slots, that are changed on: moves do not change that number, and lead steps of one to much the same
end."""
NEAR = 1.005
"""A step is made of a form judged to end before so many times the form it was changed from. With
1.02 steps end 0.1 to 0.3 % later: fewer forms are judged."""
LITTLE_EFFORT, WORTH_MORE = 250, 1.02
"""One size is tried with no more than so much `plan_effort` at first, and with all of it if that
step ends before so many times the best. With 1.005, 3 of 36 plans of one size ended sooner than the
result, by up to 0.8 %; with 1.02 none of 31."""
EFFORT_OF_A_FORM = 100
"""Making and judging a form takes about as long as so many simulated passes, beside its own."""
SHARE_OF_FORMS, SHARE_OF_EACH = 0.35, 0.1
"""Share of the effort for forms, and for moves in each of the better half of the steps kept before
the best of all gets the rest."""

Step = tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
"""Micro-batches and their context-parallel sizes [ranks][slots]."""


def search_dynamic(
    problem: Problem, start: Step, of_one_size: Callable[[Problem], list[Slots]]
) -> Candidate:
    """Look for the step that ends first.

    Args:
        problem: under dynamic CP, with a sample or more.
        start: a legal step, but for the bound on tokens in flight.
        of_one_size: the step that the search without dynamic CP finds.

    Returns:
        a step that ends no later than `start`, if that keeps to the bound on tokens in flight, and
        than any that `of_one_size` finds for a context-parallel size that all samples fit under
        with `LITTLE_EFFORT`, and with all of it where that step is `WORTH_MORE`.

    Raises:
        InflightBoundError: nothing was found that keeps to that bound.
    """
    objective = SharedObjective(problem)
    best: list[Candidate] = []

    def consider(step: Candidate) -> None:
        if _fits(step, objective) and (not best or step.end < best[0].end):
            best[:] = [step]

    consider(_given(objective, start))
    each = SHARE_OF_EACH * objective.effort
    made = FormSearch(objective).search((1 - SHARE_OF_FORMS) * objective.effort)
    for step in made[: STEPS_KEPT // 2]:
        consider(step)
        consider(improve(step, objective, keep=objective.effort - each))
    for size, rows in problem.on_ranks.items():
        if size < max(problem.least_sizes):
            continue
        effort = rows.config.plan_effort
        for tried in sorted({min(LITTLE_EFFORT, effort), effort}):
            if best and best[0].end <= step_time_floor(rows):
                break
            config = dataclasses.replace(rows.config, plan_effort=tried)
            try:
                found = of_one_size(dataclasses.replace(rows, config=config))
            except InflightBoundError:
                continue
            step = objective.candidate(*_shared(found, size))
            if best and step.end > WORTH_MORE * best[0].end:
                break
            consider(step)
    if not best:
        check_inflight_tokens(problem, start)
    return improve(best[0], objective)


def check_inflight_tokens(problem: Problem, step: Step) -> None:
    """Check micro-batches and their context-parallel sizes against the bound on tokens in flight.

    Raises:
        InflightBoundError: the first stage of a rank holds more.
    """
    objective = SharedObjective(problem)
    rows = rows_of(_given(objective, step), objective)
    if not fits_in_memory(rows, objective):
        held = most_in_flight(rows, objective)
        raise InflightBoundError(problem.config.max_inflight_tokens, held)


def _given(objective: SharedObjective, step: Step) -> Candidate:
    ranks, sizes = step
    return objective.candidate(ranks, [list(of_rank) for of_rank in sizes])


def _fits(step: Candidate, objective: SharedObjective) -> bool:
    return objective.max_inflight_tokens is None or fits_in_memory(
        rows_of(step, objective), objective
    )


def _shared(ranks: Sequence[Slots], size: int) -> tuple[list[Slots], Sizes]:
    """The step in which each rank's micro-batches are those of so many; placeholders of one."""
    rows = [[list(samples) for samples in slots] for slots in ranks for _ in range(size)]
    return rows, [[size if samples else 1 for samples in slots] for slots in rows]


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


class FormSearch:
    """Judges forms, makes steps of them, and looks for those whose steps end first.

    Args:
        objective: its effort is used.
    """

    def __init__(self, objective: SharedObjective) -> None:
        self._objective = objective
        self._problem = problem = objective.whole
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._profiles: dict[Kind, list[float]] = {}
        self._costs = problem.on_ranks[1].costs
        self._order = by_cost(range(problem.num_samples), self._costs)
        self._limits = self._sizes_under_limits()
        self._random = counter()
        self._tried: set[Form] = set()
        self._best: dict[int, tuple[Candidate, Form, float]] = {}
        """By number of slots, the earliest first: a step, its form, and when that was judged to
        end."""

    def _sizes_under_limits(self) -> list[tuple[int, ...]]:
        """Sizes of all samples under limits of the cost of a micro-batch, the highest first."""
        limit = max(self._costs, default=0.0)
        found: dict[tuple[int, ...], None] = {}
        for _ in range(2 * LIMITS):
            found[tuple(self._sizes_under(limit))] = None
            limit *= math.sqrt(0.5)
        return list(found)[:LIMITS]

    def _sizes_under(self, limit: float) -> list[int]:
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
        return sizes

    def search(self, keep: float) -> list[Candidate]:
        """The best steps found, best first.

        Args:
            keep: effort that is left over.
        """
        forms = [
            Form(sizes, Kind(count, first), 0.0)
            for sizes in self._limits
            for count in self.counts(sizes)
            for first in FIRSTS_TO_BEGIN_WITH
        ]
        for form in sorted(forms, key=self.judge)[:FORMS_TO_BEGIN_WITH]:
            self.consider(form, math.inf)
        while self._best and self._objective.effort > keep:
            best = list(self._best.values())
            if self._objective.cannot_be_beaten(best[0][0].end):
                break
            self._objective.effort -= EFFORT_OF_A_FORM
            _, form, judged = best[self._random(len(best))]
            self.consider(self._changed(form), NEAR * judged)
        return [step for step, _, _ in self._best.values()]

    def consider(self, form: Form, limit: float) -> None:
        """Make the step of a form that is judged to end before a limit, and keep it if it is among
        the best of different numbers of slots."""
        if form in self._tried:
            return
        self._tried.add(form)
        judged = self.judge(form)
        step = self.make(form) if judged < limit else None
        if step is None or not _fits(step, self._objective):
            return
        count = form.kind.num_slots
        if count not in self._best or step.end < self._best[count][0].end:
            made = {**self._best, count: (step, form, judged)}
            best = sorted(made.items(), key=lambda each: (each[1][0].end, each[0]))
            self._best = dict(best[:STEPS_KEPT])

    def _changed(self, form: Form) -> Form:
        """The form with one of its parts changed at random."""
        below, problem = self._random, self._problem
        # A single stage has no use for sizes that differ.
        part = below(6 if problem.dims.pipeline_parallel > 1 else 3)
        sizes, kind = form.sizes, form.kind
        if part == 0:
            sizes = self._limits[below(len(self._limits))]
        elif part == 1:
            # One of the costliest, as many as ranks.
            sample = self._order[below(min(problem.num_ranks, len(self._order)))]
            size = problem.row_sizes[below(len(problem.row_sizes))]
            changed = list(sizes)
            changed[sample] = max(size, problem.least_sizes[sample])
            sizes = tuple(changed)
        elif part == 2:
            count = max(1, kind.num_slots + below(7) - 3)
            kind = kind._replace(num_slots=problem.dims.round_up_num_microbatches(count))
        elif part == 3:
            kind = kind._replace(first=FIRSTS[below(len(FIRSTS))])
        elif part == 4:
            kind = kind._replace(gentle=not kind.gentle)
        else:
            return form._replace(skip=below(10) * below(10) / 100)
        return form._replace(sizes=sizes, kind=kind)

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
        if kind not in self._profiles:
            targets = Targets(self._objective, kind.num_slots, kind.first, 0.0, kind.gentle)
            self._profiles[kind] = targets.relative
        return self._profiles[kind]

    def _of_rank(self, form: Form, rank: int) -> tuple[list[int], list[float]]:
        """The sample that a rank shares in each slot, -1 where none; what each is to cost."""
        layout, profile = self._laid_out(form.sizes), self._profile(form.kind)
        shared = [-1] * form.kind.num_slots
        for slot, layer in zip(self._places(len(layout.layers), form), layout.layers, strict=True):
            for first, sample in layer:
                if first <= rank < first + form.sizes[sample]:
                    shared[slot] = sample
        both = list(zip(profile, shared, strict=True))
        whole = ordered_sum(each for each, sample in both if sample < 0)
        full = max(0.0, layout.work - layout.load[rank]) / whole if whole else 0.0
        fixed = self._problem.cost_model.per_micro_batch
        return shared, [
            fixed + full * each if sample < 0 else self._cost(sample, form.sizes)
            for each, sample in both
        ]

    def judge(self, form: Form) -> float:
        """About the end of a form's step: the later of the first and the last rank's, if samples
        could be cut to the profile; infinite if the shared ones do not fit."""
        layout, profile = self._laid_out(form.sizes), self._profile(form.kind)
        if len(layout.layers) > form.kind.num_slots:
            return math.inf
        latest = 0.0
        for rank in (0, self._problem.num_ranks - 1):
            shared, costs = self._of_rank(form, rank)
            free = [slot for slot, sample in enumerate(shared) if sample < 0]
            if free and layout.own:
                top = max(free, key=lambda slot: profile[slot])
                alone = self._problem.on_ranks[1].cost(layout.own[:1])
                costs[top] = max(costs[top], alone)
            latest = max(latest, self._objective.end_of(costs))
        return latest

    def make(self, form: Form) -> Candidate | None:
        """The step of a form, simulated; None if its samples do not fit."""
        count, layout = form.kind.num_slots, self._laid_out(form.sizes)
        rows: list[Slots] = []
        sizes: Sizes = []
        targets: list[float] = []
        for rank in range(self._problem.num_ranks):
            shared, costs = self._of_rank(form, rank)
            rows.append([[sample] if sample >= 0 else [] for sample in shared])
            sizes.append([form.sizes[sample] if sample >= 0 else 1 for sample in shared])
            # A deal puts nothing where a target is negative.
            targets += [-1.0 if i >= 0 else cost for i, cost in zip(shared, costs, strict=True)]
        if layout.own:
            if max(targets) < 0.0:
                return None
            dealt = deal(layout.own, targets, self._objective, passes=2, per_rank=count)
            if dealt is None:
                return None
            for rank, slots in enumerate(rows):
                free = [slot for slot in range(count) if sizes[rank][slot] == 1]
                own = settle([dealt[rank * count + slot] for slot in free], self._costs)
                for slot, samples in zip(free, own, strict=True):
                    slots[slot] = samples
        _make_last_real(rows, sizes)
        return self._objective.candidate(rows, sizes)


def _make_last_real(rows: list[Slots], sizes: Sizes) -> None:
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
