"""Messages between pipeline stages, counted by what they carry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication


@contextlib.contextmanager
def counted_transfers() -> Iterator[dict[str, int]]:
    """``shapes`` and ``tensors`` to the messages that this rank sends and receives meanwhile.

    Megatron's shapes are integers and its hidden states are not; it posts the former in batches,
    the latter in batches or one by one.
    """
    counts = {"shapes": 0, "tensors": 0}
    batch, one_by_one = dist.batch_isend_irecv, p2p_communication._p2p_ops

    def count(tensor: torch.Tensor) -> None:
        counts["tensors" if tensor.is_floating_point() else "shapes"] += 1

    def counted_batch(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            count(operation.tensor)
        return batch(operations)

    def counted_one_by_one(**options: Any) -> Any:
        for name, value in options.items():
            if name.startswith("tensor_") and value is not None:
                count(value)
        return one_by_one(**options)

    dist.batch_isend_irecv = counted_batch
    p2p_communication._p2p_ops = counted_one_by_one
    try:
        yield counts
    finally:
        dist.batch_isend_irecv = batch
        p2p_communication._p2p_ops = one_by_one
