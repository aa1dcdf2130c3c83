"""The search loop, the same for ranks that run by themselves and for ranks in lockstep.

1. Steps to begin with are simulated; the result ends no later than any of them.
2. Every number of micro-batches is judged in one shape or two, numbers far apart first, these
   also with little effort left, then those beside the best. Of the numbers that did best all
   shapes are judged. A verdict that cannot be beaten ends this.
3. Steps are made of the best shapes of the best numbers. Judges know little of ranks with very
   long samples: where ranks have many samples, numbers beside the one whose steps end first follow
   for as long as that helps.
4. Single samples are moved and swapped in the best steps found (`local_moves`).

A family of shapes says which numbers and shapes there are, and how a step is made of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.local_moves import improve
from mcore_batching.planning.search.lockstep_search import LockstepShapes
from mcore_batching.planning.search.objective import BestSteps, Objective, Slots
from mcore_batching.planning.search.pipeline_search import PipelineShapes
from mcore_batching.planning.search.profiles import Shape

STRIDE_OF_COUNTS = 4
"""One in so many numbers of micro-batches is judged before the ones between them."""
MANY_SAMPLES = 32
"""On a rank: with fewer, moves change a step more than the steps of two numbers of micro-batches
differ, and effort is better spent on them (0.2 % of azure_conv's 128 samples on 8 ranks)."""
WORTH_MOVES = 1.03
"""End over that of the best step up to which single samples are moved in a step."""
SHARE_OF_EACH = 0.05
"""Share of the effort for moves that each such step gets; the rest goes to the best."""
MOST_STEPS_IMPROVED = 3
"""Steps, of different numbers of micro-batches, in which single samples are moved; a third would
find no effort left."""
MOST_COUNTS_REFINED = 5
"""Numbers of micro-batches of which all shapes are judged. With one, steps end up to 0.3 % later;
with ten, no sooner."""


def search(
    objective: Objective, starts: Iterable[Sequence[Sequence[Sequence[int]]]]
) -> list[Slots]:
    """Look for the step that ends first.

    Args:
        objective: of the step; its effort is used up at most.
        starts: legal plans [ranks][slots]; the result ends no later than any of them.

    Returns:
        every rank's slots, the same number for each.

    Raises:
        InflightBoundError: nothing was found that holds no more tokens in flight than may be.
    """
    family = (LockstepShapes if objective.lockstep else PipelineShapes)(objective)
    kept_for_moves = int(objective.effort * family.kept_for_moves)
    kept_after_judging = int(objective.effort * family.kept_after_judging)
    best = BestSteps(objective, MOST_STEPS_IMPROVED)
    for start in starts:
        best.consider(objective.candidate(start))
    shapes = _judged(family, objective, kept_after_judging)
    ends: dict[int, float] = {}
    in_turn = _in_turn([*shapes, *family.last_resort()], family, objective.problem, ends)
    for number, shape in enumerate(in_turn):
        # Ranks are evened out in the first shape before anything is kept.
        kept = kept_for_moves if number else 0
        for candidate in family.steps(shape, number):
            best.consider(candidate)
            ends[shape.num_slots] = min(candidate.end, ends.get(shape.num_slots, math.inf))
            if best.perfect or (objective.effort <= kept and best.found):
                break
        if best.perfect or (objective.effort <= kept_for_moves and best.found):
            break
    if best.perfect:
        return best.result()[0].ranks
    each = SHARE_OF_EACH * objective.effort
    steps = [step for step in best.result() if step.end <= WORTH_MOVES * best.result()[0].end]
    improved = [improve(step, objective, keep=objective.effort - each) for step in steps]
    return improve(min(improved, key=lambda step: step.end), objective).ranks


def _in_turn(
    shapes: Sequence[Shape],
    family: LockstepShapes | PipelineShapes,
    problem: Problem,
    ends: Mapping[int, float],
) -> Iterator[Shape]:
    """The first shapes; where ranks have many samples, those of the numbers of micro-batches beside
    the one whose steps end first, as long as there are any; then all others.

    Args:
        shapes: best first.
        family: gives the numbers.
        problem: the step's.
        ends: of the steps made so far, by their number of micro-batches.
    """
    left = dict.fromkeys(shapes)
    for shape in list(left)[:MOST_STEPS_IMPROVED]:
        del left[shape]
        yield shape
    first = {shape.num_slots: shape for shape in reversed(shapes)}
    counts = [count for count in family.counts() if count in first]
    while ends and problem.num_samples >= MANY_SAMPLES * problem.dims.data_parallel:
        place = counts.index(min(ends, key=lambda count: (ends[count], count)))
        beside = [first[count] for count in counts[max(0, place - 1) : place + 2]]
        if not (unknown := [shape for shape in beside if shape in left]):
            break
        del left[unknown[-1]]
        yield unknown[-1]
    yield from left


def _judged(
    family: LockstepShapes | PipelineShapes, objective: Objective, kept: int
) -> list[Shape]:
    """Shapes in the order of how soon they end the step, as far as effort goes."""
    counts = family.counts()
    ranked: list[tuple[float, Shape]] = []

    def judge(shapes: Iterable[Shape], *, quick: bool = False) -> None:
        for shape in shapes:
            spent = objective.effort <= (0 if quick else kept)
            if ranked and (spent or objective.cannot_be_beaten(ranked[-1][0])):
                return
            end = family.judge(shape, quick=quick)
            if end is not None:
                ranked.append((end, shape))

    coarse = sorted(range(0, len(counts), STRIDE_OF_COUNTS), key=_far_apart)
    judge((family.shapes(counts[index])[0] for index in coarse), quick=True)
    nearest = counts.index(min(ranked)[1].num_slots) if ranked else 0
    for index in sorted(range(len(counts)), key=lambda index: (abs(index - nearest), index)):
        judge(family.shapes(counts[index])[: family.shapes_that_judge])
    # A bound on tokens in flight has little to do with the end: no number is left out for it.
    refined = len(ranked) if objective.max_inflight_tokens is not None else MOST_COUNTS_REFINED
    best_counts = list(dict.fromkeys(shape.num_slots for _, shape in sorted(ranked)))
    for count in best_counts[:refined]:
        judge(family.shapes(count)[family.shapes_that_judge :])
    # Of a shape that was judged twice the later verdict holds. The best shapes of the numbers that
    # did best come before the others.
    verdicts = {shape: end for end, shape in ranked}
    order = sorted(verdicts, key=lambda shape: (verdicts[shape], shape))
    first = {shape.num_slots: shape for shape in reversed(order)}
    firsts = [shape for shape in order if shape is first[shape.num_slots]][:MOST_STEPS_IMPROVED]
    return list(dict.fromkeys([*firsts, *order]))


def _far_apart(index: int) -> int:
    """A key that sorts indices so that each is far from those before: its 16 bits, reversed."""
    return int(f"{index:016b}"[::-1], 2)
