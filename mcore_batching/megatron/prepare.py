"""A step made ready before its pipeline starts: on every rank, or on none.

All rows are packed at once. Inside the pipeline an error on one rank would leave the others waiting
for its tensors.

    with collating(job, "train_step") as agree:
        prepared = collated(agree, job, model, schedule, step)
    prepared.totals     what the step's losses divide by, over all ranks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import Kind, PackedMicroBatch, StepTotals
from mcore_batching.batch.consensus import Reduction
from mcore_batching.batch.loss import owned_num_tokens, step_totals
from mcore_batching.batch.rows.pinned_buffer import PinnedBuffer
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.features import check_shared_prefixes, let_rows_have_groups
from mcore_batching.megatron.checks.settings import check_logits
from mcore_batching.megatron.consensus import JobAgreement
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.routing import replayable
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage, model_chunks, prediction_depths

MODEL_INPUTS = ("tokens", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded")
_LOSS_INPUTS = ("labels", "loss_mask", "responses", "later")
_FIELDS_OF_THE_MODEL = (Kind.MULTIMODAL, Kind.ROUTED_EXPERTS)
_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A packed micro-batch and what is known of it before it is on the device."""

    row: PackedMicroBatch
    owned_num_tokens: int  # trainable ones, that this context-parallel rank predicts


class PortableRow:
    """A packed micro-batch whose tensors go to the device in one copy, those that are read there:
    in attributes by these names. The others stay on the host."""

    def __init__(self, row: PackedMicroBatch, names: Collection[str], device: torch.device) -> None:
        self._row, self._names, self._device = row, names, device
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        # `on_device` goes through the same tensors once more, and so in the same order.
        row.mapped(collect, names)
        # From pageable memory the host would wait for the copy.
        self._tensors = PinnedBuffer(tensors, pin_memory=device.type == "cuda")

    @classmethod
    def of_stage(cls, row: PackedMicroBatch) -> PortableRow:
        """With what this pipeline stage reads."""
        # Every stage reads the model's inputs, multimodal inputs and routed experts among them, the
        # last one alone what losses are made of.
        names = [*MODEL_INPUTS, "fields"]
        if is_last_stage():
            names += _LOSS_INPUTS
        else:
            # Labels, rewards and the like stay on the host: no loss is made on this stage.
            kept = [name for name in row.fields if row.schema[name].kind in _FIELDS_OF_THE_MODEL]
            row = dataclasses.replace(row, fields=row.fields.only(kept))
        return cls(row, names, torch.device(torch.cuda.current_device()))

    def on_device(self) -> PackedMicroBatch:
        """The row on the device. The host does not wait for the copy."""
        moved = iter(self._tensors.on(self._device))
        return self._row.mapped(lambda tensor: next(moved), self._names)


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The collated micro-batches of a step, and what the step's denominators add up to."""

    schedule: MicroBatchSchedule
    step: int
    rows: list[PreparedRow]  # of this rank, in slot order, on the host
    portable_rows: list[PortableRow]  # the same, ready for the device
    sums: Mapping[str, Reduction[Any]]  # fields of `StepTotals`; there after the agreement
    weights: Reduction[list[float]]

    @functools.cached_property
    def totals(self) -> StepTotals:
        """Sums over all samples of the step on all ranks."""
        return StepTotals(**{name: each.value for name, each in self.sums.items()})

    @property
    def token_weights(self) -> Sequence[float]:
        """Sums of the rows' own weights, over all ranks, by depth."""
        return self.weights.value

    def iterators(self, count: int) -> list[Iterator[PreparedRow]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn."""
        # Stages draw the same row at different times: kept from the first of them to the last.
        on_device: dict[int, tuple[PreparedRow, int]] = {}

        def draw() -> Iterator[PreparedRow]:
            both = zip(self.rows, self.portable_rows, strict=True)
            for slot, (prepared, portable) in enumerate(both):
                moved, drawn = on_device.pop(slot, (None, 0))
                # One row at a time, when it is needed: the whole step may not fit on the device.
                if moved is None:
                    moved = dataclasses.replace(prepared, row=portable.on_device())
                if drawn + 1 < count:
                    on_device[slot] = (moved, drawn + 1)
                yield moved

        return [draw() for _ in range(count)]


def collating(job: Job, operation: str) -> JobAgreement:
    """The agreement inside which a step is `collated`. A collective over all ranks; what its body
    raises on one is raised on each."""
    # Under dynamic CP the ranks of a replica run different rows, so each agrees for itself.
    return job.consensus_of_rows.agreement(f"{operation}, collating", failure=CollationFailedError)


def collated(
    agree: JobAgreement,
    job: Job,
    model: Any,
    schedule: MicroBatchSchedule,
    step: int,
    *,
    forward_only: bool = False,
    change: Callable[[PackedMicroBatch], PackedMicroBatch] = lambda row: row,
) -> PreparedStep:
    """All micro-batches of a step, packed, inside an agreement of `collating`.

    Args:
        forward_only: leave out the losses of multi-token prediction.
        change: gives the row that the model and the loss get.
    """
    chunks = model_chunks(model)
    config = get_model_config(chunks[0])  # raises for what is no model of Megatron's
    check_logits(job.options, chunks)
    # The model need not be the one planned with: a reference model runs the same rows.
    if schedule.hosts is not None:
        check_shared_prefixes(chunks)
    if schedule.has_sizes_of_rows:
        let_rows_have_groups(chunks)
    rows = schedule.rows(step, 0 if forward_only else prediction_depths(config))
    replayed = [replayable(chunks, row, schedule.names_of) for row in rows]
    # Counted of the row on the host: on the device each count would be a wait for it.
    prepared = [PreparedRow(change(row), owned_num_tokens(row)) for row in replayed]
    portable = [PortableRow.of_stage(each.row) for each in prepared]
    agree.same("plan (sha256)", schedule.plan_digest)
    agree.same("step", step)
    agree.same("number of micro-batches", len(prepared))
    # Ranks that differ in these would wait for messages that no rank sends, or scale their
    # gradients differently. Read from the model, which training uses, not from the argument.
    agree.same("calculate_per_token_loss", bool(config.calculate_per_token_loss))
    for name in _ALIKE:
        agree.same(FLAGS[name], getattr(job.options, name))
    # What losses divide by, over all ranks, without a collective of its own.
    sums: dict[str, Reduction[Any]] = {}
    for name, value in dataclasses.asdict(step_totals(schedule.counts_once(rows))).items():
        sums[name] = agree.sum(name, value)
        # The weight is a sum of floats, which another device adds up in another order.
        if name != "token_weight":
            agree.same(name, value, within="replica")
    counted = schedule.counts_once([each.row for each in prepared])
    depths = range(len(rows[0].token_weights))  # a rank may count none of its rows
    weights = [sum(row.token_weights[depth] for row in counted) for depth in depths]
    of_all = agree.sum("token weights by depth", weights)
    return PreparedStep(schedule, step, prepared, portable, sums, of_all)
