"""Passes of Megatron's pipeline schedules, and transfers between stages."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside a ``with`` block."""
    own = vars(owner)
    was_there, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_there:
            setattr(owner, name, before)
        else:  # of the class
            delattr(owner, name)


def waits_for_sends(config: Any) -> bool:
    """True if the interleaved schedule waits for an output's transfer before it frees it."""
    # Before 0.18 it freed at once, and could free a tensor that was on its way.
    major, minor = map(int, megatron.core.__version__.split(".")[:2])
    return bool((major, minor) >= (0, 18) and config.deallocate_pipeline_outputs)


_ASKS_FOR_SHAPES = ["self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"]


@contextlib.contextmanager
def shapes_of_transfers(known: Callable[..., tuple[list[int], list[int]]]) -> Iterator[None]:
    """Take the shapes of what stages receive from a function, in place of an exchange.

    Args:
        known: ``(tensor to the next stage or None, to the previous one or None, whether one comes
            from the previous stage, from the next) -> (shape from the previous, from the next)``;
            called before every transfer.
    """
    exchange = getattr(P2PCommunicator, "_communicate_shapes", None)
    # The exchange is slow, but never wrong.
    if exchange is None or [*inspect.signature(exchange).parameters] != _ASKS_FOR_SHAPES:
        warnings.warn(
            "this Megatron-LM exchanges shapes between pipeline stages in a way that is not known "
            "here: each transfer waits for its exchange",
            stacklevel=2,
        )
        yield
        return

    def known_shapes(_: Any, *transfer: Any, **named: Any) -> tuple[list[int], list[int]]:
        return known(*transfer, **named)

    with replaced(P2PCommunicator, "_communicate_shapes", known_shapes):
        yield


def around_passes(mark: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Call a function before and after each pass, as `in_passes` counts them."""

    @contextlib.contextmanager
    def marked(_: bool) -> Iterator[None]:
        mark()
        yield
        mark()

    return in_passes(marked)


@contextlib.contextmanager
def in_passes(
    entered: Callable[[bool], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Run each pass of one model chunk, without its transfers, in ``entered(is backward)``."""

    def inside(step: Callable[..., Any], is_backward: bool) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            with entered(is_backward):
                return step(*arguments, **options)

        return run

    forward = inside(schedules.forward_step, False)
    backward = inside(schedules.backward_step, True)
    with (
        replaced(schedules, "forward_step", forward),
        replaced(schedules, "backward_step", backward),
    ):
        yield


def unknown_to_split_backward(model: Any) -> Iterator[str]:
    """Functions that split backward passes replace, missing here or with other arguments."""
    linear = LinearWithGradAccumulationAndAsyncCommunication
    tensors = {f"tensor_{what}_{whom}" for what in ("send", "recv") for whom in ("prev", "next")}
    known: list[tuple[Any, str, set[str]]] = [
        (linear, "forward", {"grad_output_buffer", "wgrad_deferral_limit"}),
        (linear, "backward", {"ctx", "grad_output"}),
        (p2p_communication, "_p2p_ops", tensors),
        (p2p_communication, "_batched_p2p_ops", tensors),
        (P2PCommunicator, "_communicate_shapes", set(_ASKS_FOR_SHAPES)),
        (schedules, "forward_step", {"forward_step_func", "data_iterator", "model"}),
        (schedules, "backward_step", {"input_tensor", "output_tensor", "output_tensor_grad"}),
    ]
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    known += [(type(group), "register_grad_ready", {"param"}) for group in groups[:1]]
    for owner, name, names in known:
        function = getattr(owner, name, None)
        if function is None or not names <= inspect.signature(function).parameters.keys():
            yield f"{owner.__name__}.{name}"
