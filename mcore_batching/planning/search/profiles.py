"""Slots filled to a profile: small at both ends of the step, full in between.

A pipeline idles while its first micro-batches travel down and its last ones travel back; both
times shrink with the size of those micro-batches. A profile gives the relative size of each slot;
samples, costliest first, go to the slot that lacks most. The cap holds, an oversize sample is
alone, and a slot stays empty only if no other holds two samples, and then it is not the last.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots

Profile = list[float]

# Size of the first and the last group of the interleaved schedule relative to a full one. Found by
# trying: halves and doubles end steps of azure_conv and log-normal lengths up to 0.06 % later.
FIRST_GROUP, LAST_GROUP = 0.2, 0.3

# Geometric profiles: size of the last slot relative to a full one, and whether growth and fall are
# gentle, which suits samples that only a large slot can hold.
CURVES = ((0.1, True), (0.4, False), (0.1, False), (0.3, True), (0.6, False))
# Straight ones: rise and fall in stages. They suit slots of one or two samples.
LINES = ((1, 3), (2, 2), (3, 4), (1, 2), (1, 1), (2, 3))
LINE_LOWEST = 0.1

# Rise and fall in groups of slots, for the interleaved schedule.
STAIRCASES = ((2, 3), (1, 3), (1, 2), (2, 4), (1, 1), (2, 2), (3, 3), (1, 0), (0, 1))

EFFORT_OF_SWAPS = 5
"""Swapping samples takes about as long as so many simulated passes for each slot."""
SMALLEST, CLOSER = 6, 0.95
"""Samples of a slot that may be swapped, the cheapest; share of what two slots are apart that is
left at most."""

MOST_SLOTS_PER_STAGE = 16
"""Beyond this many micro-batches per stage, less than a sixteenth of the step is bubble."""


class Shape(NamedTuple):
    """A number of slots and their profile."""

    num_slots: int
    rise: int = 0
    """Slots (groups of slots, under the interleaved schedule) over which sizes grow."""
    fall: int = 0
    """Slots (groups) over which they shrink; 0 under the other schedule: as `lowest` says."""
    lowest: float = 1.0
    """Size of the last slot relative to a full one."""
    gentle: bool = False
    """True for growth and fall over twice as many slots."""
    margin: float = 1.0
    """Share of the mean up to which slots of ranks in lockstep are filled."""


def profile(
    num_slots: int, stages: int, rise: int, lowest: float, *, gentle: bool = False
) -> Profile:
    """Relative sizes that grow over `rise` slots and shrink towards the last, which is `lowest`.

    These are within 0.6 % of the sizes that end a step soonest if they may be any numbers, as a
    linear program finds them for 2 to 16 stages: they grow by (stages + 1) / (stages - 1) a slot,
    and what they lack of a full slot towards the end doubles about every half as many slots as
    there are stages. With 6 slots of 4 stages, rise 2 and lowest 0.5:
    0.36, 0.6, 0.827, 0.754, 0.649, 0.5.
    """
    span = 2 * stages if gentle else stages
    growth = (span - 1) / (span + 1)
    decay = (2 * span - 1.4) / (2 * span + 1.4)
    sizes = [1.0] * num_slots
    risen = 1.0
    for slot in reversed(range(min(rise, num_slots))):
        risen *= growth
        sizes[slot] = risen
    lacking = 1.0 - lowest
    for slot in reversed(range(num_slots)):
        sizes[slot] = min(sizes[slot], 1.0 - lacking)
        lacking *= decay
    return sizes


def line(num_slots: int, rise: int, fall: int) -> Profile:
    """Relative sizes that grow along a line over `rise` slots and shrink along a parabola over the
    last `fall`. With 6 slots, rise 3 and fall 2: 0.1, 0.4, 0.7, 1, 0.775, 0.1."""
    sizes = []
    for slot in range(num_slots):
        left = num_slots - 1 - slot
        risen = slot / rise if slot < rise else 1.0
        falling = left / fall if left < fall else 1.0
        sizes.append(LINE_LOWEST + (1.0 - LINE_LOWEST) * min(risen, falling * (2.0 - falling)))
    return sizes


def staircase(num_slots: int, group: int, rise: int, fall: int) -> Profile:
    """Relative sizes for the interleaved schedule: equal within each group of slots.

    A stage runs a group through one model chunk after the other, so the bubble at the ends of the
    step goes with the sizes of whole groups. With 8 slots, group 2, rise 1 and fall 2:
    0.2, 0.2, 1, 1, 0.65, 0.65, 0.3, 0.3.

    Args:
        num_slots: number of sizes.
        group: slots that the schedule runs together; the last may be fewer.
        rise: groups until a slot is full.
        fall: groups from the last full slot to the end.
    """
    groups = -(-num_slots // group)
    sizes = []
    for slot in range(num_slots):
        number = slot // group
        left = groups - 1 - number
        risen = FIRST_GROUP + (1.0 - FIRST_GROUP) * number / rise if number < rise else 1.0
        falling = LAST_GROUP + (1.0 - LAST_GROUP) * left / fall if left < fall else 1.0
        sizes.append(min(risen, falling))
    return sizes


def profile_of(shape: Shape, dims: ParallelDims) -> Profile:
    """The profile of a shape under the schedule of these dims."""
    if dims.virtual_pipeline > 1:
        return staircase(shape.num_slots, dims.group_size, shape.rise, shape.fall)
    if shape.fall:
        return line(shape.num_slots, shape.rise, shape.fall)
    stages = dims.pipeline_parallel
    return profile(shape.num_slots, stages, shape.rise, shape.lowest, gentle=shape.gentle)


def shapes_of(count: int, dims: ParallelDims) -> list[Shape]:
    """Shapes of so many slots, the one that is best most often first, and the flat one last."""
    stages, flat = dims.pipeline_parallel, Shape(count)
    if stages == 1:
        return [flat]
    if dims.virtual_pipeline > 1:
        groups = -(-count // dims.group_size)
        # Where groups are few some have the same profile.
        stairs = [flat, *(Shape(count, *each) for each in STAIRCASES if max(each) <= groups)]
        found = {tuple(profile_of(shape, dims)): shape for shape in reversed(stairs)}
        return [shape for shape in [*stairs[1:], flat] if shape in found.values()]
    # The best for slots of any size, within 0.7 % of a linear program's for 8 to 50 slots.
    per_stage = count / stages
    rise = min(int(stages * (0.25 + 0.15 * per_stage) + 0.5), stages - 1, count - 1)
    curves = [Shape(count, rise, lowest=min(0.5, max(0.2, 1.25 / per_stage)))]
    for lowest, gentle in CURVES:
        rise = 2 * stages if gentle else stages - 1
        curves.append(Shape(count, min(rise, count - 1), lowest=lowest, gentle=gentle))
    lines = [
        Shape(count, rise * stages, fall * stages)
        for rise, fall in LINES
        if max(rise, fall) * stages <= count
    ]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(curves, lines))
    return [*filter(None, in_turn), flat]


def steps_of_counts(fewest: int, most: int, dims: ParallelDims) -> list[int]:
    """Numbers of slots that the schedule can run, from the fewest to the most.

    Each is a seventh more than the one before: ends of steps with numbers closer together differ by
    less than their shapes make.
    """
    most = dims.round_up_num_microbatches(most)
    counts = [dims.round_up_num_microbatches(fewest)]
    while counts[-1] < most:
        further = dims.round_up_num_microbatches(max(counts[-1] + 1, counts[-1] * 8 // 7))
        counts.append(min(further, most))
    return counts


def fill_slots(
    samples: Sequence[int],
    sizes: Profile,
    objective: Objective,
    *,
    overhead: bool = True,
    swaps: int = 0,
) -> Slots | None:
    """Fill a rank's slots.

    Args:
        samples: the rank's samples, costliest first.
        sizes: relative size of each slot [slots].
        objective: gives costs, tokens and the cap; its effort is used.
        overhead: True if sizes are those of micro-batches, False if those of their samples.
        swaps: times that samples are swapped, to come closer to the sizes.

    Returns:
        the slots; None if the samples do not fit into so many.
    """
    objective.effort -= 4 * len(samples)
    problem = objective.problem
    costs, tokens, capacity = problem.costs, problem.tokens, problem.capacity
    most, heapreplace = problem.max_samples, heapq.heapreplace
    bounded = most < len(samples)
    fixed = problem.cost_model.per_micro_batch if overhead else 0.0
    total = 0.0
    for sample in samples:
        total += costs[sample]
    total += fixed * len(sizes)
    full = total / ordered_sum(sizes)
    # Most lacking first; the lowest slot wins ties.
    lacking = [(fixed - full * size, slot) for slot, size in enumerate(sizes)]
    heapq.heapify(lacking)
    # Less than nothing in a slot that may take no further sample.
    room = [capacity] * len(sizes)
    # Slots without room for the last sample, the most room first.
    waiting: list[tuple[int, float, int]] = []
    slots: Slots = [[] for _ in sizes]
    for sample in samples:
        needed = tokens[sample]
        wanted = needed if needed < capacity else capacity
        while waiting and -waiting[0][0] >= wanted:
            _, lack, slot = heapq.heappop(waiting)
            heapq.heappush(lacking, (lack, slot))
        lack, slot = lacking[0]
        while room[slot] < wanted:
            heapq.heappop(lacking)
            heapq.heappush(waiting, (-room[slot], lack, slot))
            if not lacking:
                return None
            lack, slot = lacking[0]
        own = slots[slot]
        own.append(sample)
        room[slot] -= needed
        if bounded and len(own) >= most:
            room[slot] = -1
        heapreplace(lacking, (lack + costs[sample], slot))
    if swaps and not waiting:
        over = [0.0] * len(sizes)
        for lack, slot in lacking:
            over[slot] = lack
        for turn in range(swaps):
            objective.effort -= EFFORT_OF_SWAPS * len(slots)
            swap(slots, over, room, problem, turn)
    return settle(slots, costs)


def swap(slots: Slots, over: list[float], room: list[int], problem: Problem, turn: int) -> None:
    """Let the slots that lack most take of those that are over their sizes most: a sample, or one
    for another.

    Args:
        slots: changed.
        over: what they cost more than they should [slots], changed likewise.
        room: tokens that they have room for [slots], changed likewise.
        problem: gives costs and tokens.
        turn: so many slots that lack most are left as they are, for which nothing may be found.
    """
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    order = sorted(range(len(slots)), key=over.__getitem__)
    for taker, giver in zip(order[turn : (len(order) + turn) // 2], reversed(order), strict=False):
        if room[taker] < 0 or room[giver] < 0:
            continue  # a sample alone by itself, or as many as there may be
        half = (over[giver] - over[taker]) / 2.0
        given, taken = slots[giver], slots[taker]
        further = len(given) > 1 and len(taken) < most - 1
        back = [(costs[sample], sample) for sample in taken[-SMALLEST:]]
        if further:
            back.append((0.0, -1))
        off, found = CLOSER * half, (-1, -1)
        for sample in given[-SMALLEST:]:
            cost = costs[sample] - half
            for less, other in back:
                if -off < cost - less < off:
                    off, found = abs(cost - less), (sample, other)
        sample, other = found
        if sample < 0:
            continue
        more, size = costs[sample], tokens[sample]
        if other >= 0:
            more, size = more - costs[other], size - tokens[other]
        if room[taker] < size or room[giver] < -size:
            continue
        given.remove(sample)
        taken.append(sample)
        if other >= 0:
            taken.remove(other)
            given.append(other)
        over[taker], room[taker] = over[taker] + more, room[taker] - size
        over[giver], room[giver] = over[giver] - more, room[giver] + size


def settle(slots: Slots, costs: Sequence[float]) -> Slots:
    """Slots without needless placeholders.

    Each empty slot takes the cheapest sample of the costliest slot that holds two or more; those
    that stay empty come first, where they pass through the pipeline soonest.
    """
    if all(slots):
        return slots
    empty = [samples for samples in slots if not samples]

    def entry(number: int) -> tuple[float, int]:
        return -ordered_sum(costs[sample] for sample in slots[number]), number

    shared = [entry(number) for number, samples in enumerate(slots) if len(samples) > 1]
    heapq.heapify(shared)
    for taker in empty:
        if not shared:
            break
        _, number = heapq.heappop(shared)
        giver = slots[number]
        cheapest = min(giver, key=lambda sample: (costs[sample], sample))
        giver.remove(cheapest)
        taker.append(cheapest)
        if len(giver) > 1:
            heapq.heappush(shared, entry(number))
    real = [samples for samples in slots if samples]
    placeholders: Slots = [[] for _ in range(len(slots) - len(real))]
    return [*placeholders, *real]


def spread(slots: Slots, objective: Objective) -> Slots:
    """The same slots in an order in which few tokens are in flight at a time.

    As many slots in a row as there are stages are in flight: dealing them out by size, to every
    stage-th place first up and then down again, gives each run of them about as much.
    """
    problem = objective.problem
    stages = problem.dims.pipeline_parallel

    def tokens(number: int) -> int:
        return sum(problem.tokens[sample] for sample in slots[number])

    by_size = sorted(range(len(slots)), key=lambda number: (-tokens(number), number))
    places: list[int] = []
    for first in range(min(stages, len(slots))):
        column = range(first, len(slots), stages)
        places += column if first % 2 else reversed(column)
    ordered: Slots = [[] for _ in slots]
    for place, number in zip(places, by_size, strict=True):
        ordered[place] = slots[number]
    return settle(ordered, problem.costs)
