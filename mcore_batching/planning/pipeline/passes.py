"""Pipeline schedules: which passes each stage runs, in which order, at which share of the cost.

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

    @property
    def stages_of_groups(self) -> int:
        """Stages of the 1F1B pipeline that whole groups of micro-batches pass like: under the
        interleaved schedule two, the forward and the backward passes of a group."""
        return self.dims.pipeline_parallel if self.dims.slots_per_group == 1 else 2

    @property
    def way(self) -> float:
        """Time of one micro-batch through all stages, and back, over its cost on a mean stage."""
        chunks = self.dims.pipeline_parallel * self.dims.virtual_pipeline
        return chunks * (self.share("F") + (0.0 if self.forward_only else self.share("B")))

    def least_end(self, work: float, least: float) -> float:
        """No rank with so much work ends its step sooner: each stage waits until it is reached, and
        until all are done after it.

        Args:
            work: forward costs of all its micro-batches on a mean stage.
            least: of them, the least that one costs.
        """
        if self.which_cost:  # some stage has as much work as the mean one
            return self.cost_of_passes * work
        # The last stage waits longest.
        way = self.share("F") + (0.0 if self.forward_only else self.share("B"))
        return self.cost_of_passes * work + (self.dims.pipeline_parallel - 1) * way * least

    def least_beside(self, count: int) -> float:
        """Least cost of what the first stage runs before the forward pass of one of `count`
        micro-batches and after its backward pass, if each other costs 1; 0 but for plain 1F1B on
        equal stages.

        Of K micro-batches on P stages, p of them before that one, these are p forward and
        max(0, p - P + 1) backward passes, then max(0, K - P - p) forward and K - 1 - p backward
        passes.
        """
        if self.dims.slots_per_group > 1 or self.forward_only or self.which_cost:
            return 0.0
        fewest = count - self.dims.pipeline_parallel
        forward, backward = self.share("F"), self.share("B")
        # Which of them it is nobody knows before a plan is made: the least over all places.
        return min(
            forward * max(before, fewest) + backward * max(count - 1 - before, fewest)
            for before in range(count)
        )

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

    def needs(self, stage: int, what: Pass) -> tuple[int, Pass] | None:
        """Stage and pass whose result a pass takes; None for the first pass of the model."""
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
