"""Tensors side by side in one buffer of bytes, so that one copy takes them to a device.

    [1, 2, 3] int64, [0.5] float32          24 bytes, 104 of padding, 4 bytes, 124 of padding
    SideBySide(tensors).on(device)          the same tensors, views of one buffer on the device

A copy from ordinary memory makes the host wait, whatever it asks for: on CUDA the buffer is pinned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mcore_batching.planning.integers import round_up

_ALIGNMENT_BYTES = 128
"""Kernels read wide from where a tensor begins; PyTorch's own allocator aligns to more."""


class SideBySide:
    """Copies of host tensors in one buffer.

    Args:
        tensors: of any types and shapes; those that are on a device already, or attached to a graph
            or no plain tensors, are kept as they are.
        pin_memory: for copies to a CUDA device.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pin_memory: bool) -> None:
        self._tensors = list(tensors)
        self._copied = [tensor for tensor in self._tensors if _is_copied(tensor)]
        sizes = (tensor.numel() * tensor.element_size() for tensor in self._copied)
        self._starts = [
            0,
            *itertools.accumulate(round_up(size, _ALIGNMENT_BYTES) for size in sizes),
        ]
        self._buffer = torch.empty(
            self._starts[-1], dtype=torch.uint8, device="cpu", pin_memory=pin_memory
        )
        for tensor, view in zip(self._copied, self._views(self._buffer), strict=True):
            view.copy_(tensor)

    def on(self, device: torch.device) -> list[Tensor]:
        """The tensors on a device, in their order. The host does not wait for pinned memory."""
        moved = self._views(self._buffer.to(device, non_blocking=True))
        return [
            next(moved) if _is_copied(tensor) else tensor.to(device, non_blocking=True)
            for tensor in self._tensors
        ]

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        """A view of each copied tensor's part of the buffer."""
        for tensor, start in zip(self._copied, self._starts, strict=False):
            part = buffer[start : start + tensor.numel() * tensor.element_size()]
            # `data` has a version of its own: a change in place of one value is none of its
            # neighbours' as far as autograd can tell.
            yield part.view(tensor.dtype).view(tensor.shape).data


def on_host(values: Sequence[object]) -> list[object]:
    """The values of a field, tensors on a device brought to the host together.

    Args:
        values: one per sample, tensors or not.
    """
    away = [
        (place, value)
        for place, value in enumerate(values)
        if isinstance(value, Tensor) and value.device.type != "cpu"
    ]
    brought = list(values)
    for kind in dict.fromkeys((value.device, value.dtype) for _, value in away):
        alike = [(at, value) for at, value in away if (value.device, value.dtype) == kind]
        # One copy, since the host waits for each.
        flat = torch.cat([value.detach().reshape(-1) for _, value in alike]).cpu()
        parts = torch.split(flat, [value.numel() for _, value in alike])
        for (at, value), part in zip(alike, parts, strict=True):
            brought[at] = part.view(value.shape)
    return brought


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
