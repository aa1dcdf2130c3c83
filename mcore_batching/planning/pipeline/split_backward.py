"""Backward passes split in two: which of them leave their weight gradients for later, and when
those run.

    B   gradient for the inputs, which the stage before waits for
    W   gradients of the weights of linear layers, which nobody waits for

Passes keep their order. W waits in a queue of its stage, first in, first out, in `PARTS` of each
micro-batch. Before each pass as many parts run as end before it could start anyway, and as many
more as make room for what it holds; the rest come last. A micro-batch is held from its forward pass
to the end of its W.

    stage 0   F0 F1       B0 F2    B1 W0 B2 W1 W2     W0 runs while the stage would wait for B2
    stage 1      F0 B0 F1 B1 F2 B2 W0 W1 W2

Ranks that share a row start its passes when the last of them is there, each after W of its own, and
end together.

Guarantees: the same plan on every platform, as only IEEE `+`, `*` and comparisons are used; no
stage holds more than its limit, if none does where no pass is split; with room for all W and
`overhead` 0 no pass ends later than if none were split. W may end a step up to a few parts later,
where waits are shorter than a part: whoever chooses passes compares ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mcore_batching.planning.pipeline.clock import Clock, Operation
from mcore_batching.planning.pipeline.compiled import (
    as_list,
    integers,
    numbers,
    zeros,
)
from mcore_batching.planning.pipeline.coupled_clock import Blocks, members_of
from mcore_batching.planning.pipeline.passes import PARTS, Pass, Schedule, SplitStage
from mcore_batching.planning.pipeline.program import program
from mcore_batching.planning.pipeline.split_kernel import play


class SplitClock:
    """The pipelines of ranks with split backward passes: of one data-parallel rank, or as one of
    ranks in lockstep; under dynamic CP of all. [numbers] are those of the program, each once for
    every rank: rank r has number n at n * ranks + r.

    Args:
        costs: forward cost of each micro-batch, as `CoupledClock` takes them
            [slots * kinds * ranks]; in lockstep of the costliest in each slot.
        weights: cost of its W there [slots * kinds * ranks].
        schedule: order and relative costs of passes.
        blocks: the ranks that share a micro-batch [slots].
        overhead: growth of a backward pass without its W.
        tokens: that a stage holds of each micro-batch before its backward pass [slots][ranks];
            none count if empty.
        kept: what it holds after a split one, until the end of W, over that.
        limit: most tokens that a stage may hold.

    Attributes:
        end: end of the step as simulated last.
        ends: as `Clock.ends`.
        all_split: for `run`, every backward pass [numbers].
    """

    def __init__(
        self,
        costs: Sequence[float],
        weights: Sequence[float],
        schedule: Schedule,
        blocks: Sequence[Blocks],
        *,
        overhead: float = 0.0,
        tokens: Sequence[Sequence[int]] = (),
        kept: float = 1.0,
        limit: int = 0,
    ) -> None:
        kinds = schedule.num_costs
        ranks = self._ranks = len(costs) // (len(blocks) * kinds)
        self.program, shares = program(schedule, len(blocks))
        joint = [0] * ranks  # in the place after the last, which joints have
        slots = [each for each in tokens or [joint] * len(blocks) for _ in range(kinds)]
        held = [each for slot in (*slots, joint) for each in slot]
        self._of_passes = self.program.slots, self.program.stages, self.program.signs, shares
        self._of_places = (
            members_of(blocks, ranks, kinds)[1],
            numbers([*costs, *joint]),
            numbers([*weights, *joint]),
            integers(held),
            integers([math.ceil(kept * each) for each in held]),
        )
        self._factors, self._limit = (schedule.share("F"), 1.0 + overhead), limit
        self.all_split = [int(sign < 0) for sign in self.program.signs for _ in range(ranks)]
        self.end, self.ends = 0.0, [0.0] * ranks

    def run(self, split: Sequence[int]) -> float:
        """Simulate with these passes split, W as soon as it costs nothing; the end of the step.

        Args:
            split: 1 for each backward pass that is to be split, 0 for all else [numbers].
        """
        return self._simulate(split, [-1] * len(split))

    def follow(self, ranks: Sequence[Sequence[SplitStage]]) -> None:
        """Simulate what a plan says of the stages of each rank."""
        split, parts = ([0] * len(self.all_split) for _ in range(2))
        for rank, stages in enumerate(ranks):
            for passes, of_stage in zip(self.program.of_stages, stages, strict=True):
                for number, is_split, before in zip(passes, *of_stage, strict=True):
                    at = number * self._ranks + rank
                    split[at], parts[at] = int(is_split), before
        self._simulate(split, parts)

    def _simulate(self, split: Sequence[int], parts: Sequence[int]) -> float:
        count, stages, ranks = len(split), len(self.program.of_stages), self._ranks
        self._split, self._parts = integers(split), integers(parts)
        self._starts, self._ends, self._part = zeros(count), zeros(count), zeros(count)
        self._late, following = integers([0] * count), integers([0] * count)
        free, last = zeros(ranks * stages), integers([0] * (ranks * stages))
        play(
            self.program.waits,
            self._of_passes,
            self._of_places,
            self._factors,
            self._limit,
            (self._split, self._parts),
            (self._starts, self._ends, self._part),
            (self._late, following),
            free,
            last,
        )
        # `free` now counts W that ran after the last pass, which `ends` do not.
        ended = as_list(free)
        self.ends = [max(ended[rank * stages : (rank + 1) * stages]) for rank in range(ranks)]
        self.end = max(self.ends)
        self._last = int(last[ended.index(self.end)])
        return self.end

    def critical_path(self) -> list[int]:
        """The passes that the end waits for, each for the next; the last ones first [numbers]."""
        path, at = [], self._last
        while at >= self._ranks:  # before are all ranks' number 0, the start
            if self.program.places[at // self._ranks]:
                path.append(at)
            at = int(self._late[at])
        return path

    def waited_for(self) -> list[int]:
        """Backward passes on the critical path, but for those at its end that no other stage and
        no later wait of their stage could do W after [numbers]."""
        path, ranks, program = self.critical_path(), self._ranks, self.program
        stages = [(program.stages[at // ranks], at % ranks) for at in path]
        left = next((at for at, stage in enumerate(stages) if stage != stages[0]), len(path))
        return [at for at in path[left:] if program.signs[at // ranks] < 0]

    @property
    def stages(self) -> list[tuple[SplitStage, ...]]:
        """The split passes and parts of W of each rank's stages, as simulated last."""
        split, parts = as_list(self._split), as_list(self._parts)

        def of(rank: int, passes: Sequence[int]) -> SplitStage:
            own = [number * self._ranks + rank for number in passes]
            return SplitStage(tuple(bool(split[at]) for at in own), tuple(parts[at] for at in own))

        of_stages = self.program.of_stages
        return [tuple(of(rank, each) for each in of_stages) for rank in range(self._ranks)]

    def operations(self, rank: int = 0) -> list[Operation]:
        """As `Clock.operations`; parts of one W that run in a row are one pass."""
        made: list[Operation] = []
        for stage, passes in enumerate(self.program.of_stages):
            waiting: list[int] = []  # the backward pass of each part of W that has not run
            free = 0.0
            for number in passes:
                at = number * self._ranks + rank
                before = self._parts[at]
                free = self._run_parts(made, stage, waiting[:before], free)
                del waiting[:before]
                start, free = float(self._starts[at]), float(self._ends[at])
                made.append(Operation(stage, *self._pass(at), start, free))
                waiting += [at] * (PARTS * self._split[at])
            self._run_parts(made, stage, waiting, free)
        return made

    def _run_parts(
        self, made: list[Operation], stage: int, parts: Sequence[int], free: float
    ) -> float:
        """Add parts of W, of these backward passes, that run from `free` on; when they end."""
        for at, run in itertools.groupby(parts):
            end = free + len([*run]) * float(self._part[at])
            made.append(Operation(stage, *self._pass(at)._replace(kind="W"), free, end))
            free = end
        return free

    def _pass(self, at: int) -> Pass:
        place = self.program.places[at // self._ranks]
        assert place is not None
        return place[1]


def clock_of_rank(
    costs: Sequence[float],
    weights: Sequence[float],
    schedule: Schedule,
    stages: Sequence[SplitStage],
    *,
    overhead: float,
) -> Clock | SplitClock:
    """The clock of a rank by itself: `Clock` of `costs`, or where its passes are split (`stages`
    not empty) what the plan says of them. Arguments are those of `SplitClock`."""
    if not stages:
        return Clock(costs, schedule)
    blocks: list[Blocks] = [()] * (len(costs) // schedule.num_costs)
    clock = SplitClock(costs, weights, schedule, blocks, overhead=overhead)
    clock.follow([stages])
    return clock
