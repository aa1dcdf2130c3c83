"""One optimizer step, collated before the pipeline starts.

Whatever is wrong with the data shows while every rank can still be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import (
    Kind,
    PackedMicroBatch,
    StepTotals,
    owned_num_tokens,
    step_totals,
)
from mcore_batching.batch.consensus import Statement
from mcore_batching.batch.figures import total
from mcore_batching.batch.side_by_side import SideBySide
from mcore_batching.megatron.arguments import FLAGS
from mcore_batching.megatron.consensus import consensus_of_rows
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.routing_replay import replayable
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage, model_chunks

MODEL_INPUTS = ("tokens", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded")
_LOSS_INPUTS = ("labels", "loss_mask", "responses")
_FIELDS_OF_THE_MODEL = (Kind.MULTIMODAL, Kind.ROUTED_EXPERTS)
_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A packed micro-batch and what is known of it before it is on the device.

    Attributes:
        row: the micro-batch.
        owned_num_tokens: trainable tokens that this context-parallel rank predicts.
    """

    row: PackedMicroBatch
    owned_num_tokens: int


class PortableRow:
    """A packed micro-batch whose tensors go to the device in one copy, those that are read there.

    Args:
        row: on the host.
        names: of the attributes that go; the others stay on the host.
        device: where they go.
    """

    def __init__(self, row: PackedMicroBatch, names: Collection[str], device: torch.device) -> None:
        self._row, self._names, self._device = row, names, device
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        row.mapped(collect, names)
        self._tensors = SideBySide(tensors, pin_memory=device.type == "cuda")

    @classmethod
    def of_stage(cls, row: PackedMicroBatch) -> PortableRow:
        """With what this pipeline stage reads.

        Every stage reads the model's inputs, the last one alone what losses are made of: other
        stages have multimodal inputs and routed experts as their only fields, and labels and masks
        on the host.
        """
        names = [*MODEL_INPUTS, "fields"]
        if is_last_stage():
            names += _LOSS_INPUTS
        else:
            fields = row.fields.items()
            kept = {k: v for k, v in fields if row.schema[k].kind in _FIELDS_OF_THE_MODEL}
            row = dataclasses.replace(row, fields=kept)
        return cls(row, names, torch.device(torch.cuda.current_device()))

    def on_device(self) -> PackedMicroBatch:
        """The row on the device. The host does not wait for the copy."""
        moved = iter(self._tensors.on(self._device))
        return self._row.mapped(lambda tensor: next(moved), self._names)


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The collated micro-batches of a step, and what the step's denominators add up to.

    Attributes:
        schedule: where the step comes from.
        step: which optimizer step.
        rows: packed micro-batches of this rank, in slot order, on the host.
        portable_rows: the same, ready for the device.
        totals: over all samples of the step on all ranks.
    """

    schedule: MicroBatchSchedule
    step: int
    rows: list[PreparedRow]
    portable_rows: list[PortableRow]
    totals: StepTotals

    @classmethod
    def of_rows(
        cls,
        schedule: MicroBatchSchedule,
        step: int,
        rows: Sequence[PackedMicroBatch],
        chunks: list[Any],
        change: Callable[[PackedMicroBatch], PackedMicroBatch],
    ) -> PreparedStep:
        """Of packed rows on the host; the totals are this rank's alone.

        Args:
            schedule: where they come from.
            step: which optimizer step.
            rows: in slot order.
            chunks: this rank's model chunks.
            change: from a row to the one that the model and the loss get.

        Raises:
            SchemaError: a row's routed experts cannot be replayed.
        """
        prepared = [
            PreparedRow(change(replayable(chunks, row)), owned_num_tokens(row)) for row in rows
        ]
        portable = [PortableRow.of_stage(each.row) for each in prepared]
        return cls(schedule, step, prepared, portable, step_totals(schedule.counts_once(rows)))

    def iterators(self, count: int) -> list[Iterator[PreparedRow]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn.

        Each stage draws every row; the copy on the device is made once and dropped when the last
        stage has drawn it.
        """
        on_device: dict[int, tuple[PreparedRow, int]] = {}

        def draw() -> Iterator[PreparedRow]:
            both = zip(self.rows, self.portable_rows, strict=True)
            for slot, (prepared, portable) in enumerate(both):
                moved, drawn = on_device.pop(slot, (None, 0))
                if moved is None:
                    moved = dataclasses.replace(prepared, row=portable.on_device())
                if drawn + 1 < count:
                    on_device[slot] = (moved, drawn + 1)
                yield moved

        return [draw() for _ in range(count)]


def prepare(
    args: Any,
    model: Any,
    operation: str,
    step: int,
    schedule: Callable[[], MicroBatchSchedule],
    *,
    change: Callable[[PackedMicroBatch], PackedMicroBatch] = lambda row: row,
    alike: Callable[[MicroBatchSchedule], Mapping[str, Any]] = lambda schedule: {},
) -> PreparedStep:
    """Collate all micro-batches of a step, and go on only if every rank could.

    A collective over all ranks.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks, not read before the schedule is given.
        operation: the call that is about to run the step, in words; the same on every rank.
        step: which optimizer step.
        schedule: gives the schedule; what it raises is raised on every rank.
        change: from a row to the one that the model and the loss get.
        alike: gives further values by name, the same on every rank.

    Raises:
        CollationFailedError: on every rank, if finding or collating the step failed on any.
        PlanMismatchError: on every rank, if they are not about to run the same step.
    """

    def collate() -> PreparedStep:
        found = schedule()
        return PreparedStep.of_rows(found, step, found.rows(step), model_chunks(model), change)

    def says(prepared: PreparedStep) -> Statement:
        sums = dataclasses.asdict(prepared.totals)
        per_token = bool(get_model_config(model_chunks(model)[0]).calculate_per_token_loss)
        return Statement(
            equal={
                "plan (sha256)": prepared.schedule.plan_digest,
                "step": step,
                "number of micro-batches": len(prepared.rows),
                # Ranks that differ in these would wait for messages that nobody sends, or scale
                # their gradients differently.
                "calculate_per_token_loss": per_token,
                **{FLAGS[name]: getattr(args, f"dynamic_batch_{name}", False) for name in _ALIKE},
                **alike(prepared.schedule),
            },
            # The weight is a sum of floats, which another device adds up in another order.
            equal_in_replica={
                "samples and plan (sha256)": prepared.schedule.own_digest,
                **{n: value for n, value in sums.items() if n != "token_weight"},
            },
            figures={name: total(value) for name, value in sums.items()},
        )

    agreed = consensus_of_rows(args).agree(
        f"{operation}, collating", collate, says, failure=CollationFailedError
    )
    return dataclasses.replace(agreed.result, totals=StepTotals(**agreed.figures))
