"""Several host tensors in one buffer, moved to a device by one copy.

    [1, 2, 3] int64, [0.5] float32          24 bytes, 104 of padding, 4 bytes, 124 of padding
    PinnedBuffer(tensors).on(device)          the same tensors, views of one buffer on the device

On CUDA the buffer is pinned: a copy from pageable memory makes the host wait, non_blocking or not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mcore_batching.planning.integers import round_up

_ALIGNMENT_BYTES = 128
"""Start of each tensor, for kernels' vectorized loads; PyTorch's allocator aligns to 512."""


class PinnedBuffer:
    """Copies of host tensors in one buffer, pinned for copies to a CUDA device. Tensors on a
    device, with a gradient, or of a subclass stay outside the buffer.

    Attributes:
        tensors: views of the buffer, in the order of what was given, and those outside.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pin_memory: bool) -> None:
        self.tensors = given = list(tensors)
        self._is_copied = [_is_copied(tensor) for tensor in given]
        # Bytes of the first tensor, of the padding behind it, of the second tensor, ...
        self._sizes: list[int] = []
        for tensor, is_copied in zip(given, self._is_copied, strict=True):
            size = tensor.nbytes if is_copied else 0
            self._sizes += [size, round_up(size, _ALIGNMENT_BYTES) - size]
        self._buffer = torch.empty(
            sum(self._sizes), dtype=torch.uint8, device="cpu", pin_memory=pin_memory
        )
        self.tensors = self._in(self._buffer)
        for view, tensor in zip(self.tensors, given, strict=True):
            if view is not tensor:
                view.copy_(tensor)

    def on(self, device: torch.device) -> list[Tensor]:
        """Copies of the tensors on a device, in their order. The host does not wait for pinned
        memory."""
        moved = self._in(self._buffer.to(device, non_blocking=True, copy=True))
        return [
            view if view is not tensor else tensor.to(device, non_blocking=True)
            for view, tensor in zip(moved, self.tensors, strict=True)
        ]

    def _in(self, buffer: Tensor) -> list[Tensor]:
        """Views of the buffer in place of the tensors that are copied."""
        # unsafe_: views without a shared version counter. Otherwise autograd would take a change in
        # place of one tensor for a change of all.
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)[::2]
        return [
            part.view(tensor.dtype).view(tensor.shape) if is_copied else tensor
            for part, tensor, is_copied in zip(parts, self.tensors, self._is_copied, strict=True)
        ]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without the host waiting for the copy."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def _is_copied(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
    )
