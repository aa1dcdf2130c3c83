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
_PADDING = torch.zeros(_ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")


class PinnedBuffer:
    """Copies of the host tensors in a value (its dicts, lists and tuples) in one buffer, pinned for
    copies to a CUDA device. Tensors on a device, with a gradient, or of a subclass stay outside it.

    Attributes:
        value: the same with views of the buffer in place of those tensors.
    """

    def __init__(self, value: Any, *, pin_memory: bool) -> None:
        # Bytes of the first tensor, of the padding behind it, of the second tensor, ...
        pieces = [torch.empty(0, dtype=torch.uint8, device="cpu")]

        def note(tensor: Tensor) -> Tensor:
            if _is_copied(tensor):
                held = tensor.contiguous()
                # A tensor of one value is contiguous at any stride, but has bytes at 1 alone.
                held = held.as_strided((held.numel(),), (1,)).view(torch.uint8)
                pieces.extend((held, _PADDING[: -tensor.nbytes % _ALIGNMENT_BYTES]))
            return tensor

        map_tensors(value, note)
        self._sizes = [piece.numel() for piece in pieces[1:]]
        self._buffer = torch.empty(
            sum(self._sizes), dtype=torch.uint8, device="cpu", pin_memory=pin_memory
        )
        torch.cat(pieces, out=self._buffer)
        self.value = value
        self.value = self._in(self._buffer)

    def on(self, device: torch.device) -> Any:
        """The value with copies of its tensors on a device. The host does not wait for pinned
        memory."""
        moved = self._in(self._buffer.to(device, non_blocking=True, copy=True))
        # What was not copied follows by itself.
        return map_tensors(moved, lambda tensor: tensor.to(device, non_blocking=True))

    def _in(self, buffer: Tensor) -> Any:
        """The value with views of the buffer in place of the tensors that are copied."""
        # unsafe_: views without a shared version counter. Otherwise autograd would take a change in
        # place of one tensor for a change of all.
        parts = iter(torch.unsafe_split_with_sizes(buffer, self._sizes)[::2])

        def view(tensor: Tensor) -> Tensor:
            is_copied = _is_copied(tensor)
            return next(parts).view(tensor.dtype).view(tensor.shape) if is_copied else tensor

        return map_tensors(self.value, view)


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
