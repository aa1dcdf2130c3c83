"""A step made ready before its pipeline starts: on every rank, or on none.

Inside the pipeline an error on one rank would leave the others waiting for its tensors. Samples
were checked as they became columns, so most rows cannot fail: these are packed while the device
works on the ones before them, once for all epochs over the same samples. Others are packed here.

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
from mcore_batching.batch.loss import owned_num_tokens
from mcore_batching.batch.rows.pinned_buffer import PinnedBuffer
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.features import check_shared_prefixes, let_rows_have_groups
from mcore_batching.megatron.checks.settings import check_logits
from mcore_batching.megatron.consensus import JobAgreement
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.routing import is_replayed, replayable
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage, model_chunks, prediction_depths

MODEL_INPUTS = ("tokens", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded")
_LOSS_INPUTS = ("labels", "loss_mask", "responses", "later")
_FIELDS_OF_THE_MODEL = (Kind.MULTIMODAL, Kind.ROUTED_EXPERTS)
_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A packed micro-batch on the device, and what is known of it from the host."""

    row: PackedMicroBatch
    owned_num_tokens: int  # trainable ones, that this context-parallel rank predicts


class PortableRow:
    """A packed micro-batch whose tensors go to the device in one copy, those that are read there:
    in attributes by these names. The others stay on the host."""

    def __init__(self, row: PackedMicroBatch, names: Collection[str], device: torch.device) -> None:
        self._names, self._device = names, device
        # Counted here: on the device each count would be a wait for it.
        self.owned_num_tokens = owned_num_tokens(row)
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        # Whoever goes through them once more does so in the same order.
        row.mapped(collect, names)
        # From pageable memory the host would wait for the copy.
        self._tensors = PinnedBuffer(tensors, pin_memory=device.type == "cuda")
        self.row = self._with(row, self._tensors.tensors)

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
        return self._with(self.row, self._tensors.on(self._device))

    def _with(self, row: PackedMicroBatch, tensors: Sequence[Tensor]) -> PackedMicroBatch:
        replacing = iter(tensors)
        return row.mapped(lambda tensor: next(replacing), self._names)


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The micro-batches of a step, and what the step's denominators add up to."""

    schedule: MicroBatchSchedule
    step: int
    portable: Callable[[int], PortableRow]  # this rank's rows by slot, made when first asked for
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

    @property
    def num_rows(self) -> int:
        """Forward passes of this rank, placeholders included."""
        return len(self.schedule.steps[self.step])

    def iterators(self, count: int) -> list[Iterator[PreparedRow]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn."""
        # Stages draw the same row at different times: kept from the first of them to the last.
        on_device: dict[int, tuple[PreparedRow, int]] = {}

        def draw() -> Iterator[PreparedRow]:
            for slot in range(self.num_rows):
                moved, drawn = on_device.pop(slot, (None, 0))
                # One row at a time, when it is needed: the whole step may not fit on the device.
                if moved is None:
                    row = self.portable(slot)
                    moved = PreparedRow(row.on_device(), row.owned_num_tokens)
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
    change: Callable[[PackedMicroBatch], PackedMicroBatch] | None = None,
) -> PreparedStep:
    """All micro-batches of a step, inside an agreement of `collating`: after it none can fail.

    Args:
        forward_only: leave out the losses of multi-token prediction.
        change: gives the row that the model and the loss get, and its loss weights.
    """
    chunks = model_chunks(model)
    config = get_model_config(chunks[0])  # raises for what is no model of Megatron's
    check_logits(job.options, chunks)
    # The model need not be the one planned with: a reference model runs the same rows.
    if schedule.hosts is not None:
        check_shared_prefixes(chunks)
    if schedule.has_sizes_of_rows:
        let_rows_have_groups(chunks)
    depths = 0 if forward_only else prediction_depths(config)
    totals, weights = schedule.totals(step, depths)
    rows = _Rows(schedule, step, depths, chunks, change)
    if change is not None:
        weights = rows.token_weights()
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
    for name, value in dataclasses.asdict(totals).items():
        sums[name] = agree.sum(name, value)
        # The weight is a sum of floats, which another device adds up in another order.
        if name != "token_weight":
            agree.same(name, value, within="replica")
    of_all = agree.sum("token weights by depth", weights)
    return PreparedStep(schedule, step, rows, sums, of_all)


class _Rows:
    """A step's rows on this rank, by slot. Those that may be refused are packed at once, and so is
    the first, which the pipeline begins with."""

    def __init__(
        self,
        schedule: MicroBatchSchedule,
        step: int,
        depths: int,
        chunks: list[Any],
        change: Callable[[PackedMicroBatch], PackedMicroBatch] | None,
    ) -> None:
        self._schedule, self._step, self._depths = schedule, step, depths
        self._chunks, self._change = chunks, change
        self._made: dict[int, PortableRow] = {}
        at_once = len(schedule.steps[step])
        # Routed experts are checked against this model, from which another one may differ.
        if change is None and not is_replayed(chunks):
            key = step, depths, is_last_stage()
            self._made = schedule.made_rows.setdefault(key, self._made)
            at_once = 1 if schedule.rows_always_fit else at_once
        for slot in range(at_once):
            self(slot)

    def __call__(self, slot: int) -> PortableRow:
        """The row of a slot."""
        if slot not in self._made:
            row = self._schedule.row(self._step, slot, self._depths)
            row = replayable(self._chunks, row, self._schedule.names_of)
            row = row if self._change is None else self._change(row)
            self._made[slot] = PortableRow.of_stage(row)
        return self._made[slot]

    def token_weights(self) -> list[float]:
        """Sums of the rows' own loss weights by depth, of rows that all are made."""
        rows = [each.row for each in self._made.values()]
        counted = [row for row in rows if self._schedule.counts(row.context_parallel_rank)]
        depths = range(len(rows[0].token_weights))  # a rank may count none of its rows
        return [sum(row.token_weights[depth] for row in counted) for depth in depths]
