"""Slots of one rank alone, whose samples stay on it: laid out to profiles, without moves.

All ranks take one number of slots, without knowing each other's samples: `ends_by_count` is what
they tell, `best_slots` what they make of the number that is best for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots
from mcore_batching.planning.search.pipeline_search import (
    PipelineShapes,
    by_cost,
    counts_to_try,
)
from mcore_batching.planning.search.profiles import fill_slots, profile_of, shapes_of, spread


def best_slots(problem: Problem, count: int) -> Slots | None:
    """The slots in which one rank's step ends first, looked for among profiles alone.

    Args:
        problem: the rank's samples.
        count: number of slots.

    Returns:
        the slots; None if no profile holds the samples within the bound on tokens in flight.
    """
    objective = Objective(problem)
    found = _profiled(objective, by_cost(range(problem.num_samples), problem.costs), count)
    return found[1] if found else None


def ends_by_count(problem: Problem, counts: Sequence[int]) -> list[float]:
    """End of one rank's step with each number of slots, in the best of a few profiles.

    Beyond the numbers that are of any use, and once effort is spent, the end is taken to grow by a
    micro-batch's overhead. Where nothing keeps to the bound on tokens in flight, all numbers beyond
    `_most_unlike` are taken for the least of those that are alike.

    Args:
        problem: the rank's samples.
        counts: numbers of slots, ascending.

    Returns:
        the ends [counts], infinite where the samples do not fit.
    """
    objective = Objective(problem)
    order = by_cost(range(problem.num_samples), problem.costs)
    tried = counts_to_try(order, objective)
    model = problem.cost_model
    overhead = model.per_micro_batch * (1.0 if problem.forward_only else 1.0 + model.backward_ratio)
    # Of the interleaved schedule's numbers, few and far apart, each is looked at closely.
    most = PipelineShapes.shapes_that_judge if problem.dims.virtual_pipeline == 1 else None
    most_unlike, period = _most_unlike(problem)
    ends: list[float] = []
    last = math.inf, 0
    too_many: set[int] = set()
    for count in counts:
        if (count > tried[-1] or objective.spent) and last[0] < math.inf:
            ends.append(last[0] + (count - last[1]) * overhead)
            continue
        like = min(count, most_unlike + (count - most_unlike) % period)
        found = None
        if like >= tried[0] and like not in too_many:
            found = _profiled(objective, order, like, most=most)
        if found:
            last = found[0], like
        else:
            too_many.add(like)
        ends.append(found[0] + (count - like) * overhead if found else math.inf)
    return ends


def _most_unlike(problem: Problem) -> tuple[int, int]:
    """A number of slots, and how many more give as many tokens in flight, each time.

    In so many, every sample has a slot of its own, in the same order with more of them: those of a
    profile's full size are enough for all, and so are the slots of a stage's turn in `spread`. The
    placeholders come first, and are more than are in flight at a time.
    """
    dims = problem.dims
    interleaved = dims.virtual_pipeline > 1
    # A geometric profile's last slots are of full size, to the last bit, 54 slots a stage before
    # the end; the staircase's are seven groups from both ends.
    ends = 8 * dims.group_size if interleaved else 64 * dims.pipeline_parallel
    count = dims.pipeline_parallel * (problem.num_samples + 4) + dims.group_size + ends
    return dims.round_up_num_microbatches(count), dims.group_size if interleaved else 1


def _profiled(
    objective: Objective, order: Sequence[int], count: int, most: int | None = None
) -> tuple[float, Slots] | None:
    """The end of a rank's step and its slots, in the best of the first profiles.

    Args:
        objective: of the rank.
        order: its samples, costliest first.
        count: number of slots.
        most: profiles that are tried; None: all, as far as effort goes.
    """
    problem = objective.problem
    found: tuple[float, Slots] | None = None
    too_large: list[Slots] = []  # many profiles give the same slots where these hold a sample each
    for shape in shapes_of(count, problem.dims)[:most]:
        if found and objective.spent and most is None:
            break
        slots = fill_slots(order, profile_of(shape, problem.dims), objective)
        if slots is not None and (slots in too_large or not objective.fits_in_memory(slots)):
            too_large.append(slots)
            slots = spread(slots, objective)
        if slots is None or slots in too_large:
            continue
        if not objective.fits_in_memory(slots):
            too_large.append(slots)
            continue
        end = objective.end_of(objective.slot_costs(slots))
        if found is None or end < found[0]:
            found = (end, slots)
    return found
