"""Backward passes split in two: which of them leave their weight gradients for later, and when
those run.

    B   gradient for the inputs, which the stage before waits for
    W   gradients of the weights of linear layers, which nobody waits for

Passes keep their order. W waits in a queue of its stage, first in, first out over micro-batches, in
`PARTS` of each. Before each pass as many parts run as end before it could start anyway, and as many
more as make room for what it holds; the rest come last. A micro-batch is held from its forward pass
to the end of its W.

    stage 0   F0 F1       B0 F2    B1 W0 B2 W1 W2     W0 runs while the stage would wait for B2
    stage 1      F0 B0 F1 B1 F2 B2 W0 W1 W2

Under dynamic CP ranks that share a row start its passes when the last of them is there, each after
W of its own, and end together.

Guarantees: the same plan on every platform, as only IEEE `+`, `*` and comparisons are used; no
stage holds more than its limit, if none does where no pass is split; with room for all W and
`overhead` 0 no pass ends later than if none were split. W may end a step up to a few parts later,
where waits are shorter than a part: whoever chooses passes compares ends.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

from mcore_batching.planning.pipeline.clock import Operation
from mcore_batching.planning.pipeline.compiled import (
    Integers,
    Numbers,
    as_list,
    integers,
    kernel,
    numbers,
)
from mcore_batching.planning.pipeline.coupled_clock import Blocks
from mcore_batching.planning.pipeline.passes import Pass, Schedule
from mcore_batching.planning.pipeline.program import Program, program

PARTS = 8
"""Parts of one micro-batch's W, cut between layers, by which plans count."""


class SplitStage(NamedTuple):
    """The passes of one stage of one data-parallel rank in one step.

    Attributes:
        split: for each forward or backward pass of `Schedule.order(stage, num_microbatches)`, True
            if it is a backward pass that leaves its W for later.
        parts_before: for each of them, how many parts of W, of the oldest first, run before it;
            what is left runs after the last.
    """

    split: tuple[bool, ...]
    parts_before: tuple[int, ...]


class SplitClock:
    """The pipelines of ranks with split backward passes: of one data-parallel rank, or as one of
    ranks in lockstep; under dynamic CP of all.

    Args:
        costs: forward cost of each micro-batch on each kind of stage [ranks][slots * kinds]; in
            lockstep of the costliest in each slot.
        weights: cost of its W there [ranks][slots * kinds].
        schedule: order and relative costs of passes.
        blocks: the ranks that share a micro-batch [slots]; none if empty.
        overhead: growth of a backward pass without its W.
        tokens: that a stage holds of each micro-batch before its backward pass [ranks][slots].
        deferred: that it holds after a split one, until the end of W [ranks][slots].
        limit: most tokens that a stage may hold.

    Attributes:
        end: end of the step as simulated last.
        ends: as `Clock.ends`.
    """

    def __init__(
        self,
        costs: Sequence[Sequence[float]],
        weights: Sequence[Sequence[float]],
        schedule: Schedule,
        *,
        blocks: Sequence[Blocks] = (),
        overhead: float = 0.0,
        tokens: Sequence[Sequence[int]] = (),
        deferred: Sequence[Sequence[int]] = (),
        limit: int = 0,
    ) -> None:
        kinds, count = schedule.num_costs, len(costs[0]) // schedule.num_costs
        ranks = len(costs)
        self.layout, self._limit = _layout(schedule, count, ranks), limit
        took = list(map(mul, self.layout.of_each(costs), self.layout.shares))
        weight = map(mul, self.layout.of_each(weights), self.layout.weight_shares)
        self._weight = list(map(min, weight, took))  # a backward pass takes no less than its W
        pairs = list(zip(took, self._weight, strict=True))
        self._took = numbers(took)
        self._alone = numbers([(whole - own) * (1.0 + overhead) for whole, own in pairs])
        self._part = numbers([own * (1.0 / PARTS) for own in self._weight])
        none = [[0] * count] * ranks
        self._tokens, self._deferred = (
            integers(
                self.layout.of_each([[each for each in own for _ in range(kinds)] for own in held])
            )
            for held in (tokens or none, deferred or tokens or none)
        )
        together = [1] * len(took)
        for number, place in enumerate(self.layout.program.places):
            for first, after in blocks[place[1].slot] if blocks and place else ():
                together[number * ranks + first] = after - first
        self._together = integers(together)
        self.end = 0.0

    def run(self, split: Sequence[int]) -> float:
        """Simulate with these passes split, W as soon as it costs nothing; the end of the step.

        Args:
            split: 1 for each backward pass that is to be split, 0 for all else [numbers].
        """
        return self._simulate(split, [-1] * len(split))

    def follow(self, ranks: Sequence[Sequence[SplitStage]]) -> None:
        """Simulate what a plan says of the stages of each rank."""
        split, parts = ([0] * len(self._took) for _ in range(2))
        for own, of_stage in zip(self.layout.passes, itertools.chain(*ranks), strict=True):
            for number, is_split, before in zip(own, *of_stage, strict=True):
                split[number], parts[number] = int(is_split), before
        self._simulate(split, parts)

    def _simulate(self, split: Sequence[int], parts: Sequence[int]) -> float:
        count, none = len(split), [0] * len(self.layout.passes)
        self._split, self._parts = integers(split), integers(parts)
        self._starts, self._ends = numbers([0.0] * count), numbers([0.0] * count)
        self._late, free = integers(split), numbers([0.0] * len(none))
        last = integers(none)
        _play(
            *self.layout.waits,
            self._together,
            self.layout.stages,
            self.layout.signs,
            self._took,
            self._alone,
            self._part,
            self._tokens,
            self._deferred,
            self._limit,
            self._split,
            self._parts,
            self._starts,
            self._ends,
            self._late,
            free,
            last,
            integers([0] * count),
        )
        stages = as_list(free)
        self.ends = [max(stages[own]) for own in self.layout.of_rank]
        self.end = max(self.ends)
        self._last = int(last[stages.index(self.end)])
        return self.end

    def critical_path(self) -> list[int]:
        """The passes that the end waits for, each for the next; the last ones first [numbers]."""
        path, number = [], self._last
        while number >= self.layout.ranks:
            if self.layout.stages[number] >= 0:
                path.append(number)
            number = int(self._late[number])
        return path

    def waited_for(self) -> list[int]:
        """Backward passes on the critical path, but for those at its end that no other stage and
        no later wait of their stage could do W after [numbers]."""
        path = self.critical_path()
        stages = [self.layout.stages[number] for number in path]
        left = next((at for at, stage in enumerate(stages) if stage != stages[0]), len(path))
        return [number for number in path[left:] if self.layout.signs[number] < 0]

    @property
    def stages(self) -> list[tuple[SplitStage, ...]]:
        """The split passes and parts of W of each rank's stages, as simulated last."""
        split, parts = as_list(self._split), as_list(self._parts)
        stages = [
            SplitStage(tuple(bool(split[n]) for n in own), tuple(parts[n] for n in own))
            for own in self.layout.passes
        ]
        return [tuple(stages[own]) for own in self.layout.of_rank]

    def operations(self, rank: int = 0) -> list[Operation]:
        """As `Clock.operations`; parts of one W that run in a row are one pass."""
        made: list[Operation] = []
        of_rank = self.layout.passes[self.layout.of_rank[rank]]
        for stage, (own, of_stage) in enumerate(zip(of_rank, self.stages[rank], strict=True)):
            waiting: list[int] = []  # the backward pass of each part of W that has not run
            free = 0.0
            for number, is_split, before in zip(own, *of_stage, strict=True):
                free = self._run_parts(made, stage, waiting[:before], free)
                del waiting[:before]
                start, free = float(self._starts[number]), float(self._ends[number])
                made.append(Operation(stage, *self._pass(number), start, free))
                waiting += [number] * (PARTS * is_split)
            self._run_parts(made, stage, waiting, free)
        return made

    def _run_parts(
        self, made: list[Operation], stage: int, parts: Sequence[int], free: float
    ) -> float:
        """Add parts of W, of these backward passes, that run from `free` on; when they end."""
        for number, run in itertools.groupby(parts):
            end = free + len([*run]) * (self._weight[number] / PARTS)
            made.append(Operation(stage, *self._pass(number)._replace(kind="W"), free, end))
            free = end
        return free

    def _pass(self, number: int) -> Pass:
        place = self.layout.program.places[number // self.layout.ranks]
        assert place is not None
        return place[1]


class _Layout(NamedTuple):
    """Data that steps of one schedule and numbers of micro-batches and ranks have in common.

    The program's numbers, each once for each rank: rank r has number n at n * ranks + r.
    """

    program: Program
    ranks: int
    waits: tuple[Integers, Integers]
    """As `Program.waits` [2][numbers]."""
    shares: list[float]
    """Time of a pass, whole if backward, over its slot's cost [numbers]."""
    weight_shares: list[float]
    """Time of W of a backward pass over that of its slot [numbers]."""
    passes: list[list[int]]
    """Passes of each rank's stages in the order it runs them [ranks * stages][passes]."""
    of_rank: list[slice]
    """Places in `passes` of each rank's stages [ranks]."""
    stages: Integers
    """Place in `passes` of each number's stage; -1 of joints."""
    signs: Integers
    """-1 for backward passes, 1 for all else [numbers]."""

    @property
    def all_split(self) -> list[int]:
        """For `run`: every backward pass is split."""
        return [int(sign < 0) for sign in self.signs]

    def of_each(self, ranks: Sequence[Sequence[Any]]) -> list[Any]:
        """Values of numbers [numbers * ranks], of those of places [ranks][places]; 0 of joints."""
        columns = [self.program.of_each([*places, 0]) for places in ranks]
        return [each for row in zip(*columns, strict=True) for each in row]


@functools.lru_cache(maxsize=64)
def _layout(schedule: Schedule, count: int, ranks: int) -> _Layout:
    made, shares = program(schedule, count)
    own = schedule.dims.pipeline_parallel
    passes: list[list[int]] = [[] for _ in range(ranks * own)]
    numbered = [(place, rank) for place in made.places for rank in range(ranks)]
    weight_shares = [0.0] * len(numbered)
    stages, signs = [-1] * len(numbered), [1] * len(numbered)
    for number, (place, rank) in enumerate(numbered):
        if place is None:
            continue
        stage, what = place
        stages[number] = rank * own + stage
        passes[stages[number]].append(number)
        if what.kind == "B":
            weight_shares[number] = schedule.share(stage, "F", what.chunk)
            signs[number] = -1
    first, other = (
        integers([before * ranks + rank for before in as_list(waits) for rank in range(ranks)])
        for waits in made.waits
    )
    return _Layout(
        made,
        ranks,
        (first, other),
        [float(share) for share in shares for _ in range(ranks)],
        weight_shares,
        passes,
        [slice(rank * own, (rank + 1) * own) for rank in range(ranks)],
        integers(stages),
        integers(signs),
    )


def split_inflight_tokens(
    slot_tokens: Sequence[int],
    schedule: Schedule,
    of_stage: SplitStage,
    kept: float,
    *,
    stage: int = 0,
) -> float:
    """`inflight_tokens` where passes are split: a micro-batch is in flight to the end of its W.

    Args:
        slot_tokens: padded tokens of each micro-batch [num_microbatches].
        schedule: gives the order of passes.
        of_stage: what the plan says of the stage.
        kept: what a micro-batch holds from its backward pass on, over what it holds before.
        stage: pipeline rank.
    """
    held = most = run = 0
    queue: list[int] = []  # tokens held for W that has not run
    order = schedule.order(stage, len(slot_tokens))
    for what, is_split, before in zip(order, *of_stage, strict=True):
        run += before
        while run >= PARTS:
            run -= PARTS
            held -= queue.pop(0)
        tokens = slot_tokens[what.slot]
        held += tokens if what.kind == "F" else -tokens
        if is_split:
            queue.append(math.ceil(kept * tokens))
            held += queue[-1]
        most = max(most, held)
    return most / schedule.dims.virtual_pipeline


@kernel
def _play(
    waits: Integers,
    waits_too: Integers,
    together: Integers,
    stage_of: Integers,
    signs: Integers,
    took: Numbers,
    alone: Numbers,
    part: Numbers,
    tokens: Integers,
    deferred: Integers,
    limit: int,
    split: Integers,
    parts: Integers,
    starts: Numbers,
    ends: Numbers,
    late: Integers,
    free: Numbers,
    last: Integers,
    following: Integers,
) -> None:
    """Starts and ends of all passes and what each waits for last; the ends of stages, and the last
    pass of each. `together` says of the first of ranks that share a row how many they are. `parts`
    of -1 are chosen, and what a split pass would leave then fits, or it is not split. `following`,
    all 0, is used for W that is due."""
    count = len(stage_of)
    held = [0 for _ in free]  # tokens of each stage
    first = [0 for _ in free]  # ends of its queue; 0: it is empty
    newest = [0 for _ in free]
    left = [PARTS for _ in free]  # parts of its first entry
    stop = 0
    while stop < count:
        number = stop
        stop = number + together[number]
        ready, cause = -1.0, 0
        for each in range(number, stop):
            before, other = waits[each], waits_too[each]
            later = other if ends[other] > ends[before] else before
            if ends[later] > ready:
                ready, cause = ends[later], later
        if stage_of[number] < 0:
            ends[number], late[number] = ready, cause
            continue
        start, longest = ready, 0.0
        for each in range(number, stop):
            stage = stage_of[each]
            # Tokens that the stage holds more once this pass is over.
            more = tokens[each] if signs[each] > 0 else -tokens[each]
            if split[each]:
                more += deferred[each]
            given, made = parts[each], 0
            while first[stage]:
                at = first[stage]
                if given >= 0:
                    if made >= given:
                        break
                elif free[stage] + part[at] > ready and (more <= 0 or held[stage] + more <= limit):
                    break
                free[stage] += part[at]
                made += 1
                left[stage] -= 1
                if left[stage] == 0:
                    held[stage] -= deferred[at]
                    first[stage] = following[at]
                    left[stage] = PARTS
            parts[each] = made
            if given < 0 and split[each] and more > 0 and held[stage] + more > limit:
                split[each] = 0
                more -= deferred[each]
            held[stage] += more
            if free[stage] > start:
                start, cause = free[stage], last[stage]
            if split[each]:
                if first[stage]:
                    following[newest[stage]] = each
                else:
                    first[stage] = each
                newest[stage] = each
            longest = max(longest, alone[each] if split[each] else took[each])
        for each in range(number, stop):
            stage = stage_of[each]
            starts[each], late[each] = start, cause
            ends[each] = free[stage] = start + longest
            last[stage] = each
    for stage in range(len(free)):
        while first[stage]:
            free[stage] += part[first[stage]]
            left[stage] -= 1
            if left[stage] == 0:
                first[stage] = following[first[stage]]
                left[stage] = PARTS
