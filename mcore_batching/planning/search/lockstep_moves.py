"""Single samples moved and swapped while that ends a step of ranks in lockstep sooner.

Guarantees: no step of it makes the step end later; the cap and the bound on tokens in flight hold
throughout; no micro-batch is emptied, no placeholder filled; which moves are tried follows from a
counter.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcore_batching.planning.search.local_moves import Counter
from mcore_batching.planning.step_work import Slots, StepWork

GIVE_UP_AFTER = 300
"""Moves in a row that did not help."""

Place = tuple[int, int]
"""Rank and slot of a micro-batch."""
Changes = dict[Place, list[int]]


def improve_lockstep(ranks: list[Slots], end: float, work: StepWork) -> float:
    """Improve a step in place until its effort is spent or nothing has helped for long.

    Args:
        ranks: every rank's slots.
        end: when the step ends.
        work: the step.

    Returns:
        when it ends now.
    """
    random = Counter()
    costs = [work.slot_costs(slots) for slots in ranks]
    slowest = [max(slot) for slot in zip(*costs, strict=True)]
    in_vain = 0
    while not work.spent and in_vain < GIVE_UP_AFTER:
        in_vain += 1
        slot = random.below(len(slowest))
        rank = max(range(len(ranks)), key=lambda r: (costs[r][slot], -r))
        other = (random.below(len(ranks)), random.below(len(slowest)))
        for changes in _tries(ranks, (rank, slot), other, work, random):
            work.effort -= 2 * len(ranks)
            changed = {place: work.slot_costs([samples])[0] for place, samples in changes.items()}
            then = slowest[:]
            for number in {place[1] for place in changes}:
                then[number] = max(
                    changed.get((r, number), costs[r][number]) for r in range(len(ranks))
                )
            new_end = work.time(then)
            if new_end > end or not _fits(ranks, changes, work):
                continue
            if new_end < end:
                in_vain = 0
            for (r, number), samples in changes.items():
                ranks[r][number], costs[r][number] = samples, changed[r, number]
            slowest, end = then, new_end
            break
    return end


def _tries(
    ranks: list[Slots], heavy: Place, other: Place, work: StepWork, random: Counter
) -> Iterator[Changes]:
    """What may take work off a micro-batch: a sample moved, one swapped for a cheaper one, or the
    whole of it swapped with another slot's of its rank."""
    mine, theirs = ranks[heavy[0]][heavy[1]], ranks[other[0]][other[1]]
    if heavy == other or not mine or not theirs:
        return
    given = mine[random.below(len(mine))]
    taken = theirs[random.below(len(theirs))]
    without = [sample for sample in mine if sample != given]
    if without and _holds([*theirs, given], work):
        yield {heavy: without, other: [*theirs, given]}
    swapped = [sample for sample in theirs if sample != taken] + [given]
    without = [*without, taken]
    if work.costs[taken] < work.costs[given] and _holds(swapped, work) and _holds(without, work):
        yield {heavy: without, other: swapped}
    place = (heavy[0], other[1])
    if heavy[1] != other[1] and ranks[place[0]][place[1]]:
        yield {heavy: ranks[place[0]][place[1]], place: mine}


def _holds(samples: list[int], work: StepWork) -> bool:
    if len(samples) == 1:
        return True
    return sum(work.tokens[sample] for sample in samples) <= work.capacity and not any(
        sample in work.alone for sample in samples
    )


def _fits(ranks: list[Slots], changes: Changes, work: StepWork) -> bool:
    if work.max_inflight_tokens is None:
        return True
    return all(
        work.fits_in_memory(
            [changes.get((rank, slot), samples) for slot, samples in enumerate(ranks[rank])]
        )
        for rank in {place[0] for place in changes}
    )
