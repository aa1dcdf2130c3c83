"""A CPU stand-in for CUDA, under which megatron-core runs on gloo.

`enable` patches functions of `torch.cuda`, enters one `TorchFunctionMode` that turns CUDA devices
into the CPU, and replaces the few megatron-core functions that test for CUDA tensors: the real
schedules, models and optimizers then run in ordinary processes. It is for tests and laptops; it
makes nothing faster. `mcore_batching.megatron` calls it where ``MCORE_BATCHING_CPU`` is set.

megatron-core decides as it is imported whether to use Transformer Engine, which runs on GPUs alone.
So this module is imported before, without megatron-core itself, and makes
``import transformer_engine`` fail where the variable is set.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mcore_batching.planning.errors import MCoreBatchingError

ENVIRONMENT_VARIABLE = "MCORE_BATCHING_CPU"


class DeviceError(MCoreBatchingError, RuntimeError):
    """The CPU stand-in is set where there is CUDA, or not set where there is none."""


_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def is_requested() -> bool:
    """True if ``MCORE_BATCHING_CPU`` is set, and not to 0."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") not in ("", "0")


def _has_transformer_engine() -> bool:
    return sys.modules.get("transformer_engine") is not None


# None in sys.modules makes `import` raise ImportError, as if the package were not installed.
if is_requested() and not _has_transformer_engine():
    modules: dict[str, Any] = sys.modules
    modules["transformer_engine"] = None


def is_enabled() -> bool:
    """True if this process runs on the stand-in."""
    return _mode is not None


def enable(*, force: bool | None = None) -> None:
    """Make megatron-core run on the CPU in this process, until it ends; a second call does nothing.

    Args:
        force: even where there is CUDA; None: where ``MCORE_BATCHING_CPU`` is ``force``.

    Raises:
        DeviceError: CUDA is present and ``force`` is not set; or Transformer Engine, which needs
            it, has been imported.
    """
    global _mode
    if _mode is not None:
        return
    if force is None:
        force = os.environ.get(ENVIRONMENT_VARIABLE) == "force"
    if torch.cuda.is_available() and not force:
        raise DeviceError(
            "the CPU stand-in was asked for, but this machine has CUDA: unset "
            f"{ENVIRONMENT_VARIABLE} to use the GPU, or set it to force"
        )
    if _has_transformer_engine():
        raise DeviceError(
            f"the CPU stand-in cannot run with Transformer Engine: set {ENVIRONMENT_VARIABLE}=1 "
            "before the process starts, and import mcore_batching.megatron before megatron.core"
        )
    # torch.compile on the CPU needs a C++ compiler. The variable is read as functions are
    # decorated, which megatron-core does on import; the setting, as they are called.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    _patch_torch_cuda()
    _patch_start()
    _patch_megatron()
    _mode = _CudaMeansCpu()
    _mode.__enter__()  # type: ignore[no-untyped-call]


_CHANGED = {torch.device, torch.Tensor.type, torch.Tensor.to, torch.Tensor.cuda}
_CHANGED |= {torch.Tensor.pin_memory, torch.Tensor.record_stream}
"""Functions that do something else though no argument has a name."""


class _CudaMeansCpu(TorchFunctionMode):
    """CUDA in device arguments means the CPU; moving a tensor to the GPU does nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Called for every function of torch: nearly all end here.
        if not kwargs and func not in _CHANGED:
            return func(*args)
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.device and args and isinstance(_on_cpu(args[0]), torch.device):
            return _CPU
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
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


class _Idle:
    """Nothing to wait for: all that it was given to do is done."""

    def __init__(self, *unused: Any, **named: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, other: Any = None) -> None:
        """Do nothing."""

    record = wait = wait_event = wait_stream = synchronize


class _Event(_Idle):
    """The host's time: nothing runs behind it."""

    seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: Any) -> float:
        return 1e3 * float(other.seconds - self.seconds)  # CUDA counts milliseconds


class _Stream(_Idle):
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()


def _patch_torch_cuda() -> None:
    # By attribute, not by a mode: these are called as torch.cuda.*, which no mode sees.
    vars(torch.cuda).update({name: _always(answer) for name, answer in _ANSWERS.items()})
    vars(torch.cuda).update(_FUNCTIONS, **_RANDOM_NUMBERS)
    vars(torch.cuda.random).update(_RANDOM_NUMBERS)
    torch.cuda.default_generators = (torch.default_generator,)
    # Marks for NVIDIA's profiler raise without CUDA.
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _always(None))


def _always(answer: Any) -> Callable[..., Any]:
    # A new function each time: torch.compile's tables refuse one under two names.
    return lambda *args, **kwargs: answer


def _is_available() -> bool:
    # megatron.training refuses to start without CUDA, but for PyTorch it must not be
    # there: it would use it.
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return str(caller).startswith("megatron.training")


_ANSWERS: dict[str, Any] = {
    "current_device": _CPU,
    "set_device": None,
    # An older GPU: newer ones turn on kernels of their own.
    "get_device_properties": types.SimpleNamespace(major=8, minor=0, name="CPU"),
    "get_device_capability": (8, 0),
    "get_device_name": "CPU",
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "memory_stats": {},
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "synchronize": None,
    "current_stream": _Stream(),
    "default_stream": _Stream(),
    "stream": _Stream(),
    "is_current_stream_capturing": False,
}
"""Results of functions of `torch.cuda`, whatever their arguments."""


def _device_count() -> int:
    # A GPU for each process of torchrun, as jobs expect.
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _get_rng_state(*unused: Any, **named: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *unused: Any, **named: Any) -> None:
    torch.set_rng_state(state)


_FUNCTIONS = {
    "is_available": _is_available,
    "device_count": _device_count,
    "Stream": _Stream,
    "Event": _Event,
}
_RANDOM_NUMBERS = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    # Not torch.manual_seed, which would call back here.
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
}
"""Functions that stand in both `torch.cuda` and `torch.cuda.random`."""


def _patch_start() -> None:
    """Replace the megatron-core functions that wait for CUDA, or compile, as a program starts."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as megatron_random

    # The module's own setter waits for CUDA to be initialised, which never happens here.
    megatron_random._get_cuda_rng_state = torch.cuda.get_rng_state
    megatron_random._set_cuda_rng_state = torch.cuda.set_rng_state
    # The wheels ship the compiled helper, but not the Makefile that would build it.
    dataset_utils.compile_helpers = _always(None)


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_megatron() -> None:
    """Replace the megatron-core functions that insist on CUDA tensors or Transformer Engine."""
    # Only now: megatron-core reads the settings of `enable` as it is imported.
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    send_and_receive = p2p_communication._p2p_ops
    # More messages than a pipeline has under way; earlier ones have arrived.
    in_flight: collections.deque[Any] = collections.deque(maxlen=256)

    @functools.wraps(send_and_receive)
    def send_copies(**tensors: Any) -> Any:
        # The interleaved schedule frees an output while it is being sent, and drops the handle of
        # its last one. CUDA streams allow both. gloo reads the memory only when the receiver is
        # ready, and loses a message once its handle is dropped.
        for name in ("tensor_send_next", "tensor_send_prev"):
            if tensors.get(name) is not None:
                tensors[name] = tensors[name].detach().clone()
        requests = send_and_receive(**tensors)
        in_flight.extend(requests.values())
        return requests

    p2p_communication._p2p_ops = send_copies
    # The device's generator is the CPU's, which so changes at every dropout.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    token_dispatcher.maybe_move_tensor_to_cpu = _moved
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without Transformer Engine
        moe_utils.te_general_gemm = None
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):  # main, likewise
        multi_token_prediction.is_inference_column_parallel_linear = _always(False)
