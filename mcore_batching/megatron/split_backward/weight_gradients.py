"""The weight gradients (W) that split backward passes leave for later, and when they run."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mcore_batching.flags import FLAGS
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.learning.pass_times import TimedWeights, mark
from mcore_batching.planning.pipeline import PARTS, Pass, SplitStage


class WeightGradient(NamedTuple):
    """Of one layer's weight and one micro-batch."""

    parameter: Parameter
    add: Callable[[], Any]
    """Computes it and adds it to ``parameter.main_grad``."""
    num_bytes: int
    """Of what it is computed from."""


@dataclass
class _Deferred:
    """Weight gradients that one backward pass has left, the last layer's first."""

    passed: Pass
    gradients: deque[WeightGradient] = field(default_factory=deque)
    count: int = 0
    """Of `gradients` at first."""
    parts_run: int = 0


class WeightGradients:
    """The weight gradients of one stage in one step.

    First in, first out: each weight adds up its micro-batches in the order in which whole backward
    passes would, so that sums are the same to the bit.

    ``order`` are the passes of this stage as its schedule runs them, ``stage`` says which are split
    and how many parts run before each.
    """

    def __init__(self, order: Sequence[Pass], stage: SplitStage) -> None:
        self._order = list(order)
        self._stage = stage
        self._at = 0  # the pass that runs, or is next
        self._due = stage.parts_before[0] if order else 0
        self._waiting: deque[_Deferred] = deque()
        self._open: _Deferred | None = None
        self.present: Pass | None = None  # the pass that runs
        self._held: list[tuple[Parameter, Callable[[], None]]] = []
        self._waits: list[Callable[[], Any]] = []
        self.num_bytes = self.peak_bytes = 0  # that wait now, and that waited at most
        self.timed: list[TimedWeights] = []

    @property
    def splits_now(self) -> bool:
        """True inside of a split backward pass."""
        return self._open is not None

    @property
    def passes_are_over(self) -> bool:
        """True from the end of the last pass on."""
        return self._at == len(self._order)

    @contextlib.contextmanager
    def passing(self, is_backward: bool) -> Iterator[None]:
        """A pass of the schedule. What is due before it runs first, unless it has by then."""
        self.run_due()
        planned = self._order[self._at] if self._at < len(self._order) else None
        if planned is None or (planned.kind == "B") != is_backward:
            raise DynamicBatchArgumentError(
                f"pass {self._at} of this stage is {'backward' if is_backward else 'forward'}, "
                f"planned is {planned}: this Megatron-LM runs another schedule than is known here; "
                f"unset {FLAGS['split_backward']}"
            )
        self.present = planned
        if is_backward and self._stage.split[self._at]:
            self._open = _Deferred(planned)
        # No `finally`: a pass that raises ends the step, and `clear` drops what it has left.
        yield
        if self._open is not None:
            self._open.count = len(self._open.gradients)
            self._waiting.append(self._open)
        self._open = self.present = None
        self._at += 1
        self._due = 0 if self.passes_are_over else self._stage.parts_before[self._at]

    def put(self, parameter: Parameter, tensors: Sequence[Any], add: Callable[[], Any]) -> None:
        """Leave for later what ``add`` computes from the tensors, and adds to ``main_grad``."""
        assert self._open is not None
        num_bytes = sum(map(_num_bytes, tensors))
        self._open.gradients.append(WeightGradient(parameter, add, num_bytes))
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def hold(self, parameter: Parameter, ready: Callable[[], None]) -> None:
        """Keep back a call that says that all of a parameter's gradients are there."""
        self._held.append((parameter, ready))

    def wait_after_flush(self, wait: Callable[[], Any]) -> None:
        """Make a call that waits for what was sent last once all W has run, which needs it not."""
        self._waits.append(wait)

    def run_due(self) -> None:
        """Run what is due before the next pass."""
        # Once: the wait before a pass runs it, and the pass itself asks again.
        due, self._due = self._due, 0
        while due and self._waiting:
            oldest = self._waiting[0]
            parts = min(due, PARTS - oldest.parts_run)
            self._run_parts(oldest, parts)
            due -= parts
            if oldest.parts_run == PARTS:
                self._waiting.popleft()

    def flush(self, parameters: Collection[Parameter] | None = None) -> None:
        """Run what is left of these parameters, or of all, and make the calls held back."""
        # Parameter by parameter, in the order in which the last backward pass was done with them:
        # the calls start reductions over ranks, in one order whatever each rank's plan is.
        wanted = None if parameters is None else set(parameters)
        left: dict[Parameter, list[tuple[Pass, WeightGradient]]] = {}
        for deferred in self._waiting:
            kept: deque[WeightGradient] = deque()
            for gradient in deferred.gradients:
                if wanted is None or gradient.parameter in wanted:
                    left.setdefault(gradient.parameter, []).append((deferred.passed, gradient))
                else:
                    kept.append(gradient)
            deferred.gradients = kept
        self._waiting = deque(deferred for deferred in self._waiting if deferred.gradients)
        held, self._held = self._held, []
        with self._timed() as num_bytes:
            for parameter, ready in held:
                if wanted is None or parameter in wanted:
                    self._run(left.pop(parameter, ()), num_bytes)
                    ready()
                else:
                    self._held.append((parameter, ready))
            for parameter in list(left):
                self._run(left.pop(parameter), num_bytes)
        # After all of W, and so not where some parameters are reduced before others.
        while parameters is None and self._waits:
            self._waits.pop(0)()

    def clear(self) -> None:
        """Drop what is left: of a step that has failed."""
        for waiting in (self._waiting, self._held, self._waits):
            waiting.clear()
        self._open = self.present = None
        self.num_bytes = 0

    def _run_parts(self, deferred: _Deferred, parts: int) -> None:
        """Run the next parts of what one backward pass has left."""
        deferred.parts_run += parts
        # Whole layers: as many as the parts that have run come to by now.
        left = deferred.count * (PARTS - deferred.parts_run) // PARTS
        with self._timed() as num_bytes:
            while len(deferred.gradients) > left:
                self._run([(deferred.passed, deferred.gradients.popleft())], num_bytes)

    def _run(
        self, gradients: Sequence[tuple[Pass, WeightGradient]], num_bytes: dict[Pass, int]
    ) -> None:
        for passed, gradient in gradients:
            gradient.add()
            self.num_bytes -= gradient.num_bytes
            num_bytes[passed] = num_bytes.get(passed, 0) + gradient.num_bytes

    @contextlib.contextmanager
    def _timed(self) -> Iterator[dict[Pass, int]]:
        num_bytes: dict[Pass, int] = {}
        start = mark()
        with torch.no_grad():
            yield num_bytes
        if num_bytes:
            self.timed.append(TimedWeights(num_bytes, start, mark()))


def _num_bytes(tensor: Any) -> int:
    if isinstance(tensor, Tensor):
        return tensor.numel() * tensor.element_size()
    # Transformer Engine's quantized ones are several tensors, or none that torch knows.
    parts = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else ()
    return sum(_num_bytes(part) for part in parts if part is not None)
