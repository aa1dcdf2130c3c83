"""Backward passes split in two: which of them leave their weight gradients for later, and when
those run.

    B   gradient for the inputs, which the stage before waits for
    W   gradients of the weights of linear layers, which nobody waits for
"""

from __future__ import annotations

from typing import NamedTuple

PARTS = 8
"""Parts of one micro-batch's W, cut between layers, by which plans count."""


class SplitStage(NamedTuple):
    """The passes of one stage of one data-parallel rank in one step.

    Attributes:
        split: for each forward or backward pass of `Schedule.order(stage, num_microbatches)`, True
            if it is a backward pass that leaves its W for later.
        parts_before: for each of them, how many parts of W, of the oldest first, run before it;
            what is left runs after the last.
    """

    split: tuple[bool, ...]
    parts_before: tuple[int, ...]
