"""Measured times of every forward and backward pass of one optimizer step, on every rank.

Megatron's schedules start and stop ``config.timers`` around the forward and the backward pass of
every micro-batch; `record` puts its own timers there for one optimizer step. What lies between is
waiting for neighbours, sending and receiving.

Times of different ranks are comparable only on one machine: they are read from its monotonic
clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Span:
    """One pass of one micro-batch through one model chunk.

    Attributes:
        data_parallel_rank: whose samples.
        pipeline_rank: which stage.
        chunk: which of the stage's model chunks.
        slot: number of the micro-batch, from 0.
        backward: False for the forward pass.
        start_seconds: since the first span of all ranks.
        end_seconds: likewise.
        tokens: real tokens of the micro-batch, 0 for a placeholder.
    """

    data_parallel_rank: int
    pipeline_rank: int
    chunk: int
    slot: int
    backward: bool
    start_seconds: float
    end_seconds: float
    tokens: int


class Recorder:
    """Stands in for Megatron's timers and notes the passes of this rank."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int, bool, float, float]] = []
        """Chunk, slot, whether backward, start and end in seconds."""
        self._running: tuple[int, int] = (0, 0)
        self._drawn: dict[int, int] = {}
        self._started = 0.0

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """The timer ``name``, as Megatron asks for it."""
        del log_level
        return _Timer(self, name)

    def start(self) -> None:
        """A pass begins."""
        self._started = _now()

    def stop(self, backward: bool) -> None:
        """The pass has ended."""
        self.passes.append((*self._running, backward, self._started, _now()))

    def watch(self, number: int, chunk: torch.nn.Module) -> contextlib.ExitStack:
        """Note which chunk and slot runs; closing the result ends it."""

        def after_forward(module: Any, inputs: Any, output: Tensor) -> None:
            del module, inputs
            slot = self._drawn.get(number, 0)
            self._drawn[number] = slot + 1
            self._running = (number, slot)

            def before_backward(gradient: Tensor) -> None:
                del gradient
                self._running = (number, slot)

            if output.requires_grad:
                output.register_hook(before_backward)  # type: ignore[no-untyped-call]

        stack = contextlib.ExitStack()
        stack.callback(chunk.register_forward_hook(after_forward).remove)
        return stack


def _now() -> float:
    """The time at which everything launched so far has run."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.monotonic()


@dataclasses.dataclass(frozen=True)
class _Timer:
    recorder: Recorder
    name: str

    def start(self, barrier: bool = False) -> None:
        del barrier
        if self.name in ("forward-compute", "backward-compute"):
            self.recorder.start()

    def stop(self, barrier: bool = False) -> None:
        del barrier
        if self.name in ("forward-compute", "backward-compute"):
            self.recorder.stop(backward=self.name == "backward-compute")


@contextlib.contextmanager
def record(model: list[Any]) -> Iterator[Recorder]:
    """Time every pass of ``model`` inside the block."""
    recorder = Recorder()
    config = get_model_config(model[0])
    before, config.timers = config.timers, recorder
    try:
        with contextlib.ExitStack() as stack:
            for number, chunk in enumerate(model):
                stack.enter_context(recorder.watch(number, chunk))
            yield recorder
    finally:
        config.timers = before


def gather(recorder: Recorder, tokens_of_slot: Sequence[int]) -> list[Span]:
    """The spans of all ranks, on every rank; of each stage only one rank's.

    A collective over all ranks. Tensor- and context-parallel ranks run the same micro-batches at
    the same time, so only the first of them is recorded.

    Args:
        recorder: of this rank.
        tokens_of_slot: real tokens of this rank's micro-batches, 0 for a placeholder.
    """
    is_first = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    spans = [
        Span(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            chunk,
            slot,
            backward,
            start,
            end,
            tokens_of_slot[slot],
        )
        for chunk, slot, backward, start, end in recorder.passes
        if is_first
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, spans)
    everyone: list[Span] = [span for spans in gathered for span in spans]
    first = min(span.start_seconds for span in everyone)
    return [
        dataclasses.replace(
            span,
            start_seconds=span.start_seconds - first,
            end_seconds=span.end_seconds - first,
        )
        for span in everyone
    ]
