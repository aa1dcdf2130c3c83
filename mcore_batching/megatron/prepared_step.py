"""One optimizer step, collated before the pipeline starts.

Whatever is wrong with the data shows while every rank can still be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mcore_batching.batch import PackedMicroBatch, StepTotals, owned_num_tokens, step_totals
from mcore_batching.batch.consensus import Statement
from mcore_batching.megatron.consensus import get_consensus
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.schedule import MicroBatchSchedule


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A packed micro-batch and what is known of it before it is on the device.

    Attributes:
        row: the micro-batch.
        owned_num_tokens: trainable tokens that this context-parallel rank predicts.
    """

    row: PackedMicroBatch
    owned_num_tokens: int


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The collated micro-batches of a step, and what the step's denominators add up to.

    Attributes:
        schedule: where the step comes from.
        step: which optimizer step.
        rows: packed micro-batches of this rank, in slot order, on the host.
        totals: over all samples of the step on all ranks.
    """

    schedule: MicroBatchSchedule
    step: int
    rows: list[PreparedRow]
    totals: StepTotals

    def iterators(self, count: int) -> list[Iterator[PreparedRow]]:
        """One iterator per virtual pipeline stage over the rows, moved to the device as drawn.

        Each stage draws every row; the copy on the device is made once and dropped when the last
        stage has drawn it.
        """
        on_device: dict[int, tuple[PreparedRow, int]] = {}

        def draw() -> Iterator[PreparedRow]:
            for slot, prepared in enumerate(self.rows):
                moved, drawn = on_device.pop(slot, (None, 0))
                if moved is None:
                    device = torch.device(torch.cuda.current_device())
                    row = prepared.row.to(device, non_blocking=True)
                    moved = dataclasses.replace(prepared, row=row)
                if drawn + 1 < count:
                    on_device[slot] = (moved, drawn + 1)
                yield moved

        return [draw() for _ in range(count)]


def prepare(
    args: Any, operation: str, step: int, schedule: Callable[[], MicroBatchSchedule]
) -> PreparedStep:
    """Collate all micro-batches of a step, and go on only if every rank could.

    A collective over all ranks.

    Args:
        args: Megatron's arguments.
        operation: the call that is about to run the step, in words; the same on every rank.
        step: which optimizer step.
        schedule: gives the schedule; what it raises is raised on every rank.

    Raises:
        CollationFailedError: on every rank, if finding or collating the step failed on any.
        PlanMismatchError: on every rank, if they are not about to run the same step.
    """

    def collate() -> PreparedStep:
        found = schedule()
        rows = [found.row(indices) for indices in found.steps[step]]
        prepared = [PreparedRow(row, owned_num_tokens(row)) for row in rows]
        return PreparedStep(found, step, prepared, step_totals(rows))

    def says(prepared: PreparedStep) -> Statement:
        sums = dataclasses.asdict(prepared.totals)
        return Statement(
            equal={
                "plan (sha256)": prepared.schedule.plan_digest,
                "step": step,
                "number of micro-batches": len(prepared.rows),
            },
            # The weight is a sum of floats, which another device adds up in another order.
            equal_in_replica={n: value for n, value in sums.items() if n != "token_weight"},
            total=list(sums.values()),
        )

    agreed = get_consensus(args).agree(
        f"{operation}, collating", collate, says, failure=CollationFailedError
    )
    names = [field.name for field in dataclasses.fields(StepTotals)]
    totals = StepTotals(**dict(zip(names, agreed.total, strict=True)))
    return dataclasses.replace(agreed.result, totals=totals)
