"""The passes of all stages, numbered so that each comes after those that it waits for.

A pass starts when its stage is free, its input is there, and the sends that its stage waits for
have ended. A send ends only once the receiver has posted its receive, which is after the pass
before the one that needs the input. Under 1F1B these waits change nothing, but where micro-batches
shrink during warm-up; under the interleaved schedule they do (`_waits_for_sends`).

    F of stage 0, slot 1   waits for   F of stage 0, slot 0   its stage is busy until then
    F of stage 1, slot 1   waits for   F of stage 1, slot 0 and F of stage 0, slot 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter

from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.pipeline.passes import Pass, Schedule

Place = tuple[int, Pass]
"""A stage and one of its passes."""
IMPLIED_WAITS_REACH = 256
"""A wait is left out if another one implies it within this many numbers. Under the interleaved
schedule most passes are then left with two waits: with 0, programs get 1.6 times as long. A
quarter of it and twice as much give the same programs up to 16 stages."""


class Program:
    """Numbered passes of `count` micro-batches, with joints between them that take no time: number
    0 is one, the start of the step; the last is its end. Costs of the schedule do not count.

    Attributes:
        places: stage and pass of each number [numbers]; None for joints.
        slots: place of the cost that each number takes, slot * costs of a slot + which of them
            [numbers]; the place after the last for joints.
        of_each: what each number has, from a list of what places have, and last joints.
        waits: the two numbers that each waits for, which may be equal [2][numbers].
        of_slot: numbers of the passes of each place, ascending [slots * costs of a slot].
        spans: the first of these, and one more than the last.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(self, schedule: Schedule, count: int) -> None:
        self._schedule, self._count = schedule, count
        joints = count * schedule.num_costs
        self.places: list[Place | None] = []
        self.slots: list[int] = []
        self.waits: tuple[list[int], list[int]] = [], []
        self._implied: list[int] = []
        """Bit n of entry i: number i comes after number i - n, by any chain of waits."""
        self._joint(())
        self._number_passes()
        # The end waits for every number that no other waits for.
        self._joint(set(range(len(self.slots))).difference(*self.waits))
        of_slot: list[list[int]] = [[] for _ in range(joints + 1)]
        for number, slot in enumerate(self.slots):
            of_slot[slot].append(number)
        self.of_slot = of_slot[:joints]
        self.spans = [(each[0], each[-1] + 1) for each in of_slot[:joints]]
        self.of_each = itemgetter(*self.slots)
        self._crossing: dict[int, tuple[list[int], list[int]]] = {}

    def crossing(self, cut: int) -> tuple[list[int], list[int]]:
        """The waits of numbers from `cut` on for numbers before it: these, and who waits."""
        if cut not in self._crossing:
            numbered = (enumerate(waits[cut:], start=cut) for waits in self.waits)
            pairs = sorted({(each, number) for number, each in chain(*numbered) if each < cut})
            early, late = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self._crossing[cut] = early, late
        return self._crossing[cut]

    def _number_passes(self) -> None:
        """Add all passes, one of each stage in turn: so the passes of a slot stay close together,
        and a change of its cost simulates few others."""
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
                    continue  # not numbered yet: this stage's turn comes again
                # Its stage's pass before is one of the waits, whatever else it needs.
                slot = schedule.place_of_cost(*place)
                number[place] = newest[stage] = self._add(place, slot, (newest[stage], *waits))
                at[stage] += 1
            unfinished = [stage for stage in unfinished if at[stage] < len(orders[stage])]
            if len(number) == before:
                raise ParallelDimsError(f"{schedule} waits for itself; this is a bug")

    def _joint(self, waits: Iterable[int]) -> int:
        """Add a joint, which ends with the last of its waits."""
        return self._add(None, self._count * self._schedule.num_costs, waits)

    def _add(self, place: Place | None, slot: int, waits: Iterable[int]) -> int:
        """Add a number. Where it waits for more than two others, joints gather them first."""
        implied, near = self._implied, (2 << IMPLIED_WAITS_REACH) - 1
        needed = sorted(set(waits) - {0}) or [0]  # every number comes after the start anyway
        if len(needed) > 2:  # leave out those that a later one waits for anyway

            def is_implied(each: int) -> bool:
                return any(implied[late] >> (late - each) & 1 for late in needed if late > each)

            needed = [each for each in needed if not is_implied(each)]
        while len(needed) > 2:
            needed = [*needed[:-2], self._joint(needed[-2:])]
        number = len(self.slots)
        implied.append(0)
        for each in needed:
            # What `each` comes after, moved up by the distance to it; far bits are cut off.
            implied[number] |= (implied[each] | 1) << (number - each) & near
        self.places.append(place)
        self.slots.append(slot)
        self.waits[0].append(needed[0])
        self.waits[1].append(needed[-1])
        return number


_programs = functools.lru_cache(maxsize=64)(Program)


@functools.lru_cache(maxsize=64)
def program(schedule: Schedule, count: int) -> tuple[Program, list[float]]:
    """A program of `count` micro-batches, and each number's time over the cost that it takes
    [numbers]."""
    # Schedules that differ in shares of costs or ranks alone share one program.
    one_rank = replace(schedule.dims, data_parallel=1, context_parallel=1, expert_parallel=1)
    alike = replace(schedule, dims=one_rank, backward_ratio=1.0)
    made = _programs(alike, count)
    shares = [schedule.share(place[1].kind) if place else 1.0 for place in made.places]
    return made, shares


def _waits_for_sends(
    schedule: Schedule, orders: Sequence[Sequence[Pass]]
) -> dict[Place, list[Place]]:
    """Passes that each pass of Megatron's interleaved schedule waits for beside its own input; none
    under others. `orders` are the passes of each stage, in the order it runs them."""
    dims = schedule.dims
    last_stage, last_chunk = dims.pipeline_parallel - 1, dims.virtual_pipeline - 1
    if last_chunk == 0:
        return {}
    passes = [{kind: [p for p in order if p.kind == kind] for kind in "FB"} for order in orders]
    count = len(passes[0]["F"]) // (last_chunk + 1)
    warm_ups = [schedule.warm_up(stage, count) for stage in range(last_stage + 1)]

    def receiver_begins(stage: int, kind: str, number: int) -> list[Place]:
        """The pass after which the next stage posts its receive of a pass's output."""
        ahead, beyond, final = (1, last_stage, last_chunk) if kind == "F" else (-1, 0, 0)
        receiver, before = stage + ahead, number - 1
        if stage == beyond:  # from here to the next chunk, at the other end of the pipeline
            if passes[stage][kind][number].chunk == final:
                return []
            # Megatron's other end receives, after each of its passes, what was made here P - 1
            # passes earlier by the same count.
            receiver, before = last_stage - beyond, number + last_stage
        if before >= 0:
            return [(receiver, passes[receiver][kind][before])]
        if kind == "B":  # begun after the last pass of warm-up
            return [(receiver, passes[receiver]["F"][warm_ups[receiver] - 1])]
        return []

    def received(stage: int, kind: str, number: int) -> list[Place]:
        """The pass whose output the stage at which a chunk begins receives after one of its own; it
        is needed in a later pass."""
        sender, final = (last_stage, last_chunk) if kind == "F" else (0, 0)
        of_sender = number - last_stage
        if stage != last_stage - sender or of_sender < 0:
            return []
        sent = passes[sender][kind][of_sender]
        return [] if sent.chunk == final else [(sender, sent)]

    # A stage that has sent an output waits until the transfer has ended, which takes a pass of the
    # receiver's to end, too. In warm-up and cool-down it waits for sends and receives of both
    # neighbours at once; in steady state after a forward pass for what it just sent, and after a
    # backward pass, or without `waits_for_sends` after either, for what it sent one pass earlier.
    waits: dict[Place, list[Place]] = {}
    for stage, order in enumerate(orders):
        steady = len(passes[stage]["F"]) - warm_ups[stage]
        numbers_of = {"F": 0, "B": 0}
        unfinished: dict[str, list[Place]] = {"F": [], "B": []}
        for what, following in pairwise(order):
            kind, number = what.kind, numbers_of[what.kind]
            numbers_of[kind] += 1
            sent = receiver_begins(stage, kind, number)
            is_steady = number < steady if kind == "B" else number >= warm_ups[stage]
            if not is_steady:
                sent = sent + received(stage, kind, number)
            elif kind == "B" or not dims.waits_for_sends:  # wait one pass late
                sent, unfinished[kind] = unfinished[kind], sent
            waits[stage, following] = sent
    return waits
