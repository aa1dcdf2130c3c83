"""One optimizer step, collated before the pipeline starts.

Whatever is wrong with the data shows while every rank can still be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import Kind, PackedMicroBatch, StepTotals
from mcore_batching.batch.loss import owned_num_tokens, step_totals
from mcore_batching.batch.rows.side_by_side import SideBySide
from mcore_batching.megatron.rows.routing_replay import replayable
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage

MODEL_INPUTS = ("tokens", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded")
_LOSS_INPUTS = ("labels", "loss_mask", "responses", "later")
_FIELDS_OF_THE_MODEL = (Kind.MULTIMODAL, Kind.ROUTED_EXPERTS)


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
        self._tensors = SideBySide(tensors, pin_memory=device.type == "cuda")

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
    totals: StepTotals  # over all samples of the step on all ranks
    token_weights: Sequence[float]  # sums of the rows' own, over all ranks, by depth

    @classmethod
    def of_rows(
        cls,
        schedule: MicroBatchSchedule,
        step: int,
        rows: Sequence[PackedMicroBatch],
        chunks: list[Any],
        change: Callable[[PackedMicroBatch], PackedMicroBatch],
    ) -> PreparedStep:
        """Of packed rows on the host, in slot order; the sums are this rank's alone.

        `change` gives the row that the model and the loss get.
        """
        replayed = [replayable(chunks, row, schedule.names_of) for row in rows]
        # Counted of the row on the host: on the device each count would be a wait for it.
        prepared = [PreparedRow(change(row), owned_num_tokens(row)) for row in replayed]
        portable = [PortableRow.of_stage(each.row) for each in prepared]
        counted = schedule.counts_once([each.row for each in prepared])
        depths = range(len(rows[0].token_weights))  # a rank may count none of its rows
        weights = [sum(row.token_weights[depth] for row in counted) for depth in depths]
        totals = step_totals(schedule.counts_once(rows))
        return cls(schedule, step, prepared, portable, totals, weights)

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
