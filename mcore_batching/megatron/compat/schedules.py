"""Passes of Megatron's pipeline schedules, and transfers between stages."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


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


@contextlib.contextmanager
def around_passes(mark: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after each pass of one model chunk, without its transfers."""

    def inside(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            mark()
            result = step(*arguments, **options)
            mark()
            return result

        return run

    forward, backward = inside(schedules.forward_step), inside(schedules.backward_step)
    with (
        replaced(schedules, "forward_step", forward),
        replaced(schedules, "backward_step", backward),
    ):
        yield


def modules_with_validate_args(arguments: Any, initialize: Any) -> list[Any]:
    """The modules of ``megatron.training`` in which ``validate_args`` is looked up.

    Until 0.17 ``initialize`` imports it by name.
    """
    return [arguments, initialize] if hasattr(initialize, "validate_args") else [arguments]


def counts_operations_of_samples() -> bool:
    """True if stock code counts floating-point operations by samples' lengths (from 0.18 on)."""
    from megatron.training import training

    return hasattr(training, "consume_seqlen_stats_in_iteration")
