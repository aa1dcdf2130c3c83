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

import torch
from megatron.core.utils import get_model_config

from mcore_batching.batch import Kind, PackedMicroBatch, StepTotals
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
from mcore_batching.megatron.topology import is_last_stage, model_chunks, prediction_depths

MODEL_INPUTS = ("tokens", "position_ids", "padding_mask", "cu_seqlens_padded")
_LOSS_INPUTS = (
    *("labels", "loss_mask", "loss_masks"),
    *("owned_indices", "owned_positions"),
    *("distinct_positions", "distinct_indices"),
)
_FIELDS_OF_THE_MODEL = (Kind.MULTIMODAL, Kind.ROUTED_EXPERTS)
_BLOCK_TOKENS = 65_536
"""Tokens of rows that are packed at once. Operations on fewer take less time than their
launches."""
_GROUPS = ("trajectory_weights", "prompt_weights")
"""Fields of `StepTotals` by group."""
_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


class StepRows:
    """A step's rows on this rank, by slot, on the host: packed in blocks, when they are first read.
    None can fail: samples were checked as they became columns.

    Rows are kept for further epochs as long as the schedule is: beside the samples' own columns (14
    bytes a token of samples that are half response, with loss masks, advantages and log-probs) 54
    bytes a token on the last pipeline stage, pinned where there is a GPU, and 17 on the others: 54
    MB for 1,000,000 tokens.
    """

    def __init__(
        self, schedule: MicroBatchSchedule, step: int, depths: int, *, has_labels: bool
    ) -> None:
        self._schedule, self._step, self._depths = schedule, step, depths
        self._has_labels = has_labels
        self._made: dict[int, RowBlock] = {}

    @classmethod
    def of(
        cls, schedule: MicroBatchSchedule, step: int, depths: int, *, has_labels: bool
    ) -> StepRows:
        """The rows, those of an earlier epoch where there was one."""
        key = step, depths, has_labels, is_last_stage()
        if key not in schedule.made_rows:
            schedule.made_rows[key] = cls(schedule, step, depths, has_labels=has_labels)
        made: StepRows = schedule.made_rows[key]
        return made

    @functools.cached_property
    def totals(self) -> tuple[StepTotals, list[float]]:
        """`MicroBatchSchedule.totals` of the step."""
        return self._schedule.totals(self._step, self._depths, has_labels=self._has_labels)

    @functools.cached_property
    def blocks(self) -> list[list[int]]:
        """Slots of the rows that are packed at once."""
        blocks: list[list[int]] = []
        rows, lengths = self._schedule.steps[self._step], self._schedule.own_lengths
        kind, tokens = None, 0
        for slot, size in enumerate(self._schedule.row_sizes(self._step)):
            of_row = sum([lengths[i] for i in rows[slot]])
            # The device waits for the first row; a placeholder's sample is none of the rollout's.
            if slot < 2 or (size, bool(rows[slot])) != kind or tokens + of_row > _BLOCK_TOKENS:
                blocks.append([])
                kind, tokens = (size, bool(rows[slot])), 0
            blocks[-1].append(slot)
            tokens += of_row
        return blocks

    def block(self, number: int) -> RowBlock:
        """The rows of a block, with what this pipeline stage reads ready for its device."""
        if number not in self._made:
            made = self._schedule.rows(
                self._step, self.blocks[number], self._depths, has_labels=self._has_labels
            )
            # Every stage reads the model's inputs, multimodal inputs and routed experts among them,
            # the last one alone what losses are made of: labels, rewards and the like.
            names, schema = [*MODEL_INPUTS], made.fields.schema
            fields = [name for name in made.fields if schema[name].kind in _FIELDS_OF_THE_MODEL]
            if is_last_stage():
                names += _LOSS_INPUTS
                fields = [*made.fields]
            if self._has_labels:  # there are no others than those of which labels were made
                fields = []
            device = torch.device(torch.cuda.current_device())
            self._made[number] = made.pinned(device, names, fields)
        return self._made[number]

    @property
    def owned_num_tokens(self) -> list[int]:
        """Trainable tokens of each row that this context-parallel rank predicts."""
        made = [self.block(number).owned_num_tokens for number in range(len(self.blocks))]
        return [tokens for of_block in made for tokens in of_block]


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The micro-batches of a step, and what the step's denominators add up to."""

    schedule: MicroBatchSchedule
    step: int
    rows: StepRows
    sums: Mapping[str, Reduction[Any]]  # fields of `StepTotals`; there after the agreement
    weights: Reduction[list[float]]
    groups: Gathered[tuple[Mapping[Hashable, float], ...] | None]

    @functools.cached_property
    def totals(self) -> StepTotals:
        """Sums over all samples of the step on all ranks."""
        counts = {name: each.value for name, each in self.sums.items()}
        groups: dict[str, Any] = {}
        for place, name in enumerate(_GROUPS):
            groups[name] = {}
            # The turns of a trajectory may run on several ranks.
            for of_rank in self.groups.values:
                for key, weight in (of_rank[place] if of_rank else {}).items():
                    groups[name][key] = groups[name].get(key, 0.0) + weight
        return StepTotals(**counts, token_weight=self.token_weights[0], **groups)

    @property
    def token_weights(self) -> Sequence[float]:
        """Sums of the samples' loss weights, over all ranks, by depth."""
        return self.weights.value

    @property
    def num_rows(self) -> int:
        """Forward passes of this rank, placeholders included."""
        return len(self.schedule.steps[self.step])

    def iterators(self, count: int) -> list[Iterator[PackedMicroBatch]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn."""
        # Stages draw the same rows at different times: kept from the first of them to the last.
        on_device: dict[int, tuple[list[PackedMicroBatch], int]] = {}

        def draw() -> Iterator[PackedMicroBatch]:
            for number in range(len(self.rows.blocks)):
                moved, drawn = on_device.pop(number, (None, 0))
                # One block at a time, when it is needed: the step may not fit on the device.
                if moved is None:
                    moved = self.rows.block(number).on_device().rows()
                if drawn + 1 < count:
                    on_device[number] = (moved, drawn + 1)
                yield from moved

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
        has_labels: as of `Layout`.
    """
    chunks = model_chunks(model)
    config = get_model_config(chunks[0])  # raises for what is no model of Megatron's
    check_logits(job.options, chunks)
    # The model need not be the one planned with: a reference model runs the same rows.
    if schedule.forest is not None:
        check_shared_prefixes(chunks)
        if schedule.forest.has_branches:
            check_branches(chunks, schedule.spare)
            attend_to_paths(chunks)
    if schedule.has_sizes_of_rows:
        let_rows_have_groups(chunks)
    depths = 0 if forward_only else prediction_depths(config)
    check_replay(chunks, schedule, step)
    rows = StepRows.of(schedule, step, depths, has_labels=has_labels)
    totals, weights = rows.totals
    agree.same("plan (sha256)", schedule.plan_digest)
    agree.same("step", step)
    agree.same("number of micro-batches", len(schedule.steps[step]))
    # Ranks that differ in these would wait for messages that no rank sends, or scale their
    # gradients differently. Read from the model, which training uses, not from the argument.
    agree.same("calculate_per_token_loss", bool(config.calculate_per_token_loss))
    for name in _ALIKE:
        agree.same(FLAGS[name], getattr(job.options, name))
    # What losses divide by, over all ranks, without a collective of its own.
    sums: dict[str, Reduction[Any]] = {}
    for name in ("num_samples", "num_trained_samples", "num_tokens"):
        value = getattr(totals, name)
        sums[name] = agree.sum(name, value)
        # Weights are sums of floats, which another device adds up in another order.
        agree.same(name, value, within="replica")
    of_all = agree.sum("token weights by depth", weights)
    by_group = tuple(getattr(totals, name) for name in _GROUPS)
    groups = agree.gather(
        "weights of trajectories and prompts", by_group if any(by_group) else None
    )
    rows.block(0)  # which the pipeline begins with
    return PreparedStep(schedule, step, rows, sums, of_all, groups)
