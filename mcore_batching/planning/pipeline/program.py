"""The passes of all stages, numbered so that each comes after those that it waits for.

A pass begins when its stage is free, its input is there, and transfers have ended that its stage
waits for. A transfer ends only when the receiver has begun it, too: which is at the end of its pass
before the one that needs it. Under 1F1B a stage waits for no more than the next input, which comes
later, unless micro-batches shrink while the pipeline fills; interleaved, also for what it sent.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mcore_batching.planning.compiled import Integers, Numbers, integers, numbers
from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.pipeline.passes import Pass, Schedule

Place = tuple[int, Pass]
"""A stage and one of its passes."""
NEAR = 256
"""A wait that others imply is left out, where these are no more passes away. Interleaved, a pass
then seldom waits for more than two others. With 0 programs are up to 1.4 times as long."""


class Program:
    """Numbered passes; the step begins with 0, which takes no time, and ends with the last one.

    Args:
        schedule: whatever its passes cost.
        count: micro-batches of each data-parallel rank.

    Attributes:
        places: stage and pass by number; None of transfers and of what takes no time [numbers].
        slots: the slot whose cost each has; beyond the last one that of transfers, and then that of
            what takes no time [numbers].
        waits: two numbers for which each waits, maybe the same [2][numbers].
        of_slot: numbers of each slot's passes, ascending [slots].
        spans: the first of them, and the one after the last [slots].

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(self, schedule: Schedule, count: int) -> None:
        self._schedule, self._count = schedule, count
        self.places: list[Place | None] = []
        self._slots: list[int] = []
        self._waits: tuple[list[int], list[int]] = [], []
        self._implied: list[int] = []
        """Bit n of each number: it comes after that n before it."""
        self._meet(())
        self._number_passes()
        self._meet(set(range(len(self._slots))) - {each for waits in self._waits for each in waits})
        of_slot: list[list[int]] = [[] for _ in range(count + 2)]
        for number, slot in enumerate(self._slots):
            of_slot[slot].append(number)
        self.of_slot = [integers(each) for each in of_slot[:count]]
        self.spans = [(each[0], each[-1] + 1) for each in of_slot[:count]]
        self.slots = integers(self._slots)
        self.waits = integers(self._waits[0]), integers(self._waits[1])
        self._crossing: dict[int, tuple[Integers, Integers]] = {}

    def crossing(self, cut: int) -> tuple[Integers, Integers]:
        """All pairs of a number below `cut` and one from there on that waits for it."""
        if cut not in self._crossing:
            pairs = sorted(
                {
                    (each, number)
                    for waits in self._waits
                    for number, each in enumerate(waits[cut:], start=cut)
                    if each < cut
                }
            )
            early, late = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self._crossing[cut] = integers(early), integers(late)
        return self._crossing[cut]

    def _number_passes(self) -> None:
        """Add all passes, one of each stage in turn, so that those of a slot are close together."""
        schedule, stages = self._schedule, range(self._schedule.dims.pipeline_parallel)
        orders = [schedule.order(stage, self._count) for stage in stages]
        sends = _waits_for_sends(schedule, orders)
        number: dict[Place, int] = {}
        newest, at = [0 for _ in stages], [0 for _ in stages]
        unfinished = list(stages)
        while unfinished:
            before = len(number)
            for stage in unfinished:
                place = stage, orders[stage][at[stage]]
                taken = schedule.needs(*place)
                needs = [taken, *sends.get(place, ())] if taken else sends.get(place, ())
                waits = [number.get(each, -1) for each in needs]
                if -1 in waits:
                    continue
                if schedule.times_transfers:
                    waits = [self._arrived(each, stage) for each in waits]
                number[place] = newest[stage] = self._add(
                    place, place[1].slot, (newest[stage], *waits)
                )
                at[stage] += 1
            unfinished = [stage for stage in unfinished if at[stage] < len(orders[stage])]
            if len(number) == before:
                raise ParallelDimsError(f"{schedule} waits for itself; this is a bug")

    def _arrived(self, number: int, stage: int) -> int:
        """The transfer of a pass's result to a stage; the pass itself on its own stage."""
        place = self.places[number]
        if place is None or place[0] == stage:
            return number
        return self._add(None, self._count, (number,))

    def _meet(self, waits: Iterable[int]) -> int:
        """Number what takes no time."""
        return self._add(None, self._count + 1, waits)

    def _add(self, place: Place | None, slot: int, waits: Iterable[int]) -> int:
        """Number what comes next; where it waits for more than two, something else before it."""
        implied = self._implied
        needed = sorted(set(waits) - {0}) or [0]
        if len(needed) > 2:
            needed = [
                each
                for each in needed
                if not any(implied[later] >> (later - each) & 1 for later in needed if later > each)
            ]
        while len(needed) > 2:
            needed = [*needed[:-2], self._meet(needed[-2:])]
        number = len(self._slots)
        implied.append(0)
        for each in needed:
            implied[number] |= (implied[each] | 1) << (number - each) & (2 << NEAR) - 1
        self.places.append(place)
        self._slots.append(slot)
        self._waits[0].append(needed[0])
        self._waits[1].append(needed[-1])
        return number


_programs = functools.lru_cache(maxsize=64)(Program)


@functools.lru_cache(maxsize=64)
def program(schedule: Schedule, count: int) -> tuple[Program, Numbers]:
    """The program of so many micro-batches, and the time of each number over its slot's cost."""
    made = _programs(replace(schedule, backward_ratio=1.0, factors=()), count)
    shares = [
        schedule.share(place[0], place[1].kind, place[1].chunk) if place else 1.0
        for place in made.places
    ]
    return made, numbers(shares)


def _waits_for_sends(
    schedule: Schedule, orders: Sequence[Sequence[Pass]]
) -> dict[Place, list[Place]]:
    """Of each pass of Megatron's interleaved schedule, the passes beside that whose output it takes
    at whose end a transfer ends that its stage waits for; of another schedule none.

    After the passes of warm-up and cool-down a stage waits for both its neighbours at once; after
    other forward passes for what it sent, after other backward passes for what it sent the time
    before.

    Args:
        schedule: any.
        orders: passes of each stage.
    """
    last_stage, last_chunk = schedule.dims.pipeline_parallel - 1, schedule.dims.virtual_pipeline - 1
    if last_chunk == 0 or schedule.splits_backward or not schedule.waits_for_sends:
        return {}
    passes = [{kind: [p for p in order if p.kind == kind] for kind in "FB"} for order in orders]
    count = len(passes[0]["F"]) // (last_chunk + 1)
    warm_ups = [schedule.warm_up(stage, count) for stage in range(last_stage + 1)]

    def receiver_begins(stage: int, kind: str, number: int) -> list[Place]:
        """The pass after which the next stage begins to receive what a pass has sent."""
        ahead, beyond, final = (1, last_stage, last_chunk) if kind == "F" else (-1, 0, 0)
        receiver, before = stage + ahead, number - 1
        if stage == beyond:
            if passes[stage][kind][number].chunk == final:
                return []
            receiver, before = last_stage - beyond, number + last_stage
        if before >= 0:
            return [(receiver, passes[receiver][kind][before])]
        if kind == "B":  # begun after the last pass of warm-up
            return [(receiver, passes[receiver]["F"][warm_ups[receiver] - 1])]
        return []

    def received(stage: int, kind: str, number: int) -> list[Place]:
        """The pass from which the stage that begins a chunk receives, for a later pass, after one
        of its own."""
        sender, final = (last_stage, last_chunk) if kind == "F" else (0, 0)
        of_sender = number - last_stage
        if stage != last_stage - sender or of_sender < 0:
            return []
        sent = passes[sender][kind][of_sender]
        return [] if sent.chunk == final else [(sender, sent)]

    waits: dict[Place, list[Place]] = {}
    for stage, order in enumerate(orders):
        steady = len(passes[stage]["F"]) - warm_ups[stage]
        numbers_of = {"F": 0, "B": 0}
        unfinished: list[Place] = []
        for what, following in itertools.pairwise(order):
            kind, number = what.kind, numbers_of[what.kind]
            numbers_of[kind] += 1
            sent = receiver_begins(stage, kind, number)
            if kind == "B" and number < steady:
                sent, unfinished = unfinished, sent
            elif kind == "B" or number < warm_ups[stage]:
                sent = sent + received(stage, kind, number)
            waits[stage, following] = sent
    return waits
