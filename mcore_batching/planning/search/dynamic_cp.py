"""The search under dynamic CP: each sample's context-parallel size, beside targets and a deal.

1. Forms of steps (`shared_rows`): under limits from the costliest sample down, each sample has the
   least size that brings its cost below. Of each limit the step of the form judged best is made,
   then steps of the best few with one part changed: the limit, the size of a sample, the number
   of slots, the profile, the place of shared slots.
2. Single samples are moved in the best few (`moves`).
3. Steps in which every micro-batch has one size come from the search without dynamic CP, with
   little effort; once more with all that a plan for that size alone gets, if the best step has one.
4. Samples are moved in the best of all.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, repeat

from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.moves import drawing, improve
from mcore_batching.planning.search.objective import Candidate, Objective, Slots
from mcore_batching.planning.search.shared_rows import Form, Forms, SharedObjective
from mcore_batching.planning.search.steps import FIRSTS, MOST_SLOTS_PER_STAGE, useful_counts
from mcore_batching.planning.search.targets import Kind

LIMITS, LIMIT_STEP = 32, math.sqrt(math.sqrt(0.5))
"""Limits from the costliest sample down, four for each halving. With two for each halving steps end
0.1 % later in the mean, those of 128 samples of azure_conv 0.4 %."""
FIRSTS_TO_BEGIN_WITH = (0.1, 0.4)
"""Sizes of the first slot over the plateau that are judged first. With 0.25 alone steps of 128
samples of azure_conv end 0.23 % later, those of 256 of mooncake_conv with experts 0.6 %."""
STEPS_KEPT = 4
"""The best steps, of different numbers of slots, that are changed on: moves do not change that
number, and lead steps of one to much the same end."""
LITTLE_EFFORT = 250
"""Most `plan_effort` with which one size is tried; all of it if the best step has that size alone.
What it takes is of the effort of all."""
EFFORT_OF_A_FORM = 250
"""What making or drawing a form again counts for, beside its passes. With 40 no step of 17 kinds
ends sooner, after 8 % more CPU time; with 1000 steps of 128 samples under VPP2 end 0.3 % later."""
SHARE_OF_FORMS, SHARE_OF_EACH = 0.25, 0.1
"""Share of the effort for forms, and for moves in each of the better half of the steps kept before
the best of all gets the rest. With 0.35 for forms steps end 0.1 % later in the mean of four cases,
after more CPU time."""

Step = tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
"""Micro-batches and their context-parallel sizes [ranks][slots]."""


def search_dynamic(
    problem: Problem, start: Step, of_one_size: Callable[[Problem], list[Slots]]
) -> Candidate:
    """The step that ends first of those found.

    It ends no later than `start`, and than any that the search without dynamic CP, `of_one_size`,
    finds with `LITTLE_EFFORT` for a size that all samples fit under.

    Args:
        problem: under dynamic CP, with a sample or more.
        start: a legal step.
        of_one_size: the search without dynamic CP.
    """
    objective = SharedObjective(problem)
    effort = objective.effort
    found = [objective.candidate(*start)]
    for step in FormSearch(objective).search((1 - SHARE_OF_FORMS) * effort)[: STEPS_KEPT // 2]:
        found.append(improve(step, objective, keep=objective.effort - SHARE_OF_EACH * effort))
    for size in problem.on_ranks:
        _add_step_of_one_size(found, size, LITTLE_EFFORT, objective, of_one_size)
    best = _earliest(found)
    places = zip(chain(*best.ranks), chain(*best.sizes or []), strict=True)
    size, *others = {size for samples, size in places if samples}
    if not others and problem.config.plan_effort > LITTLE_EFFORT:
        _add_step_of_one_size(found, size, problem.config.plan_effort, objective, of_one_size)
    return improve(_earliest(found), objective)


def _earliest(found: Sequence[Candidate]) -> Candidate:
    return min(found, key=lambda step: step.end)


def _add_step_of_one_size(
    found: list[Candidate],
    size: int,
    effort: int,
    objective: SharedObjective,
    of_one_size: Callable[[Problem], list[Slots]],
) -> None:
    """Add the step in which every micro-batch has one size, looked for with this `plan_effort`
    at most, if it may be best."""
    rows = objective.whole.on_ranks[size]
    earliest = _earliest(found).end
    if size < max(objective.whole.least_sizes) or earliest <= step_time_floor(rows):
        return
    config = dataclasses.replace(rows.config, plan_effort=min(rows.config.plan_effort, effort))
    planned = dataclasses.replace(rows, config=config)
    objective.effort -= Objective(planned).effort
    # Placeholders are those of one rank.
    slots = [of_rank for of_rank in of_one_size(planned) for _ in range(size)]
    sizes = [[size if own else 1 for own in of_rank] for of_rank in slots]
    found.append(objective.candidate(slots, sizes))


class FormSearch:
    """Looks for the forms whose steps end first; uses the objective's effort."""

    def __init__(self, objective: SharedObjective) -> None:
        self._objective, self._problem = objective, objective.whole
        self._forms = forms = Forms(objective)
        highest = max(self._problem.on_ranks[1].costs, default=0.0)
        limits = accumulate(repeat(LIMIT_STEP, LIMITS), operator.mul, initial=highest)
        # The same sizes may keep to several limits; under the lowest shared rows need more slots
        # than a step has use for.
        first, *further = dict.fromkeys(map(forms.sizes_under, limits))
        most = MOST_SLOTS_PER_STAGE * self._problem.dims.pipeline_parallel
        self._limits = [first, *(each for each in further if self._counts(each)[0] <= most)]
        self._draw = drawing()
        self._tried: set[Form] = set()
        self._best: dict[int, tuple[Candidate, Form, float]] = {}
        """By number of slots, the earliest first: a step, its form, and when that was judged to
        end."""

    def search(self, keep: float) -> list[Candidate]:
        """The best steps found, best first, until so much effort is left."""
        for sizes in self._limits:
            forms = [
                Form(sizes, Kind(count, first))
                for count in self._counts(sizes)[::2]
                for first in FIRSTS_TO_BEGIN_WITH
            ]
            self._consider(min(forms, key=self._forms.judge), math.inf)
        while self._best and self._objective.effort > keep:
            best = list(self._best.values())
            if self._objective.cannot_be_beaten(best[0][0].end):
                break
            self._objective.effort -= EFFORT_OF_A_FORM
            _, form, judged = best[self._below(len(best))]
            # Of a form judged to end later than the one it was changed from no step is made.
            self._consider(self._changed(form), judged)
        return [step for step, _, _ in self._best.values()]

    def _consider(self, form: Form, limit: float) -> None:
        """Make the step of a form that is judged to end before a limit, and keep it if it is among
        the best of different numbers of slots."""
        if form in self._tried:
            return
        self._tried.add(form)
        judged = self._forms.judge(form)
        step = self._forms.make(form) if judged < limit else None
        if step is None:
            return
        count = form.kind.num_slots
        if count not in self._best or step.end < self._best[count][0].end:
            made = {**self._best, count: (step, form, judged)}
            best = sorted(made.items(), key=lambda each: (each[1][0].end, each[0]))
            self._best = dict(best[:STEPS_KEPT])

    def _changed(self, form: Form) -> Form:
        """The form with one of its parts changed at random."""
        below, problem = self._below, self._problem
        # A single stage has no use for sizes of slots that differ, nor for another order.
        part = below(6 if problem.dims.pipeline_parallel > 1 else 3)
        sizes, kind = form.sizes, form.kind
        if part == 0:
            sizes = self._limits[below(len(self._limits))]
        elif part == 1:
            # One of the costliest, as many as ranks.
            order = self._forms.order
            sample = order[below(min(problem.num_ranks, len(order)))]
            size = problem.row_sizes[below(len(problem.row_sizes))]
            changed = list(sizes)
            changed[sample] = max(size, problem.least_sizes[sample])
            sizes = tuple(changed)
        elif part == 2:
            # Up to three more or fewer.
            count = max(1, kind.num_slots + below(7) - 3)
            kind = kind._replace(num_slots=problem.dims.round_up_num_microbatches(count))
        elif part == 3:
            kind = kind._replace(first=FIRSTS[below(len(FIRSTS))])
        elif part == 4:
            kind = kind._replace(gentle=not kind.gentle)
        else:
            # Small shares more often: a shared row belongs to the largest slots.
            return form._replace(skip=below(10) * below(10) / 100)
        return form._replace(sizes=sizes, kind=kind)

    def _below(self, bound: int) -> int:
        """A random number from 0 to a bound."""
        return int(self._draw() * bound)

    def _counts(self, sizes: Sequence[int]) -> list[int]:
        """Numbers of slots to try."""
        problem = self._problem
        own = [i for i, size in enumerate(sizes) if size == 1]
        # A shared one takes a place on each of its ranks.
        shared = sum(size for size in sizes if size > 1)
        rows = problem.on_ranks[1].subset(own).fewest_rows
        return useful_counts(rows + shared, len(own) + shared, problem.num_ranks, problem.dims)
