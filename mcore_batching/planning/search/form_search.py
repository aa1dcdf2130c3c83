"""The search for forms of steps in which ranks share micro-batches (`shared_forms`).

Forms under some limits of the cost of a micro-batch, in which every sample has the least
context-parallel size that its length needs and that brings its cost below the limit, are tried
first, with several numbers of slots. Then the best are changed in one part: the limit, the size of
a sample, the number of slots, the profile, the place of the shared slots.
"""

from __future__ import annotations

import math

from mcore_batching.planning.search.moves import counter, fits_in_memory, rows_of
from mcore_batching.planning.search.objective import Candidate
from mcore_batching.planning.search.shared_forms import Form, SharedForms
from mcore_batching.planning.search.shared_rows import SharedObjective
from mcore_batching.planning.search.steps import FIRSTS, Kind, by_cost

LIMITS_PER_HALVING, MOST_LIMITS = 2, 12
"""Limits from the costliest sample down: so many for each halving, and in all."""
SAMPLES_RESIZED = 8
"""Samples, costliest first, whose sizes are changed one by one."""
FIRSTS_TO_BEGIN_WITH = (0.1, 0.4)
"""Sizes of the first slot over the plateau that are judged first."""
FORMS_TO_BEGIN_WITH, STEPS_KEPT = 12, 4
"""Forms, judged best, that steps are made of at first, and the best steps, of different numbers of
slots, that are changed on."""
WORTH_MAKING = 1.02
"""Share of what the form before was judged to take, below which a step is made of a form."""
EFFORT_OF_A_FORM = 100
"""Making and judging a form takes about as long as so many simulated passes, beside its own."""


class FormSearch:
    """Looks for the forms whose steps end first.

    Args:
        objective: its effort is used.
    """

    def __init__(self, objective: SharedObjective) -> None:
        self._objective = objective
        self._problem = problem = objective.whole
        self._forms = SharedForms(objective)
        self._tried: set[Form] = set()
        self._best: dict[int, tuple[Candidate, Form, float]] = {}
        """By number of slots, the earliest first: a step, its form, and when that was judged to
        end."""
        self._random = counter()
        self._order = by_cost(range(problem.num_samples), problem.on_ranks[1].costs)
        self._limits = self.limits()

    def limits(self) -> list[tuple[int, ...]]:
        """Sizes of all samples under limits of the cost of a micro-batch, the highest first."""
        problem = self._problem
        limit = max(problem.on_ranks[1].costs, default=0.0)
        found: dict[tuple[int, ...], None] = {}
        for _ in range(MOST_LIMITS * 2):
            found[tuple(self._sizes_under(limit))] = None
            limit *= 0.5 ** (1.0 / LIMITS_PER_HALVING)
        return list(found)[:MOST_LIMITS]

    def _sizes_under(self, limit: float) -> list[int]:
        problem = self._problem
        sizes = list(problem.least_sizes)
        for sample in self._order:
            if problem.on_ranks[1].costs[sample] <= limit:
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
            for count in self._forms.counts(sizes)
            for first in FIRSTS_TO_BEGIN_WITH
        ]
        for form in sorted(forms, key=self._forms.judge)[:FORMS_TO_BEGIN_WITH]:
            self.consider(form, math.inf)
        while self._best and self._objective.effort > keep:
            best = list(self._best.values())
            if self._objective.cannot_be_beaten(best[0][0].end):
                break
            self._objective.effort -= EFFORT_OF_A_FORM
            _, form, judged = best[self._random(len(best))]
            self.consider(self._changed(form), WORTH_MAKING * judged)
        return [step for step, _, _ in self._best.values()]

    def consider(self, form: Form, limit: float) -> None:
        """Make the step of a form that is judged to end before a limit, and keep it if it is among
        the best of different numbers of slots: moves do not change that number, and lead steps of
        one to much the same end."""
        if form in self._tried:
            return
        self._tried.add(form)
        judged = self._forms.judge(form)
        step = self._forms.make(form) if judged < limit else None
        if step is None or not fits_in_memory(rows_of(step, self._objective), self._objective):
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
            sample = self._order[below(min(SAMPLES_RESIZED, len(self._order)))]
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
