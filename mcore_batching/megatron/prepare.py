"""A step made ready before its pipeline starts: on every rank, or on none.

Inside the pipeline an error on one rank would leave the others waiting for its tensors. Samples
were checked as they became columns, so rows cannot fail: they are packed while the device works on
the ones before them, once for all epochs over the same samples.

    with collating(job, "train_step") as agree:
        prepared = collated(agree, job, model, schedule, step)
    prepared.totals     what the step's losses divide by, over all ranks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.batch.consensus import Agreement, Gathered, Reduction
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.layers import (
    check_branches,
    check_shared_prefixes,
    let_rows_have_groups,
)
from mcore_batching.megatron.checks.settings import check_logits
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.prefix_attention import attend_to_paths
from mcore_batching.megatron.routing import check_replay
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks, prediction_depths

_COUNTS = ("num_samples", "num_trained_samples", "num_tokens")
_GROUPS = ("trajectory_weights", "prompt_weights")
"""Fields of `StepTotals` by group."""
_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The micro-batches of a step, and what the step's denominators add up to."""

    schedule: MicroBatchSchedule
    step: int
    depths: int  # of multi-token prediction
    has_labels: bool  # as of `RowBlock`
    # Fields of `StepTotals`, and token weights by depth; there after the agreement.
    sums: Reduction[list[float]]
    groups: Gathered[tuple[Mapping[Hashable, float], ...] | None]

    @functools.cached_property
    def totals(self) -> StepTotals:
        """Sums over all samples of the step on all ranks."""
        counts = self.sums.value[: len(_COUNTS)]
        made: dict[str, Any] = dict(zip(_COUNTS, map(int, counts), strict=True))
        for place, name in enumerate(_GROUPS):
            made[name] = {}
            # The turns of a trajectory may run on several ranks.
            for of_rank in filter(None, self.groups.values):
                for key, weight in of_rank[place].items():
                    made[name][key] = made[name].get(key, 0.0) + weight
        return StepTotals(**made, token_weight=self.token_weights[0])

    @property
    def token_weights(self) -> Sequence[float]:
        """Sums of the samples' loss weights, over all ranks, by depth."""
        return self.sums.value[len(_COUNTS) :]

    @property
    def num_rows(self) -> int:
        """Forward passes of this rank, placeholders included."""
        return len(self.schedule.steps[self.step])

    @functools.cached_property
    def blocks(self) -> list[list[int]]:
        """Slots of the rows that are packed at once."""
        return self.schedule.slots_at_once(self.step)

    def block(self, number: int) -> RowBlock:
        """The rows of a block."""
        given = self.step, self.blocks[number], self.depths
        return self.schedule.block(*given, has_labels=self.has_labels)

    @property
    def owned_num_tokens(self) -> Iterator[int]:
        """Trainable tokens of each row that this context-parallel rank predicts."""
        for number in range(len(self.blocks)):
            yield from self.block(number).owned_num_tokens

    def iterators(self, count: int) -> list[Iterator[PackedMicroBatch]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn."""
        # Stages draw the same rows at different times: kept from the first of them to the last.
        on_device: dict[int, tuple[list[PackedMicroBatch], int]] = {}

        def draw() -> Iterator[PackedMicroBatch]:
            for number in range(len(self.blocks)):
                rows, drawn = on_device.pop(number, (None, 0))
                # One block at a time, when it is needed: the step may not fit on the device.
                if rows is None:
                    rows = self.block(number).rows()
                if drawn + 1 < count:
                    on_device[number] = (rows, drawn + 1)
                yield from rows
                if drawn + 1 == count:
                    self.block(number).forget_index()

        return [draw() for _ in range(count)]


def collating(job: Job, operation: str) -> AbstractContextManager[Agreement]:
    """The agreement inside which a step is `collated`. A collective over all ranks; what its body
    raises on one is raised on each."""
    # Under dynamic CP the ranks of a replica run different rows, so each agrees for itself.
    return job.consensus_of_rows.agreement(f"{operation}, collating", failure=CollationFailedError)


def collated(
    agree: Agreement,
    job: Job,
    model: Any,
    schedule: MicroBatchSchedule,
    step: int,
    *,
    forward_only: bool = False,
    has_labels: bool = False,
) -> PreparedStep:
    """All micro-batches of a step, inside an agreement of `collating`: after it none can fail.

    Args:
        forward_only: leave out the losses of multi-token prediction.
        has_labels: as of `RowBlock`.
    """
    chunks = model_chunks(model)
    config = get_model_config(chunks[0])  # raises for what is no model of Megatron's
    check_logits(job.options, chunks)
    # The model need not be the one planned with: a reference model runs the same rows.
    if schedule.forest is not None:
        check_shared_prefixes(chunks)
        if schedule.forest.has_branches:
            assert schedule.samples.beginnings is not None
            check_branches(chunks, schedule.samples.beginnings.spare)
            attend_to_paths(chunks)
    if schedule.has_sizes_of_rows:
        let_rows_have_groups(chunks)
    depths = 0 if forward_only else prediction_depths(config)
    check_replay(chunks, schedule, step)
    totals, weights = schedule.totals(step, depths, has_labels=has_labels)
    agree.same("plan (sha256)", schedule.plan_digest)
    agree.same("step", step)
    agree.same("number of micro-batches", len(schedule.steps[step]))
    # Ranks that differ in these would wait for messages that no rank sends, or scale their
    # gradients differently. Read from the model, which training uses, not from the argument.
    agree.same("calculate_per_token_loss", bool(config.calculate_per_token_loss))
    for name in _ALIKE:
        agree.same(FLAGS[name], getattr(job.options, name))
    # What losses divide by, over all ranks, without a collective of its own.
    counts = [getattr(totals, name) for name in _COUNTS]
    for name, count in zip(_COUNTS, counts, strict=True):
        # Not weights: they are sums of floats, which another device adds up in another order.
        agree.same(name, count, within="replica")
    sums = agree.sum("what losses divide by", [*counts, *weights])
    by_group = tuple(getattr(totals, name) for name in _GROUPS)
    groups = agree.gather(
        "weights of trajectories and prompts", by_group if any(by_group) else None
    )
    made = PreparedStep(schedule, step, depths, has_labels, sums, groups)
    made.block(0).tensor("tokens")  # which the pipeline begins with
    return made
