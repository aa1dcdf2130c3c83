"""A CPU stand-in for CUDA, under which megatron-core runs on gloo.

megatron-core takes CUDA for granted: it asks for the current device, allocates on ``"cuda"``,
seeds CUDA generators and synchronises streams. `enable` answers each of these on the CPU, so
that the real schedules, models, data-parallel wrapper and optimizers run in ordinary processes.
It is for tests, for reading along and for laptops; it makes nothing faster.

Guarantees
- Nothing is touched by importing this module; only `enable` patches, and it patches once.
- Where CUDA is present `enable` refuses, unless forced: a training job must never end up on
  the CPU by accident.
- What is patched is plain to see: `torch.cuda` functions, one `TorchFunctionMode` that turns CUDA
  devices into the CPU, and the few megatron-core functions that test for CUDA tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mcore_batching.megatron import compat

ENVIRONMENT_VARIABLE = "MCORE_BATCHING_CPU"

_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def is_enabled() -> bool:
    """Whether this process runs on the stand-in."""
    return _mode is not None


def is_requested() -> bool:
    """Whether ``MCORE_BATCHING_CPU=1`` asks the launchers for the stand-in."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") not in ("", "0")


def enable(*, force: bool = False) -> None:
    """Make megatron-core run on the CPU in this process, until it ends.

    Call it before ``torch.distributed.init_process_group("gloo")`` and before models are built.
    A second call does nothing.

    Args:
        force: patch even though CUDA devices are present (they are then left unused).

    Raises:
        RuntimeError: CUDA is present and ``force`` is not set.
    """
    global _mode
    if _mode is not None:
        return
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            "the CPU stand-in was asked for, but this machine has CUDA: training would run on the "
            f"CPU. Unset {ENVIRONMENT_VARIABLE} to use the GPU, or call "
            "mcore_batching.megatron.cpu_emulation.enable(force=True) if the CPU is what you want."
        )
    # torch.compile on the CPU needs a C++ compiler. The variable is read as functions are
    # decorated, which megatron-core does on import; the setting, as they are called.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    _patch_torch_cuda()
    compat.patch_for_cpu()
    _mode = _CudaMeansCpu()
    _mode.__enter__()  # type: ignore[no-untyped-call]


class _CudaMeansCpu(TorchFunctionMode):
    """Every device argument that says CUDA says CPU; every tensor already lies on "the GPU"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.device and args and isinstance(_on_cpu(args[0]), torch.device):
            return _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers assert on the legacy type string of CUDA tensors.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(_on_cpu(argument) for argument in args[1:]))
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return _CPU
    if isinstance(argument, str) and argument.startswith("cuda"):
        return _CPU
    return argument


class _Event:
    """An event of a device that is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that the event has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Say that no time has passed."""
        del other
        return 0.0


class _Stream:
    """A stream on which everything has already run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        del exception

    def synchronize(self) -> None:
        """Do nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Hand back an event that has happened."""
        return event if event is not None else _Event()

    def query(self) -> bool:
        """Say that the stream is idle."""
        return True


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    del stream
    yield


def _patch_torch_cuda() -> None:
    the_stream = _Stream()

    def always(value: Any = None) -> Callable[..., Any]:
        # A new function each time: torch.compile's tables refuse one under two names.
        return lambda *args, **kwargs: value

    def current_stream(device: Any = None) -> _Stream:
        del device
        return the_stream

    def get_rng_state(device: Any = None) -> torch.Tensor:
        del device
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        del device
        torch.set_rng_state(new_state)

    def is_available() -> bool:
        # megatron.training refuses to start without CUDA; PyTorch itself must not believe in it.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return str(caller).startswith("megatron.training")

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would call back here

    replacements: dict[str, Any] = {
        "is_available": is_available,
        "current_device": always(_CPU),
        "device_count": lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "set_device": always(),
        "synchronize": always(),
        # Of an older GPU: newer ones turn on kernels of their own.
        "get_device_properties": always(types.SimpleNamespace(major=8, minor=0, name="CPU")),
        "get_device_capability": always((8, 0)),
        "get_device_name": always("CPU"),
        "empty_cache": always(),
        "reset_peak_memory_stats": always(),
        "memory_allocated": always(0),
        "max_memory_allocated": always(0),
        "memory_reserved": always(0),
        "max_memory_reserved": always(0),
        "memory_stats": always({}),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": _on_stream,
        "is_current_stream_capturing": always(False),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": lambda seed: manual_seed(seed),
        "default_generators": (torch.default_generator,),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, replacements[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, always())
