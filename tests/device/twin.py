"""A CUDA device that is not there: torch's own checks, every wait of the host, memory; no values.

    twin = install()            before anything is made; for the rest of the process
    twin.waits                  {"train_step pipeline: item, megatron.core...:forward": 4}
    twin.peaks                  {"train_step pipeline": 1024}, bytes
    main()                      the worker of jobs on it, in place of `kit.worker` on the CPU

A tensor on the device is a `FakeTensor` on ``cuda:0``: shape, type and device, and torch raises
where the host's tensors meet it. Tensors on the host are real. Small tensors of integers on the
device that follow from the host's have a copy there, so that offsets which a layer reads are true;
what else is read is made up: True, or 0. Collectives on the device move what is known, and all on
the host are gloo's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

os.environ["MCORE_BATCHING_CPU"] = "0"

from kit import worker

CUDA = torch.device("cuda", 0)
LARGEST_COPY = 1 << 22
"""Entries of a tensor on the device up to which the host has a copy."""
_BLOCK_BYTES = 512  # the CUDA allocator's

_aten = torch.ops.aten
_SIZED_BY_VALUES = {
    *(_aten.nonzero, _aten.masked_select, _aten._unique, _aten._unique2, _aten.unique_dim),
    *(_aten.unique_consecutive, _aten.equal, _aten.bincount),
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}
_TO_ONE_RANK = {"send", "recv_", "recv_any_source_"}
_MASKS = (torch.bool, torch.uint8)


@dataclasses.dataclass
class _Storage:
    num_bytes: int
    host: torch.UntypedStorage | None = None  # the same values, if they are known


class Twin(TorchDispatchMode):
    """The device.

    Attributes:
        waits: ``"phase: kind, module:function"`` of each wait to its number.
        phase: what the program does now, for `waits`.
        peaks: most bytes that tensors took in each phase, over those that it began with, in the
            allocator's blocks.
        calls: operations on the device by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self.peaks: dict[str, int] = {}
        self.phase, self.held, self.peak = "", 0, 0
        self._storages: dict[int, _Storage] = {}
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Name what the block does, behind what is done already, and note its peak."""
        before, self.phase = self.phase, f"{self.phase} {phase}".strip()
        held, peak, self.peak = self.held, self.peak, self.held
        try:
            yield
        finally:
            self.peaks[self.phase] = self.peak - held
            self.phase, self.peak = before, max(peak, self.peak)

    def wait(self, kind: str) -> None:
        """Count a wait of the present line."""
        self.waits[f"{self.phase}: {kind}, {_line()}"] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        made = tensor.detach().clone()
        self._pinned.add(made.untyped_storage())
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = [each for each in tensors if isinstance(each, FakeTensor)]
        device = kwargs.get("device")
        # To C++ the device is `meta` (`_let_autograd_run`), which it may hand on.
        moves = device is not None and torch.device(device).type in ("cuda", "meta")
        if moves:
            kwargs["device"] = CUDA
        if func.namespace == "c10d" and there:
            return self._collective(func, args, kwargs, there, tensors)
        if not there and not moves:
            pins = kwargs.pop("pin_memory", None)
            made = func(*args, **kwargs)
            return self.pin(made) if pins else made
        self.calls[str(func.overloadpacket)] += 1
        packet = func.overloadpacket
        if packet is _aten._local_scalar_dense:
            self.wait("item")
            return self.value(args[0]).item()
        if there and packet is _aten._to_copy and device is not None and not moves:
            self.wait("copy to the host")
            return self.value(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if packet is _aten.copy_ and not isinstance(args[0], FakeTensor):
            self.wait("copy to the host")
            return args[0].copy_(self.value(args[1]))
        self._count(packet, args, kwargs, tensors)
        return self._run(func, args, kwargs, there)

    def _count(
        self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Count the waits of an operation with a result on the device."""
        if packet in (_aten._to_copy, _aten.copy_):
            source = args[0] if packet is _aten._to_copy else args[1]
            non_blocking = kwargs.get("non_blocking") or args[2:3] == (True,)
            free = non_blocking and source.untyped_storage() in self._pinned
            # `fill_` with a number of the host's is a kernel's argument.
            scalar = packet is _aten.copy_ and not source.dim()
            if not isinstance(source, FakeTensor) and not free and not scalar:
                self.wait("copy to the device")
            return
        if packet in _SIZED_BY_VALUES:
            self.wait(packet.__name__)
        if packet is _aten.repeat_interleave and kwargs.get("output_size") is None:
            self.wait("repeat_interleave")
        if packet in _INDEXED and _needs_mask(*args[1:]):
            self.wait("index by a mask")
        for each in tensors:
            # A number is handed to a kernel by value; of nothing there is nothing to copy.
            if not isinstance(each, FakeTensor) and each.dim() and each.numel():
                self.wait(f"a tensor of the host's in {packet.__name__}")

    def _run(self, func: Any, args: Any, kwargs: Any, there: list[FakeTensor]) -> Any:
        hosts = [self._storages[each.untyped_storage()._cdata].host for each in there]
        is_known = all(host is not None for host in hosts) and "rand" not in str(func)
        packet = func.overloadpacket
        sized = (
            packet in _SIZED_BY_VALUES or packet in _INDEXED or packet is _aten.repeat_interleave
        )
        if sized and is_known and not func._schema.is_mutable:
            made: Any = self._on_host(func, args, kwargs)
            return tree_map(
                lambda each: self._sent(each) if isinstance(each, Tensor) else each, made
            )
        with self.fake:
            made = func(*args, **kwargs)
        outs = [each for each in tree_leaves(made) if isinstance(each, FakeTensor)]
        new = [each for each in outs if self._is_new(each)]
        if not new and not func._schema.is_mutable:
            return made
        if is_known and all(_may_be_known(each) for each in new):
            found = tree_leaves(self._on_host(func, args, kwargs))
            for each, value in zip(outs, found, strict=True):
                storage = self._storages[each.untyped_storage()._cdata]
                if storage.host is None:
                    copy = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
                    storage.host = copy.copy_(value).untyped_storage()
        else:
            for name, each in zip(func._schema.arguments, args, strict=False):
                if name.alias_info is not None and name.alias_info.is_write:
                    self._forget(each)
        return made

    def _sent(self, value: Tensor) -> Tensor:
        with self.fake:
            made: Any = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=CUDA
            )
        self._is_new(made)
        self._storages[made.untyped_storage()._cdata].host = value.clone().untyped_storage()
        return made

    def _forget(self, tensors: Any) -> None:
        for each in tree_leaves(tensors):
            if isinstance(each, FakeTensor):
                self._storages[each.untyped_storage()._cdata].host = None

    def _is_new(self, tensor: FakeTensor) -> bool:
        """Note a tensor's storage; True the first time."""
        tensor.fake_device = CUDA
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._storages[key] = _Storage(size)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._freed, key).atexit = False
        return True

    def _freed(self, key: int) -> None:
        self.held -= self._storages.pop(key).num_bytes

    def _host_view(self, tensor: Any) -> Tensor | None:
        """The host's copy of a tensor's values, which changes with it; None: not known."""
        host = self._storages[tensor.untyped_storage()._cdata].host
        if host is None:
            return None
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor on the host; made up where its values are not known: True, or 0."""
        view = self._host_view(tensor)
        if view is not None:
            return view.clone()
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        def here(each: Any) -> Any:
            if isinstance(each, FakeTensor):
                return self._host_view(each)
            return torch.device("cpu") if isinstance(each, torch.device) else each

        return func(*tree_map(here, args), **tree_map(here, kwargs))

    def _collective(
        self, func: Any, args: Any, kwargs: Any, there: list[FakeTensor], tensors: list[Tensor]
    ) -> Any:
        name = func.overloadpacket.__name__
        if len(there) < len(tensors):
            raise RuntimeError(f"{name}: tensors of the host and of the device, at {_line()}")
        if name not in _TO_ONE_RANK and all(self._host_view(each) is not None for each in there):
            found = self._on_host(func, args, kwargs)
            work = found[-1] if isinstance(found, tuple) else found
        else:
            self._forget(args)
            work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work


def _may_be_known(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() <= LARGEST_COPY


def _needs_mask(indices: Any, values: Any = None, accumulate: bool = False) -> bool:
    # One value at all places of a mask is a `masked_fill`.
    fills = values is not None and values.numel() == 1 and not accumulate
    return not fills and any(i is not None and i.dtype in _MASKS for i in indices)


def _line() -> str:
    """``module:function`` of the innermost code that is neither PyTorch's nor this module's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name.split(".")[0] not in ("torch", "contextlib", "functools"):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


class _Calls(TorchFunctionMode):
    """Devices in arguments: C++ would look for CUDA's first one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device and type(args[0]) is int:
            return CUDA
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CUDA
            if func in (torch.tensor, torch.as_tensor):
                del kwargs["device"]
                return self.__torch_function__(func, types, args, kwargs).to(CUDA)
        if func is torch.tensor:  # numbers on the device, in lists, are read one by one
            args = tree_map(
                lambda each: each.item() if isinstance(each, FakeTensor) else each, args
            )
        if func is Tensor.cuda:
            return args[0].to(CUDA, non_blocking=kwargs.get("non_blocking", False))
        if func is Tensor.to:
            args = (args[0], *(CUDA if _is_cuda(each) else each for each in args[1:]))
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


@functools.cache
def install() -> Twin:
    """Put the device into this process, in which it stays."""
    from megatron.core.pipeline_parallel import schedules

    from mcore_batching.megatron import cpu_emulation, exchange, loss_shares

    assert not cpu_emulation.is_enabled()
    twin = Twin()
    _let_autograd_run()
    _patch_cuda(twin, cpu_emulation)
    _patch_modules()
    cpu_emulation._patch_start()
    # Of a class of its own, a fake tensor would be refused as one without bytes.
    for module in (exchange, loss_shares):
        module.has_bytes = lambda tensor: True  # type: ignore[attr-defined]
    for name in [each for each in vars(schedules) if each.startswith("forward_backward_")]:
        setattr(schedules, name, _in_pipeline(getattr(schedules, name), twin))
    make_group = dist.init_process_group
    dist.init_process_group = lambda backend, **options: make_group(  # type: ignore[assignment]
        "cpu:gloo,cuda:fake", **options
    )
    _Calls().__enter__()  # type: ignore[no-untyped-call]
    twin.__enter__()
    return twin


def _in_pipeline(schedule: Callable[..., Any], twin: Twin) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(*arguments: Any, **options: Any) -> Any:
        with twin.within("pipeline"):
            return schedule(*arguments, **options)

    return run


def _let_autograd_run() -> None:
    """Show C++ meta tensors, for which autograd needs neither CUDA's threads nor its guards."""
    make, name_of = Tensor._make_subclass, Tensor.type

    def make_meta(cls: Any, elem: Any, require_grad: Any = False, **named: Any) -> Any:
        if cls is FakeTensor:
            named["dispatch_device"] = False
        return make(cls, elem, require_grad, **named)

    def name(self: Any, *arguments: Any, **options: Any) -> Any:
        found = name_of(self, *arguments, **options)
        return found.replace("torch.meta.", "torch.cuda.") if isinstance(found, str) else found

    Tensor._make_subclass = staticmethod(make_meta)
    fake: Any = FakeTensor
    fake.is_cuda, fake.is_cpu, fake.is_meta = (
        property(lambda self, answer=answer: answer) for answer in (True, False, False)
    )
    fake.type = name
    fake.tolist = lambda self: self.cpu().tolist()  # one wait, not one for each number


def _patch_cuda(twin: Twin, cpu_emulation: Any) -> None:
    """Answer for `torch.cuda` as a GPU would, and count what waits for it."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    cpu_emulation._patch_torch_cuda()
    cpu_emulation._Idle.synchronize = lambda self, other=None: twin.wait("synchronize")
    # For PyTorch it is not there: it would use it.
    answers: dict[str, Any] = {
        "is_available": lambda: not sys._getframe(1).f_globals["__name__"].startswith("torch"),
        "current_device": lambda: 0,
        "get_device_capability": lambda *unused: (9, 0),
        "synchronize": lambda *unused: twin.wait("synchronize"),
        "_lazy_init": lambda: None,
    }
    vars(torch.cuda).update(answers)
    Tensor.pin_memory = lambda self, device=None: twin.pin(self)  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def _patch_modules() -> None:
    """Let modules move to the device: a host's parameter cannot become a fake one in place."""

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        for child in self.children():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None and (moved := fn(parameter.detach())) is not parameter:
                made = torch.nn.Parameter(moved, parameter.requires_grad)
                vars(made).update({k: v for k, v in vars(parameter).items() if k not in vars(made)})
                self._parameters[name] = made
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self

    torch.nn.Module._apply = apply  # type: ignore[assignment]


def main() -> None:
    """Start the ranks of a launch of `kit.worker` on the device."""
    install()
    worker.main()
