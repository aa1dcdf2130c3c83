"""Pipeline schedules: which passes each stage runs, in which order, and which passes they wait for.

The orders are those of `megatron.core.pipeline_parallel.schedules` (1F1B of Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters", 2021, and its interleaved form); a
test reads them off real runs.

    F   forward
    B   backward

    1F1B, 2 stages, 3 micro-batches     stage 0   F0 F1 B0 F2 B1 B2     one forward in warm-up
                                        stage 1   F0 B0 F1 B1 F2 B2     none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.parallel_dims import ParallelDims

Kind = Literal["F", "B"]


class Pass(NamedTuple):
    """One micro-batch in one model chunk of a stage."""

    kind: Kind
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""


StagePass = tuple[int, Pass]
"""A stage and one of its passes."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule with the relative costs of its passes."""

    dims: ParallelDims
    """Stages, model chunks and micro-batch group size."""
    forward_only: bool = False
    backward_ratio: float = 2.0
    """Cost of a backward pass over its forward pass."""
    which_cost: tuple[tuple[int, ...], ...] = ()
    """For each model chunk the number of the cost that its passes take, of those of a micro-batch
    [stages][chunks], where chunks hold different layers; empty: there is one cost."""

    def share(self, kind: Kind) -> float:
        """Cost of a pass over the forward cost of its micro-batch on a stage of such chunks."""
        share = 1.0 / self.dims.virtual_pipeline
        return share if kind == "F" else share * self.backward_ratio

    @cached_property
    def num_costs(self) -> int:
        """Costs of each micro-batch: one for every kind of model chunk."""
        return 1 + max(map(max, self.which_cost), default=0)

    def place_of_cost(self, stage: int, what: Pass) -> int:
        """Place of the cost that a pass takes, in a list of all micro-batches' [slots * kinds]."""
        which = self.which_cost[stage][what.chunk] if self.which_cost else 0
        return what.slot * self.num_costs + which

    @property
    def cost_of_passes(self) -> float:
        """Cost of all passes of a micro-batch on a mean stage over its forward cost."""
        return 1.0 if self.forward_only else 1.0 + self.backward_ratio

    @property
    def alternates(self) -> bool:
        """True if forward passes of later micro-batches wait for backward passes of earlier ones,
        on several stages: then sizes of micro-batches are best made to rise and fall."""
        return self.dims.pipeline_parallel > 1 and self.cost_of_passes > 1.0

    @property
    def order_matters(self) -> bool:
        """True if the order of micro-batches changes the end of a step."""
        # Forward passes through equal stages end after all costs and P - 1 times the largest, in
        # any order (a proportionate flow shop).
        if self.forward_only and self.dims.slots_per_group == 1 and not self.which_cost:
            return False
        return self.dims.pipeline_parallel > 1

    def order(self, stage: int, num_microbatches: int) -> list[Pass]:
        """The passes of one stage, in the order in which it runs them.

        Raises:
            ParallelDimsError: the schedule cannot run this many micro-batches.
        """
        dims = self.dims
        if not dims.is_legal_num_microbatches(num_microbatches):
            raise ParallelDimsError(
                f"the schedule cannot run {num_microbatches} micro-batches per rank; set "
                f"num_microbatches to {dims.round_up_num_microbatches(max(num_microbatches, 0))}"
            )
        chunks, group = range(dims.virtual_pipeline), dims.group_size
        forward: list[Pass] = []
        backward: list[Pass] = []
        # A chunk runs a whole group of slots before the next chunk does.
        for first in range(0, num_microbatches, group):
            slots = range(first, min(first + group, num_microbatches))
            forward += [Pass("F", chunk, slot) for chunk in chunks for slot in slots]
            backward += [Pass("B", chunk, slot) for chunk in reversed(chunks) for slot in slots]
        if self.forward_only:
            return forward
        warm_up = self.warm_up(stage, num_microbatches)
        order = forward[:warm_up]
        for ahead, behind_it in zip(forward[warm_up:], backward, strict=False):
            order += [ahead, behind_it]
        order += backward[len(forward) - warm_up :]
        return order

    def warm_up(self, stage: int, num_microbatches: int) -> int:
        """Forward passes of a stage in warm-up; after them forward and backward alternate."""
        # Enough that the first backward pass arrives when they are done: one per stage behind, or
        # under interleaving there and back for each, and all earlier chunks of a group.
        behind, chunks = self.dims.pipeline_parallel - stage - 1, self.dims.virtual_pipeline
        passes = behind if chunks == 1 else 2 * behind + (chunks - 1) * self.dims.group_size
        most = chunks * num_microbatches
        return most if self.forward_only else min(passes, most)

    def needs(self, stage: int, what: Pass) -> StagePass | None:
        """Stage and pass that makes a pass's input; None for the first pass of the model."""
        kind, chunk, slot = what
        last_stage, last_chunk = self.dims.pipeline_parallel - 1, self.dims.virtual_pipeline - 1
        if kind == "F":
            if stage > 0:
                return stage - 1, what
            # The first stage's next chunk takes what the last stage's chunk before it made.
            return (last_stage, Pass("F", chunk - 1, slot)) if chunk > 0 else None
        if stage < last_stage:
            return stage + 1, what
        if chunk < last_chunk:
            return 0, Pass("B", chunk + 1, slot)
        return stage, Pass("F", chunk, slot)  # the loss: backward begins where forward ended

    def waits_for_sends(self, num_microbatches: int) -> dict[StagePass, list[StagePass]]:
        """Passes that each pass of Megatron's interleaved schedule waits for beside its own input;
        none under other schedules.

        A send ends only once the receiver has posted its receive, which is after the pass before
        the one that needs the input. Under 1F1B these waits change nothing, except where
        micro-batches shrink during warm-up.
        """
        dims, last = self.dims, self.dims.pipeline_parallel - 1
        if dims.virtual_pipeline == 1:
            return {}
        orders = [self.order(stage, num_microbatches) for stage in range(last + 1)]
        warm_ups = [self.warm_up(stage, num_microbatches) for stage in range(last + 1)]
        final = {"F": dims.virtual_pipeline - 1, "B": 0}
        # Forward passes travel from the first stage to the last, backward passes the other way.
        passes = {
            kind: [[(s, what) for what in orders[s] if what.kind == kind] for s in way]
            for kind, way in (("F", range(last + 1)), ("B", range(last, -1, -1)))
        }
        waits: dict[StagePass, list[StagePass]] = {}
        for stage, order in enumerate(orders):
            steady = len(passes["F"][stage]) - warm_ups[stage]
            numbers = {"F": 0, "B": 0}
            unfinished: dict[str, list[StagePass]] = {"F": [], "B": []}
            for what, following in pairwise(order):
                kind, number = what.kind, numbers[what.kind]
                numbers[kind] += 1
                place = stage if kind == "F" else last - stage
                # The pass after which the next stage posts its receive of this one's output.
                awaited: list[StagePass] = []
                if place < last and number > 0:
                    awaited = [passes[kind][place + 1][number - 1]]
                elif place < last and kind == "B":  # begun after the last pass of warm-up
                    awaited = [passes["F"][stage - 1][warm_ups[stage - 1] - 1]]
                elif place == last and what.chunk != final[kind]:
                    # At the other end, for the next chunk, Megatron receives after each pass what
                    # was made here P - 1 passes earlier by the same count.
                    awaited = [passes[kind][0][number + last]]
                # A stage waits until a transfer has ended: in warm-up and cool-down at once for
                # both neighbours'; in steady state after a forward pass for what it just sent, and
                # after a backward pass, or without `waits_for_sends` after either, for what it
                # sent one pass earlier.
                if number >= steady if kind == "B" else number < warm_ups[stage]:
                    # The first stage of a chunk receives there what a later pass of its own uses.
                    if place == 0 and number >= last:
                        made = passes[kind][last][number - last]
                        awaited += [made] if made[1].chunk != final[kind] else []
                elif kind == "B" or not dims.waits_for_sends:
                    awaited, unfinished[kind] = unfinished[kind], awaited
                waits[stage, following] = awaited
        return waits
