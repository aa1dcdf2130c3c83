"""Any value as one flat tensor of bytes, for a single transfer; tensors in it are not pickled.

    serialize({"tokens": [tensor([5, 6])], "total_lengths": [2]})
    8 bytes, how long the second part is
    the value pickled, "tensor of int64, [2], at byte 0" in place of the tensor
    5 6, as 16 bytes

What the tensors hold is copied once on the way in, from the device in one piece, and once on the
way out. They arrive on the host. Tensors that have no bytes of their own in a row (sparse, nested,
quantised, those of wrapping classes) are pickled, as PyTorch does it.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.columns import sent
from mcore_batching.batch.errors import described

_LENGTH_BYTES = 8  # of the pickled part's length: 64 bits


def serialize(value: Any) -> Tensor:
    """The value as uint8 ``[bytes]`` on the host.

    Raises:
        TypeError: something in it that is no tensor cannot be pickled.
    """
    try:
        pickled, parts = taken_apart(value)
    # Any of them: a function in a function is the second to pickle, a generator the third.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"values cannot be pickled: {described(error)}; give others, or leave their field out"
        ) from error
    head = bytearray(len(pickled).to_bytes(_LENGTH_BYTES, "little") + pickled)
    # One copy from the device in place of one for each tensor.
    if len({part.device for part in parts}) == 1:
        parts = [torch.cat(parts)]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *(part.cpu() for part in parts)])


def deserialize(data: Tensor) -> Any:
    """The value. Inverse of `serialize`."""
    length = int.from_bytes(data[:_LENGTH_BYTES].numpy().tobytes(), "little")
    end = _LENGTH_BYTES + length
    return put_together(data[_LENGTH_BYTES:end].numpy().tobytes(), data[end:])


def taken_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """The value pickled without its tensors, and the bytes of these, each on its device."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    return text.getvalue(), pickler.parts


def put_together(pickled: bytes, data: Tensor) -> Any:
    """The value. Inverse of `taken_apart`, of uint8 ``[bytes]`` one behind the other.

    Its tensors are where the bytes are, but on the host if they were there.
    """
    return _Unpickler(io.BytesIO(pickled), data).load()


def has_bytes(tensor: Tensor) -> bool:
    """True if a tensor is fully described by its type, its shape and its bytes."""
    wraps_others = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    elsewhere = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout == torch.strided and not elsewhere and not wraps_others


def _as_bytes(tensor: Tensor) -> Tensor:
    held = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one value is contiguous at any stride, but has bytes at a stride of 1 alone.
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


def exchanged(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The bytes that each rank of a group had for this one. A collective over the ranks.

    Args:
        parts: uint8 ``[bytes]`` for each rank, on a device that the group communicates for.
        group: of the ranks.
    """
    # Sizes first: who receives must have the room before the bytes come.
    sizes = [part.numel() for part in parts]
    leaving = sent(torch.tensor(sizes), parts[0].device)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    counts = arriving.tolist()  # waits for the device, once per exchange
    received = parts[0].new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(list(parts)), counts, sizes, group=group)
    return list(torch.split(received, counts))


def digest_of(value: Any) -> str:
    """A short digest of numbers and texts in lists, the same on every rank."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: list[Tensor] = []
        self._end = 0

    def persistent_id(self, value: Any) -> Any:
        # In place of a tensor, or of a list of tensors of one type: the type, shapes, and where
        # their bytes begin among all parts.
        if isinstance(value, Tensor):
            return self._note(value, tuple(value.shape)) if has_bytes(value) else None
        if type(value) is not list or not _are_alike(value):
            return None
        shapes = [tuple(each.shape) for each in value]
        return self._note(torch.cat([each.detach().reshape(-1) for each in value]), shapes)

    def _note(self, value: Tensor, shape: Any) -> tuple[Any, ...]:
        part = _as_bytes(value)
        self.parts.append(part)
        self._end += part.numel()
        return value.dtype, shape, self._end - part.numel(), value.is_cpu


def _are_alike(values: list[Any]) -> bool:
    return {*map(type, values)} == {Tensor} and (
        len({(each.dtype, each.device) for each in values}) == 1 and all(map(has_bytes, values))
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, found: Any) -> Any:
        dtype, shape, start, was_on_host = found
        shapes = shape if isinstance(shape, list) else [shape]
        sizes = [torch.Size(each).numel() for each in shapes]
        # Cloned, since bytes in the middle of others need not be aligned.
        joined = self._data[start : start + dtype.itemsize * sum(sizes)].clone().view(dtype)
        joined = joined.cpu() if was_on_host else joined
        if not isinstance(shape, list):
            return joined.reshape(shape)
        # unsafe_: views without a shared version counter.
        parts = torch.unsafe_split_with_sizes(joined, sizes)
        return [part.view(each) for part, each in zip(parts, shapes, strict=True)]
