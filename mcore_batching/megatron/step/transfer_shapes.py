"""Shapes of what pipeline stages send each other, taken from the plan.

With variable lengths Megatron's neighbours exchange the shape of every tensor first, and wait for
the device each time. All stages of a replica run the same rows in an order that the schedule fixes:
each knows beforehand what it will receive. Another shape raises before anything is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import Kind, Schedule

Shape = list[int]


@contextlib.contextmanager
def planned_transfers(
    options: Options, model: Sequence[Any], prepared: PreparedStep, *, forward_only: bool
) -> Iterator[None]:
    """Let the pipeline of a step run without exchanges of shapes, if it has stages."""
    dims = prepared.schedule.dims
    # Without other stages nothing is sent.
    if dims.pipeline_parallel == 1 or options.no_planned_shapes:
        yield
        return
    config = get_model_config(model[0])
    # Under sequence parallelism a tensor-parallel rank holds, and sends, its part of the tokens.
    shards = dims.tensor_parallel if config.sequence_parallel else 1
    shapes = [
        [prepared_row.row.tokens.shape[1] // shards, 1, config.hidden_size]
        for prepared_row in prepared.rows
    ]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    transfers = PlannedTransfers(shapes, dims, stage, forward_only=forward_only)
    with compat.schedules.shapes_of_transfers(transfers):
        yield


class PlannedTransfers:
    """The shapes of one stage's transfers, in the order in which its schedule asks for them.

    ``shapes`` are of each micro-batch's hidden states ``[tokens of this rank, 1, hidden size]``.
    """

    def __init__(
        self, shapes: Sequence[Shape], dims: ParallelDims, stage: int, *, forward_only: bool
    ) -> None:
        # The first stage's first chunk has no predecessor, the last stage's last chunk no
        # successor; over the two neighbours every other tensor goes in and out in one order.
        first, last = (0, 0), (dims.pipeline_parallel - 1, dims.virtual_pipeline - 1)
        order = Schedule(dims=dims, forward_only=forward_only).order(stage, len(shapes))

        def of(kind: Kind, beyond: tuple[int, int]) -> Iterator[Shape]:
            passes = [each for each in order if each.kind == kind]
            return iter([shapes[p.slot] for p in passes if (stage, p.chunk) != beyond])

        self._from_previous, self._to_next = of("F", first), of("F", last)
        self._from_next, self._to_previous = of("B", last), of("B", first)

    def __call__(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """The shapes that come from the previous and from the next stage, as Megatron asks."""
        # Compared before anything is sent: a neighbour that receives another shape hangs or
        # reads garbage.
        if tensor_send_next is not None:
            _check(list(tensor_send_next.shape), next(self._to_next, None))
        if tensor_send_prev is not None:
            _check(list(tensor_send_prev.shape), next(self._to_previous, None))
        return (
            # Drawn only where Megatron receives: drawing moves on to the next micro-batch.
            _planned(next(self._from_previous, None)) if recv_prev else [0, 0, 0],
            _planned(next(self._from_next, None)) if recv_next else [0, 0, 0],
        )


_ADVICE = "set --dynamic-batch-no-planned-shapes, and stages exchange shapes before each transfer"


def _check(shape: Shape, planned: Shape | None) -> None:
    if shape != _planned(planned):
        raise DynamicBatchArgumentError(
            f"a stage sends shape {shape}, but its neighbour expects {planned}; {_ADVICE}"
        )


def _planned(shape: Shape | None) -> Shape:
    if shape is None:
        raise DynamicBatchArgumentError(f"a stage has more transfers than its schedule; {_ADVICE}")
    return shape
