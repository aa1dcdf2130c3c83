"""The one clock: when the passes of a step start and end, kept ready for changes of costs.

A pass starts once the passes that it waits for have ended (`program` lists them, at most two each,
always with smaller numbers), so one loop in the order of numbers gives all ends. The search tries
many changes of few micro-batches, and a change simulates its span alone:

    number   0 ........ first ............ stop .......... last
    ends     |  as before |  simulated anew  |
    tails                                    |  as before   |

A pass's tail is the time from its start to the end of the step along the critical path. The step
ends at the largest end + tail over the waits that cross `stop`.

Weights say how the step's end follows from costs. The critical path takes each micro-batch's cost
some number of times, its weight; any path bounds the end from below, so for the weights of any step

    end(costs) >= sum(weight * cost), with equality for the costs that they were taken from,

and a change under which this sum does not fall is refused without a simulation.

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from mcore_batching.planning.pipeline.passes import Kind, Schedule
from mcore_batching.planning.pipeline.program import program

Changes = Sequence[tuple[int, float]]
"""Places of micro-batches, and what to add to the cost at each; a place may come twice."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one model chunk, with its times."""

    stage: int
    """Pipeline rank."""
    kind: Kind
    """See `passes`."""
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""
    start: float
    """Units of cost since the step began."""
    end: float
    """Units of cost since the step began."""


class Clock:
    """The pipeline of one data-parallel rank, or of ranks in lockstep.

    Args:
        costs: forward cost of each micro-batch on a stage [slots]; in lockstep of the costliest in
            each slot. Where stages differ, on each kind of them [slots * kinds].
        schedule: order and relative costs of passes.

    Attributes:
        costs: current cost of each micro-batch [places]; a place is a slot, or a slot and a kind.
        passes_run: passes simulated so far.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(self, costs: Sequence[float], schedule: Schedule) -> None:
        self._load(costs, schedule, len(costs) // schedule.num_costs, 1)
        of_slots = [*costs, 0.0]  # numbers without a micro-batch have the slot after the last
        took = list(map(mul, self._program.of_each(of_slots), self._shares))
        self._took, self._ends = took, [0.0] * len(took)
        self._tails, self._tails_from = [0.0] * len(took), len(took)
        """Tails [numbers], valid from number `_tails_from` on; computed when first needed."""
        self._run(0, len(took))

    def _load(self, costs: Sequence[float], schedule: Schedule, slots: int, ranks: int) -> None:
        self.costs, self._ranks = list(costs), ranks
        self._program, self._shares = program(schedule, slots)
        self._waits, self._slots = self._program.waits, self._program.slots
        self._tried: Changes = ()
        self.passes_run = 0

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)

    @property
    def ends(self) -> list[float]:
        """End of the step on each rank."""
        return self._ends[-self._ranks :]

    def end_with(self, changes: Changes) -> float:
        """End of the step with `changes`, up to rounding; nothing is changed."""
        # The span's own passes are simulated; what follows it is read off the tails.
        first, stop = self._span(changes)
        self._update_tails(stop)
        saved = self._save(first, stop)
        self._change(changes)
        self._run(first, stop)
        # Every path to the end crosses `stop` once: by a wait of a later pass for an earlier one.
        end = _largest_sum(*self._program.crossing(stop), self._ends, self._tails)
        self._restore(first, stop, saved)
        self._tried = changes
        return end

    def become(self, changes: Changes) -> None:
        """Make `changes`."""
        first, stop = self._span(changes)
        self._change(changes)
        # A tail holds costs of later passes: those before `stop` are out of date.
        self._tails_from = max(self._tails_from, stop)
        self._run(first, len(self._slots))

    def weights(self) -> list[float]:
        """Weight of each micro-batch on the critical path [places]."""
        weights = [0.0] * (len(self.costs) + 1)  # one for joints, cut off
        _weigh_critical_path(*self._waits, self._slots, self._shares, self._ends, weights)
        return weights[:-1]

    def weights_with(self) -> list[float]:
        """`weights` with the changes of the last `end_with`."""
        # Unlike an end, a path needs the ends of all passes, up to the last.
        first, stop = self._span(self._tried)[0], len(self._slots)
        saved = self._save(first, stop)  # as `end_with`, but up to the end of the step
        self._change(self._tried)
        self._run(first, stop)
        weights = self.weights()
        self._restore(first, stop, saved)
        return weights

    def operations(self, rank: int = 0) -> list[Operation]:
        """All passes of a rank with their times: stage after stage, each in the order it runs."""
        made, ends, ranks = [], self._ends, self._ranks
        for number, place in enumerate(self._program.places):
            if place is not None:
                stage, what = place
                together = self._together(number, rank)
                before = [waits[number] * ranks for waits in self._waits]
                start = max(ends[other + each] for other in before for each in together)
                made.append(Operation(stage, *what, start, ends[number * ranks + rank]))
        return sorted(made, key=lambda each: each.stage)

    def _together(self, number: int, rank: int) -> range:
        """The ranks that run a pass of a rank together."""
        del number
        return range(rank, rank + 1)

    def _span(self, changes: Changes) -> tuple[int, int]:
        """list[float] from `first` to before `stop` that hold every pass of the changed slots."""
        spans = [self._program.spans[place // self._ranks] for place, _ in changes]
        return min(first for first, _ in spans), max(stop for _, stop in spans)

    def _change(self, changes: Changes) -> None:
        for place, more in changes:
            self._set_cost(place, self.costs[place] + more)

    def _save(self, first: int, stop: int) -> tuple[list[float], list[float], list[float]]:
        """Costs, times and ends of a span, for `_restore`."""
        return self.costs[:], self._took[first:stop], self._ends[first:stop]

    def _restore(
        self, first: int, stop: int, saved: tuple[list[float], list[float], list[float]]
    ) -> None:
        self.costs[:], self._took[first:stop], self._ends[first:stop] = saved

    def _set_cost(self, place: int, cost: float) -> None:
        self.costs[place] = cost
        _set_times(self._program.of_slot[place], cost, self._shares, self._took)

    def _run(self, first: int, stop: int) -> None:
        self.passes_run += stop - first
        _run(*self._waits, self._took, self._ends, first, stop)

    def _update_tails(self, first: int) -> None:
        """Make the tails of number `first` and all after it valid."""
        stop = self._tails_from
        if first < stop:
            crossing, after = self._program.crossing(stop), [0.0] * stop
            _run_back(*self._waits, self._took, after, self._tails, first, stop, *crossing)
            self.passes_run += stop - first
            self._tails_from = first


def _set_times(passes: list[int], cost: float, shares: list[float], took: list[float]) -> None:
    """Times of one slot's passes."""
    for number in passes:
        took[number] = cost * shares[number]


def _run(
    waits: list[int],
    waits_too: list[int],
    took: list[float],
    ends: list[float],
    first: int,
    stop: int,
) -> None:
    """Ends of the passes of a span, from the ends before it."""
    number = first
    # Slices, a zip and a comparison: faster than indices and `max`.
    passes = zip(waits[first:stop], waits_too[first:stop], took[first:stop], strict=True)
    for before, other, time in passes:
        start, ready = ends[before], ends[other]
        ends[number] = (ready if ready > start else start) + time
        number += 1


def _run_back(
    waits: list[int],
    waits_too: list[int],
    took: list[float],
    after: list[float],
    tails: list[float],
    first: int,
    stop: int,
    early: list[int],
    late: list[int],
) -> None:
    """Tails of the passes of a span, from the tails after it.

    `after`, 0 at first, collects for each number before `stop` the largest tail of the passes that
    wait for it; `early` and `late` are the waits that cross `stop`.
    """
    for number, other in zip(early, late, strict=True):
        if tails[other] > after[number]:
            after[number] = tails[other]
    for number in range(stop - 1, first - 1, -1):
        # All that wait for this pass have larger numbers, so `after` is complete here.
        tail = after[number] + took[number]
        tails[number] = tail
        if tail > after[waits[number]]:
            after[waits[number]] = tail
        if tail > after[waits_too[number]]:
            after[waits_too[number]] = tail


def _largest_sum(early: list[int], late: list[int], ends: list[float], tails: list[float]) -> float:
    """End of the step, from the waits that cross a cut."""
    end = 0.0
    for number, other in zip(early, late, strict=True):
        if ends[number] + tails[other] > end:
            end = ends[number] + tails[other]
    return end


def _weigh_critical_path(
    waits: list[int],
    waits_too: list[int],
    slots: list[int],
    shares: list[float],
    ends: list[float],
    weights: list[float],
) -> None:
    """Add each slot's shares on the critical path to its weight; a forward pass of a mean stage
    that holds one chunk counts 1."""
    number = len(slots) - 1  # back from the end of the step, each time to the later of two waits
    while number > 0:
        weights[slots[number]] += shares[number]
        before, other = waits[number], waits_too[number]
        number = other if ends[other] > ends[before] else before
