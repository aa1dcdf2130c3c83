"""Single samples moved and swapped while that ends the slowest rank sooner.

Guarantees: no step of it makes any rank end later than the slowest did; the cap and the bound on
tokens in flight hold throughout; no slot is emptied; a rank with a placeholder takes a further
sample there; which moves are tried follows from a counter.
"""

from __future__ import annotations

from mcore_batching.planning.step_work import Slots, StepWork

GIVE_UP_AFTER = 400
"""Moves in a row that did not help."""


def improve(ranks: list[Slots], ends: list[float], work: StepWork) -> None:
    """Improve a step in place until its effort is spent or nothing has helped for long.

    Args:
        ranks: every rank's slots.
        ends: when each rank's step ends.
        work: the step.
    """
    random = Counter()
    in_vain = 0
    tries = (_move_away, _swap_away, _move_inside, _swap_slots)
    while not work.spent and in_vain < GIVE_UP_AFTER:
        slowest = max(range(len(ranks)), key=lambda rank: (ends[rank], -rank))
        attempt = tries[random.below(len(tries))]
        in_vain = 0 if attempt(ranks, ends, slowest, work, random) else in_vain + 1


class Counter:
    """A linear congruential generator: the same numbers on every platform."""

    def __init__(self) -> None:
        self._state = 1

    def below(self, bound: int) -> int:
        """The next number from 0 to `bound - 1`."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % bound


def _room(slot: list[int], work: StepWork) -> int:
    if slot and slot[0] in work.alone:
        return 0
    return work.capacity - sum(work.tokens[sample] for sample in slot)


def _accept(
    ranks: list[Slots], ends: list[float], changed: dict[int, Slots], slowest: int, work: StepWork
) -> bool:
    """Keep changed ranks if all of them end before the slowest did."""
    new_ends = {}
    for rank, slots in changed.items():
        end = work.time(work.slot_costs(slots))
        if end >= ends[slowest] or not work.fits_in_memory(slots):
            return False
        new_ends[rank] = end
    for rank, slots in changed.items():
        ranks[rank], ends[rank] = slots, new_ends[rank]
    return True


def _with(slots: Slots, changes: dict[int, list[int]]) -> Slots:
    return [changes.get(number, samples) for number, samples in enumerate(slots)]


def _other_rank(ends: list[float], slowest: int, random: Counter) -> int | None:
    """One of the ranks that end in the earlier half."""
    if len(ends) < 2:
        return None
    early = sorted((end, rank) for rank, end in enumerate(ends) if rank != slowest)
    return early[random.below((len(early) + 1) // 2)][1]


def _move_away(
    ranks: list[Slots], ends: list[float], slowest: int, work: StepWork, random: Counter
) -> bool:
    other = _other_rank(ends, slowest, random)
    if other is None:
        return False
    source = random.below(len(ranks[slowest]))
    samples = ranks[slowest][source]
    if len(samples) < 2:
        return False
    sample = samples[random.below(len(samples))]
    target = random.below(len(ranks[other]))
    if [] in ranks[other]:
        target = ranks[other].index([])
    if _room(ranks[other][target], work) < work.tokens[sample]:
        return False
    changed = {
        slowest: _with(ranks[slowest], {source: [i for i in samples if i != sample]}),
        other: _with(ranks[other], {target: [*ranks[other][target], sample]}),
    }
    return _accept(ranks, ends, changed, slowest, work)


def _swap_away(
    ranks: list[Slots], ends: list[float], slowest: int, work: StepWork, random: Counter
) -> bool:
    other = _other_rank(ends, slowest, random)
    if other is None:
        return False
    here, there = random.below(len(ranks[slowest])), random.below(len(ranks[other]))
    mine, theirs = ranks[slowest][here], ranks[other][there]
    if not mine or not theirs:
        return False
    given = mine[random.below(len(mine))]
    taken = theirs[random.below(len(theirs))]
    if work.costs[taken] >= work.costs[given] or not _both_fit(mine, given, theirs, taken, work):
        return False
    changed = {
        slowest: _with(ranks[slowest], {here: [taken if i == given else i for i in mine]}),
        other: _with(ranks[other], {there: [given if i == taken else i for i in theirs]}),
    }
    return _accept(ranks, ends, changed, slowest, work)


def _both_fit(mine: list[int], given: int, theirs: list[int], taken: int, work: StepWork) -> bool:
    if given in work.alone:
        return len(theirs) == 1
    if taken in work.alone:
        return len(mine) == 1
    more = work.tokens[given] - work.tokens[taken]
    return _room(theirs, work) >= more and _room(mine, work) >= -more


def _move_inside(
    ranks: list[Slots], ends: list[float], slowest: int, work: StepWork, random: Counter
) -> bool:
    slots = ranks[slowest]
    source, target = random.below(len(slots)), random.below(len(slots))
    samples = slots[source]
    if source == target or len(samples) < 2 or not slots[target]:
        return False
    sample = samples[random.below(len(samples))]
    if _room(slots[target], work) < work.tokens[sample]:
        return False
    moved = {source: [i for i in samples if i != sample], target: [*slots[target], sample]}
    return _accept(ranks, ends, {slowest: _with(slots, moved)}, slowest, work)


def _swap_slots(
    ranks: list[Slots], ends: list[float], slowest: int, work: StepWork, random: Counter
) -> bool:
    slots = ranks[slowest]
    first, second = random.below(len(slots)), random.below(len(slots))
    if first == second or not slots[first] or not slots[second]:
        return False
    swapped = _with(slots, {first: slots[second], second: slots[first]})
    return _accept(ranks, ends, {slowest: swapped}, slowest, work)
