"""Calls that make the host wait for the device, counted on the CPU stand-in.

On the device is what is made with a CUDA device or moved to one, the model's tensors, and what is
computed of any of these; all else is on the host. Under `host_waits` a move to the device makes a
copy, `Tensor.device` says where the tensor would be, and while a schedule of Megatron's runs each
of these counts, with the line of code that asked for it:

- a number, list or array read from a tensor on the device (``item``, ``bool``, ``tolist``);
- an operation whose result has as many entries as the device finds (``nonzero``, an index by a
  mask, ``unique``, ``repeat_interleave`` by counts on the device);
- a copy to the device from memory that is not pinned, or not ``non_blocking``: ``torch.tensor``
  with a device, an index made on the host, a tensor of the host's in an operation on the device;
- ``torch.cuda.synchronize`` and its like for streams and events.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_batching.megatron import cpu_emulation

with torch._C.DisableTorchFunction():  # the stand-in would make it the CPU
    DEVICE = torch.device("cuda", 0)

_aten = torch.ops.aten
_SIZED_BY_THE_DEVICE = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.equal,
    _aten.bincount,
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)
_READ_AT_ONCE = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu)
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


class _Storages:
    """Storages of tensors. An address is not taken for another's as long as it is kept here."""

    def __init__(self) -> None:
        self._kept: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._kept


class HostWaits:
    """Where tensors are, and the waits so far.

    Attributes:
        counts: ``(kind of wait, "module:function" that asked for it)`` to a number.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._on_device, self._pinned = _Storages(), _Storages()
        self.is_counting = False

    def put_on_device(self, tensors: Iterable[Any]) -> None:
        """Let tensors count as on the device from now on."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._on_device.add(tensor)

    def is_on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._on_device

    def pin(self, tensor: Tensor) -> None:
        """Let a tensor count as in pinned memory."""
        self._pinned.add(tensor)

    def is_pinned(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._pinned

    def count(self, kind: str) -> None:
        """Count a wait that the present line of code makes."""
        where = _asked_by() if self.is_counting else None
        if where is not None:
            self.counts[kind, where] += 1

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what waits meanwhile."""
        before, self.is_counting = self.is_counting, True
        try:
            yield
        finally:
            self.is_counting = before


@contextlib.contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Tell host and device apart, and count waits while a schedule of Megatron's runs."""
    assert cpu_emulation.is_enabled()
    waits = HostWaits()
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: DEVICE),
        (torch.cuda, "synchronize", lambda device=None: waits.count("synchronize")),
        (torch.cuda.Stream, "synchronize", lambda self: waits.count("synchronize")),
        (torch.cuda.Event, "synchronize", lambda self: waits.count("synchronize")),
        *((schedules, name, _counted(getattr(schedules, name), waits)) for name in _SCHEDULES),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        with _Operations(waits), _Calls(waits):
            yield waits
    finally:
        for (owner, name, _), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


def _counted(schedule: Callable[..., Any], waits: HostWaits) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def counted(*arguments: Any, **options: Any) -> Any:
        model = options["model"]
        waits.put_on_device(_tensors_of(model if isinstance(model, list) else [model]))
        with waits.counting():
            return schedule(*arguments, **options)

    return counted


def _tensors_of(model: list[Any]) -> Iterator[Tensor]:
    """Parameters, buffers, gradient buffers and what else modules keep."""
    for chunk in model:
        for parameter in chunk.parameters():
            yield parameter
            if hasattr(parameter, "main_grad"):
                yield parameter.main_grad
        yield from chunk.buffers() if callable(chunk.buffers) else ()
        for module in chunk.modules():
            yield from (v for v in vars(module).values() if isinstance(v, Tensor))


class _Calls(TorchFunctionMode):
    """What Python asks for, where the operations below do not show the device any more."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, waits = dict(kwargs or {}), self._waits
        if func is torch.device:
            return DEVICE if _is_cuda(args[0] if args else None) else func(*args, **kwargs)
        if func == Tensor.device.__get__:
            # PyTorch's own code is not to see a device that it would use.
            foreign = not str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch")
            there = foreign and waits.is_on_device(args[0])
            return DEVICE if there else func(*args, **kwargs)
        if func in _READ_AT_ONCE and waits.is_on_device(args[0]):
            waits.count(func.__name__)
            return func(*args, **kwargs)
        if func in _MOVES:
            return self._moved(func, args, kwargs)
        if func is Tensor.pin_memory:
            made = _copy_of(args[0])
            waits.pin(made)
            return made
        return self._made(func, args, kwargs)

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``to`` or ``cuda``: a copy, if it moves."""
        waits, tensor = self._waits, args[0]
        given = [*args[1:], *kwargs.values()]
        if func is Tensor.cpu:
            target = torch.device("cpu")
        elif func is Tensor.cuda or any(
            _is_cuda(each) or waits.is_on_device(each) for each in given
        ):
            target = DEVICE
        elif any(isinstance(each, torch.device) or each == "cpu" for each in given):
            target = torch.device("cpu")
        else:
            return func(*args, **kwargs)
        if (target == DEVICE) == waits.is_on_device(tensor):
            return func(*args, **kwargs)
        free = target == DEVICE and waits.is_pinned(tensor) and kwargs.get("non_blocking", False)
        if not free:
            waits.count("copy to the device" if target == DEVICE else "copy to the host")
        made = _copy_of(func(*args, **kwargs))
        if target == DEVICE:
            waits.put_on_device([made])
        return made

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of any other call, which may say on which device it is to be."""
        waits = self._waits
        there, pinned = _is_cuda(kwargs.get("device")), bool(kwargs.get("pin_memory"))
        if there and func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            data = args[1] if func is Tensor.new_tensor else args[0]
            if not waits.is_on_device(data):
                waits.count("copy to the device")
        made = func(*args, **kwargs)
        if there:
            waits.put_on_device(tree_leaves(made))
        elif pinned:
            waits.pin(made)
        return made


class _Operations(TorchDispatchMode):
    """Every operation, those of autograd and of compiled code included."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, waits = kwargs or {}, self._waits
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [waits.is_on_device(each) for each in given]
        if func.overloadpacket is _aten.copy_:
            self._count_copy(args, kwargs)
            return func(*args, **kwargs)
        if any(on_device):
            self._count(func.overloadpacket, args, kwargs)
            # A number of the host's is handed to a kernel by value. Where there is nothing, as in
            # the zeros that autograd makes for an empty part of a concatenation, nothing is copied.
            both = zip(given, on_device, strict=True)
            if any(each.dim() and each.numel() and not there for each, there in both):
                waits.count(f"tensor of the host's in {func.overloadpacket}")
        made = func(*args, **kwargs)
        if any(on_device):
            waits.put_on_device(tree_leaves(made))
        return made

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if packet in _SIZED_BY_THE_DEVICE:
            self._waits.count(str(packet).removeprefix("aten."))
        elif packet is _aten.repeat_interleave and kwargs.get("output_size") is None:
            self._waits.count("repeat_interleave")
        elif packet in _INDEXED and _asks_a_mask(*args[1:]):
            self._waits.count("index by a mask")

    def _count_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        waits, (into, source) = self._waits, args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        there, from_there = waits.is_on_device(into), waits.is_on_device(source)
        is_free = waits.is_pinned(source) and non_blocking
        if from_there and not there:
            waits.count("copy to the host")
        elif there and not from_there and source.dim() and not is_free:
            waits.count("copy to the device")


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy on the host, whatever the tensor is on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _asks_a_mask(
    indices: Iterable[Tensor | None], values: Any = None, accumulate: bool = False
) -> bool:
    """Whether an index has to be made of a mask. One value into all of it is a `masked_fill`."""
    fills = values is not None and values.numel() == 1 and not accumulate
    masks = [each for each in indices if each is not None and each.dtype in _MASKS]
    return bool(masks) and not fills


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _asked_by() -> str | None:
    """``module:function`` of the innermost code that is neither PyTorch's nor this module's.

    None inside a collective: gloo gathers into tensors of its own and copies them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "torch.distributed.distributed_c10d":
            return None
        of_another = name.split(".")[0] not in ("torch", "contextlib", "functools")
        if of_another and name not in (__name__, cpu_emulation.__name__):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"
