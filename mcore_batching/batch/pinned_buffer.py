"""Several host tensors in one buffer, moved to a device by one copy.

    [1, 2, 3] int64, [0.5] float32          24 bytes, 104 of padding, 4 bytes, 124 of padding
    PinnedBuffer(tensors).on(device)          the same tensors, views of one buffer on the device

On CUDA the buffer is pinned: a copy from pageable memory makes the host wait, non_blocking or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import map_tensors

_ALIGNMENT_BYTES = 128
"""Start of each tensor, for kernels' vectorized loads; PyTorch's allocator aligns to 512."""


class PinnedBuffer:
    """Copies of the host tensors in a value (its dicts, lists and tuples) in one buffer, pinned for
    copies to a CUDA device. Tensors on a device, with a gradient, or of a subclass stay outside it.

    Attributes:
        value: the same with views of the buffer in place of those tensors.
    """

    def __init__(self, value: Any, *, pin_memory: bool) -> None:
        found: list[Tensor] = []
        map_tensors(value, found.append)
        copied = [tensor for tensor in found if _is_copied(tensor)]
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in copied]
        # Bytes of the first tensor, of the padding behind it, of the second tensor, ...
        sizes = [tensor.nbytes for tensor in copied]
        self._sizes = [part for size in sizes for part in (size, -size % _ALIGNMENT_BYTES)]
        self._buffer = torch.empty(
            sum(self._sizes), dtype=torch.uint8, device="cpu", pin_memory=pin_memory
        )
        views = self._views(self._buffer)
        for view, tensor in zip(views, copied, strict=True):
            view.copy_(tensor)
        held = iter(views)
        self.value = map_tensors(value, lambda each: next(held) if _is_copied(each) else each)

    def on(self, device: torch.device) -> Any:
        """The value with copies of its tensors on a device. The host does not wait for pinned
        memory."""
        moved = iter(self._views(self._buffer.to(device, non_blocking=True, copy=True)))
        # What was not copied follows by itself.
        return map_tensors(
            self.value,
            lambda each: next(moved) if _is_copied(each) else each.to(device, non_blocking=True),
        )

    def _views(self, buffer: Tensor) -> list[Tensor]:
        # unsafe_: views without a shared version counter. Otherwise autograd would take a change in
        # place of one tensor for a change of all.
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)[::2]
        kinds = zip(parts, self._kinds, strict=True)
        return [part.view(dtype).view(shape) for part, (dtype, shape) in kinds]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without the host waiting for the copy."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def _is_copied(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )
