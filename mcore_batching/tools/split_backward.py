"""A pipeline whose backward passes are split in two, as zero-bubble schedules do.

The gradient of a micro-batch's input (B) is what the stage before waits for; that of the weights
(W) can be made at any later time, and fills gaps. Stock Megatron runs both as one pass. The order
of forward passes and of B is that of 1F1B, and no stage holds more micro-batches than the first
one does there: ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pass_order import Pass, stage_order

SHARE_OF_INPUTS = 0.5
"""Share of a backward pass that makes the gradient of the inputs: as many multiplications as that
of the weights outside attention, more in it."""


def split_backward_time(
    forward_costs: Sequence[float], dims: ParallelDims, *, backward_ratio: float = 2.0
) -> float:
    """End of one data-parallel rank's step with split backward passes.

    Args:
        forward_costs: of each micro-batch on a stage [num_microbatches], at least one.
        dims: gives the stages; virtual ones are left out.
        backward_ratio: cost of both parts of a backward pass over its forward pass.
    """
    plain = ParallelDims(pipeline_parallel=dims.pipeline_parallel)
    stages = [
        _Stage(stage_order(plain, stage, len(forward_costs)), forward_costs, backward_ratio)
        for stage in range(plain.pipeline_parallel)
    ]
    while any(stage.order for stage in stages):
        for number, stage in enumerate(stages):
            while stage.order:
                backward, _, slot = stage.order[0]
                before = number + 1 if backward else number - 1
                ready: float | None = 0.0
                if 0 <= before < len(stages):
                    ready = stages[before].ends.get((backward, slot))
                if ready is None:
                    break
                stage.run_next(ready, most_held=len(stages))
    return max(stage.end() for stage in stages)


class _Stage:
    """A stage's passes to come, and its clock."""

    def __init__(
        self, order: Sequence[Pass], forward_costs: Sequence[float], backward_ratio: float
    ) -> None:
        self.order = deque(order)
        self.ends: dict[tuple[bool, int], float] = {}
        """Of passes that others may wait for: backward or not, and the slot."""
        self._costs = forward_costs
        self._inputs = SHARE_OF_INPUTS * backward_ratio
        self._weights = backward_ratio - self._inputs
        self._due: deque[int] = deque()
        """Slots whose gradient of the weights is to be made."""
        self._held = 0
        self._clock = 0.0

    def run_next(self, ready: float, *, most_held: int) -> None:
        """The next pass, after weights' gradients that make room or that fill the time until its
        input is ready."""
        backward, _, slot = self.order.popleft()
        while not backward and self._held >= most_held:
            self._make_weights()
        while self._due and self._clock + self._weights * self._costs[self._due[0]] <= ready:
            self._make_weights()
        share = self._inputs if backward else 1.0
        self._clock = max(self._clock, ready) + share * self._costs[slot]
        self.ends[backward, slot] = self._clock
        if backward:
            self._due.append(slot)
        else:
            self._held += 1

    def end(self) -> float:
        """The clock after all weights' gradients."""
        while self._due:
            self._make_weights()
        return self._clock

    def _make_weights(self) -> None:
        self._clock += self._weights * self._costs[self._due.popleft()]
        self._held -= 1
