"""The choice of backward passes to split, and of an order of micro-batches that suits it.

1. Passes are chosen along critical paths: those on the path of the step without split passes, then
   those on the path of the step so made, and so on; the best of these steps counts.
2. Of the straggler some micro-batches in a row run in reverse, if it then ends no later; passes
   keep their numbers, so what is split stays split. With exchanges of two, steps of 512 samples on
   8 stages end 2 % later.
3. Passes are chosen anew, and those that are not needed are left whole: a whole backward pass hides
   tensor parallelism's communication behind its W.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from mcore_batching.planning.pipeline import (
    Blocks,
    SplitClock,
    SplitStage,
    blocks_of,
    inflight_tokens,
)
from mcore_batching.planning.plans.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.moves import drawing
from mcore_batching.planning.search.objective import Objective, Ranks

WORTH_IT = 0.98
"""No pass is split where the step is predicted to end less than 2 % sooner: about what predictions
are off by."""
AS_SOON = 1.001
"""A pass is left whole where the step ends at most 0.1 % later."""
SMALLEST_BLOCK = 32
"""Passes are left whole by the half, the quarter, ... a 32nd of a rank's backward passes."""
EFFORT_OF_A_PASS = 3
"""A simulated pass of a split step costs as much effort as 3 others. With 8 steps end up to 1 %
later; with 1, planning takes twice as long."""

Sizes = tuple[tuple[int, ...], ...]
"""As `StepPlan.context_parallel`."""
Splits = tuple[tuple[SplitStage, ...], ...]
"""As `StepPlan.split_backward`."""


def split_backward(
    problem: Problem, starts: Sequence[Ranks], sizes: Sizes | None = None
) -> tuple[tuple[MicroBatches, ...], Sizes | None, Splits]:
    """Micro-batches in the order in which the step ends soonest, under dynamic CP with their
    context-parallel sizes, and its split passes.

    Args:
        problem: of the step; `config.split_backward` says which passes may be split.
        starts: steps to begin with; the first is the result where splitting is not worth it.
        sizes: of the micro-batches of all starts; None without dynamic CP.
    """
    all_split = problem.config.split_backward == "all"
    # One half for all starts together, one for the best of them.
    effort = Objective(problem).effort / EFFORT_OF_A_PASS / 2 if problem.config.searches else 0.0
    steps = [_Step(problem, ranks, sizes) for ranks in starts]
    plain_end = max(pipeline.end_unsplit for pipeline in steps[0].pipelines)
    for step in steps:
        step.reorder(effort / len(steps))
    best = min(steps, key=lambda step: step.end)
    best.reorder(effort)
    if all_split or best.end <= WORTH_IT * plain_end:
        splits = best.splits()
        if any(any(stage.split) for stages in splits for stage in stages):
            in_order = tuple(best.in_order("sizes")) if sizes else None
            return _frozen(best.in_order("samples")), in_order, splits
    return _frozen(starts[0]), sizes, ()


def _frozen(ranks: Ranks) -> tuple[MicroBatches, ...]:
    return tuple(tuple(map(tuple, slots)) for slots in ranks)


class _Step:
    """A step that is being changed."""

    def __init__(self, problem: Problem, ranks: Ranks, sizes: Sizes | None) -> None:
        self._overhead = problem.cost_model.split_backward_overhead
        together = problem.dims.lockstep_groups if sizes is None else [range(len(ranks))]
        sizes = sizes or ((problem.dims.context_parallel,) * len(ranks[0]),) * len(ranks)
        groups = [
            _slots(problem, ranks[of.start : of.stop], sizes[of.start : of.stop]) for of in together
        ]
        self._peak = max(_peak_of(problem, slots) for slots in groups)
        self.pipelines = [_Pipeline(problem, slots, self._peak) for slots in groups]

    @property
    def end(self) -> float:
        """End of the step."""
        return max(pipeline.end for pipeline in self.pipelines)

    def in_order(self, name: str) -> list[tuple[Any, ...]]:
        """The `samples` or the `sizes` of micro-batches [ranks][slots], in the order so far."""
        of_slots = ([getattr(slot, name) for slot in each.slots] for each in self.pipelines)
        return [rank for slots in of_slots for rank in zip(*slots, strict=True)]

    def reorder(self, effort: float) -> None:
        """Change the order of the straggler's micro-batches until so many passes were simulated."""
        if not self._overhead:  # then a split pass costs nothing, and others need not be known
            for pipeline in self.pipelines:
                pipeline.split_all()
        draw = drawing()
        while effort > 0:
            late = max(self.pipelines, key=lambda pipeline: pipeline.end)
            effort -= len(late.split)
            at, to = sorted((int(draw() * len(late.slots)), int(draw() * len(late.slots))))
            slots = late.slots[:at] + late.slots[at : to + 1][::-1] + late.slots[to + 1 :]
            # What a stage may hold follows from the step's peak, which stays what it is.
            holds_peak = [each for each in self.pipelines if each.peak == self._peak]
            if slots != late.slots:
                late.try_order(slots, may_fall=holds_peak != [late])
        for pipeline in self.pipelines:
            pipeline.choose()

    def splits(self) -> Splits:
        """The split passes of each rank."""
        latest = AS_SOON * self.end
        made: list[tuple[SplitStage, ...]] = []
        for pipeline in self.pipelines:
            pipeline.leave_whole(latest)
            pipeline.clock.run(pipeline.split)
            stages = pipeline.clock.stages  # in lockstep of one rank, as of all
            made += stages * (len(pipeline.slots[0].samples) // len(stages))
        return tuple(made)


class _Slot(NamedTuple):
    """Micro-batches that ranks which run together have in one slot."""

    samples: tuple[Sequence[int], ...]
    """Of each rank."""
    sizes: tuple[int, ...]
    """Context-parallel size of each rank's."""
    costs: list[float]
    """Forward cost on each kind of stage, of each rank's [kinds * ranks]; in lockstep, as one, of
    the costliest."""
    weights: list[float]
    """Cost of W there [kinds * ranks]; in lockstep the most that W of one costs."""
    tokens: tuple[int, ...]
    """Padded tokens of each rank's."""


def _slots(problem: Problem, ranks: Ranks, sizes: Sizes) -> list[_Slot]:
    slots = []
    for samples, of in zip(zip(*ranks, strict=True), zip(*sizes, strict=True), strict=True):
        rows = list(zip((problem.on_ranks[size] for size in of), samples, strict=True))
        costs = zip(*(on.slot_costs([own]) for on, own in rows), strict=True)
        weights = zip(*(on.slot_weights(own) for on, own in rows), strict=True)
        of_costs, of_weights = (
            list(map(max, each) if problem.dims.in_lockstep else chain(*each))
            for each in (costs, weights)
        )
        tokens = tuple(map(problem.held_tokens, samples, of))
        slots.append(_Slot(samples, of, of_costs, of_weights, tokens))
    return slots


def _peak_of(problem: Problem, slots: Sequence[_Slot]) -> int:
    """Most tokens that a first stage holds if no pass is split, once for each chunk."""
    ranks = zip(*(slot.tokens for slot in slots), strict=True)
    most = max(inflight_tokens(tokens, problem.schedule) for tokens in ranks)
    return int(most * problem.dims.virtual_pipeline)


class _Pipeline:
    """Ranks that run together, or one, with the passes that are split."""

    def __init__(self, problem: Problem, slots: list[_Slot], peak: int) -> None:
        self._problem, config = problem, problem.config
        self._all_split = config.split_backward == "all"
        self._peak, self._limit = peak, int(config.split_backward_memory * peak)
        if config.max_inflight_tokens is not None:
            bound = problem.dims.virtual_pipeline * config.max_inflight_tokens
            self._limit = min(self._limit, max(peak, bound))
        self.slots = slots
        self.peak = _peak_of(problem, slots)
        self.clock = self._clock(slots)
        self.end_unsplit = self.end = self.clock.run([0] * len(self.clock.all_split))
        self.choose()

    def split_all(self) -> None:
        """Split every pass."""
        self.split = self.clock.all_split
        self.end = self.clock.run(self.split)

    def choose(self) -> None:
        """Split what lets it end soonest."""
        clock = self.clock
        self.split_all()
        if self._all_split:
            return
        split = [0] * len(self.split)
        if (end := clock.run(split)) <= self.end:
            self.split, self.end = split[:], end
        while path := [number for number in clock.waited_for() if not split[number]]:
            for number in path:
                split[number] = 1
            if (end := clock.run(split)) < self.end:
                self.split, self.end = split[:], end

    def try_order(self, slots: list[_Slot], *, may_fall: bool) -> None:
        """Run slots in this order if it ends no later then, and its first stages hold no more than
        the step's; nor less than before, unless `may_fall`."""
        # A placeholder may not come last: the last micro-batch touches every parameter.
        if not all(slots[-1].samples):
            return
        peak = _peak_of(self._problem, slots)
        if peak > self._peak or not (may_fall or peak == self._peak):
            return
        clock = self._clock(slots)
        if (end := clock.run(self.split)) <= self.end:
            self.slots, self.peak, self.clock, self.end = slots, peak, clock, end

    def leave_whole(self, latest: float) -> None:
        """Split no pass that it ends in time without, unless all are to be; they are tried in
        blocks."""
        if self._all_split:
            return
        every = sum(self.clock.all_split)
        passes = [number for number, is_split in enumerate(self.split) if is_split]
        size = len(passes)
        while size * SMALLEST_BLOCK >= every:
            at = 0
            while at < len(passes):
                split = list(self.split)
                for number in passes[at : at + size]:
                    split[number] = 0
                if self.clock.run(split) <= latest:
                    self.split = split
                    del passes[at : at + size]
                else:
                    at += size
            size //= 2

    def _clock(self, slots: Sequence[_Slot]) -> SplitClock:
        dims, config = self._problem.dims, self._problem.config
        tokens: list[Sequence[int]] = [slot.tokens for slot in slots]
        blocks: list[Blocks] = [()] * len(slots)
        if dims.in_lockstep:  # as a slot takes as long as its costliest, it may hold its largest
            tokens = [(max(own),) for own in tokens]
        elif config.max_context_parallel is not None:
            blocks = blocks_of(list(zip(*(slot.sizes for slot in slots), strict=True)))
        return SplitClock(
            [cost for slot in slots for cost in slot.costs],
            [cost for slot in slots for cost in slot.weights],
            self._problem.schedule,
            blocks,
            overhead=self._problem.cost_model.split_backward_overhead,
            tokens=tokens,
            kept=config.split_backward_held,
            limit=self._limit,
        )
