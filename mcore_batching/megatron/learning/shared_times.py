"""Times of passes in which ranks wait for each other.

Under dynamic CP they wait in the attention of rows that they share:

    rank 0   [begins.....waits......computes]     took 9 s
    rank 1                     [computes]         took 4 s: what the row costs

Whoever begins last waits for nobody, so a pass costs what the rank that took least time says. That
least time travels as a figure with an agreement that there is anyway.

With expert parallelism they wait in every layer for the rank with most work, so a pass takes as
long as the costliest row of its slot, and only that row counts. Which one it is depends on the
costs that are to be learnt: where all ranks' rows are known, it is asked anew whenever these have
changed (`Rivals`), or what the first guess took for the costliest would count for eight steps.
Elsewhere the largest cost of each slot travels like those times, and it is told once, a step later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.cost_fit import Timing, is_usable
from mcore_batching.planning.learnt_costs import LearntCosts
from mcore_batching.planning.pipeline import Kind, Pass
from mcore_batching.planning.plan import Row, StepPlan

KINDS: tuple[Kind, ...] = "F", "B"
"""Passes that are timed."""
NUM_LEAST = 32
"""Times that travel of a step: an agreement has a hundred numbers in its first message."""
NUM_SLOTS = 24
"""Slots whose largest cost travels."""
_ALMOST = 1 - 1e-9
"""The same samples in another order cost the same but for rounding."""


def places_of_slots(num_slots: int) -> dict[int, int]:
    """The slots whose largest cost travels, with the place of its number."""
    count = min(num_slots, NUM_SLOTS)
    return {number * num_slots // count: number for number in range(count)}


def costs_of_slots(costs: Sequence[float]) -> list[float]:
    """This rank's numbers, of which all ranks are to know the largest.

    Args:
        costs: of each of its rows [slots].
    """
    numbers = [0.0] * NUM_SLOTS
    for slot, place in places_of_slots(len(costs)).items():
        numbers[place] = costs[slot]
    return numbers


@dataclasses.dataclass(frozen=True)
class Rivals:
    """The rows of all ranks that may be the costliest of their slot; the same on every rank.

    Attributes:
        rows: for each slot, lengths and context-parallel sizes, 1 where all rows have one.
    """

    rows: list[list[tuple[tuple[int, ...], int]]]

    @classmethod
    def of(cls, plan: StepPlan, lengths: Sequence[int], window: int | None) -> Rivals:
        """Of a step, whatever costs are but for attention's window.

        A row with neither more tokens nor more pairs than another of its size costs no more.

        Args:
            plan: of all ranks.
            lengths: total length of each sample of the step [samples], in tokens.
            window: tokens that each token attends to at most; None: no bound.
        """
        pairs = CostModel(linear=0.0, quadratic=1.0, per_micro_batch=0.0, window=window)
        sized = []
        for row in plan.rows():
            held = tuple(int(lengths[i]) for i in row.samples)
            size = 1 if plan.context_parallel is None else row.size
            sized.append((row.slot, size, sum(held), pairs.micro_batch(held), held))
        sized.sort(reverse=True)
        rows: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(plan.num_microbatches)]
        most: dict[tuple[int, int], float] = {}
        for slot, size, _, pairs_of_row, held in sized:
            if pairs_of_row > most.get((slot, size), -1.0):
                most[slot, size] = pairs_of_row
                rows[slot].append((held, size))
        return cls(rows)

    def costliest(self, timed: Iterable[tuple[int, Timing]], learnt: LearntCosts) -> list[Timing]:
        """Of timed rows with their slots, those that no rank of the slot had to wait for longer."""
        most = [max(learnt.units(*row) for row in slot) * _ALMOST for slot in self.rows]
        return [
            timing
            for slot, timing in timed
            if learnt.units(timing.lengths, timing.context_parallel) >= most[slot]
        ]


@dataclasses.dataclass(frozen=True)
class SharedTimes:
    """Some of a step's rows that several ranks share; the same on every rank but for its own.

    Attributes:
        rows: of the plan.
        lengths: of the samples of each.
        chunks: model chunks of a stage.
        own: this rank, as the plan numbers them.
    """

    rows: list[Row]
    lengths: list[tuple[int, ...]]
    chunks: int
    own: int

    @classmethod
    def of(cls, schedule: MicroBatchSchedule, step: int) -> SharedTimes:
        """Of a step under dynamic CP: of all sizes as many as there are numbers for."""
        plan, lengths = schedule.step_plan(step)
        assert schedule.moves is not None

        def lengths_of(row: Row) -> tuple[int, ...]:
            return tuple(int(lengths[i]) for i in row.samples)

        chunks = schedule.dims.virtual_pipeline
        shared = [row for row in plan.rows() if row.size > 1 and row.samples]
        shared.sort(key=lambda row: (row.size, sum(lengths_of(row)), row))
        count = min(len(shared), NUM_LEAST // (len(KINDS) * chunks))
        rows = [shared[number * len(shared) // count] for number in range(count)]
        lengths_of_rows = [lengths_of(row) for row in rows]
        return cls(rows, lengths_of_rows, chunks, schedule.moves.own)

    def seconds(self, passes: Mapping[Pass, float], factor: float) -> list[float]:
        """This rank's numbers, of which all ranks are to know the least.

        Args:
            passes: seconds of each.
            factor: time of its stage over that of a mean one.

        Returns:
            the seconds of each pass on a mean stage; inf where it has no part in a row, 0, which
            is no time, where it could not be told.
        """
        numbers = [0.0] * NUM_LEAST
        for place, row in enumerate(self.rows):
            has_part = row.rank <= self.own < row.rank + row.size
            for chunk in range(self.chunks):
                for kind in KINDS:
                    took = math.inf
                    if has_part:
                        took = passes[Pass(kind, chunk, row.slot)] / factor
                    is_time = took > 0  # nor NaN
                    numbers[self._index(place, chunk, kind)] = took if is_time else 0.0
        return numbers

    def timings(self, least: Sequence[float]) -> list[tuple[int, Timing]]:
        """Slot and times of each row that could be told, given the least of all ranks' numbers.

        Args:
            least: of what `seconds` gives.
        """
        timings = []
        for place, (row, lengths) in enumerate(zip(self.rows, self.lengths, strict=True)):
            forward, backward = (
                [least[self._index(place, chunk, kind)] for chunk in range(self.chunks)]
                for kind in KINDS
            )
            timing = Timing(
                lengths=lengths,
                forward_seconds=ordered_sum(forward),
                backward_seconds=ordered_sum(backward),
                context_parallel=row.size,
            )
            if min(forward + backward) > 0 and is_usable(timing):
                timings.append((row.slot, timing))
        return timings

    def _index(self, place: int, chunk: int, kind: Kind) -> int:
        return (place * self.chunks + chunk) * len(KINDS) + KINDS.index(kind)
