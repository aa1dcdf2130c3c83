"""Optimizer and scheduler of a train step: made ready, updated or left alone, and advanced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import Argument, ConfigError, at_least


def check_updates(model: list[Any], optimizer: Any) -> None:
    """Refuse a model or an optimizer over which Megatron would fail in the middle of a step."""
    if not all(hasattr(chunk, "zero_grad_buffer") for chunk in model):
        kinds = ", ".join(type(chunk).__name__ for chunk in model)
        raise TypeError(f"model must be wrapped in Megatron's DistributedDataParallel, got {kinds}")
    # By what a step calls: Megatron has several optimizers without a base of their own.
    if not all(hasattr(optimizer, name) for name in ("zero_grad", "scale_loss", "step")):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be Megatron's, from get_megatron_optimizer, got {kind}")


@contextlib.contextmanager
def made_ready(model: list[Any], optimizer: Any) -> Iterator[None]:
    """Gradients zeroed and, inside the block, the hooks of ``megatron.training`` set where nobody
    has set them."""
    _zero_gradients(model, optimizer)
    config = get_model_config(model[0])
    hooks = {
        "grad_scale_func": optimizer.scale_loss,
        # Without it no gradient is added up over ranks: the schedule leaves that to this hook.
        "finalize_model_grads_func": finalize_model_grads,
    }
    # Else the overlapping reduction starts after the first micro-batch, without the others'.
    if getattr(getattr(model[0], "ddp_config", None), "overlap_grad_reduce", False):
        no_sync = [chunk.no_sync for chunk in model]
        hooks["no_sync_func"] = no_sync if len(no_sync) > 1 else no_sync[0]
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            # For the step alone: the next one may be another optimizer's, with a scale of its own.
            if getattr(config, name) is None:
                stack.enter_context(compat.schedules.replaced(config, name, hook))
        yield


def updated(model: list[Any], optimizer: Any, *, skip: bool) -> tuple[bool, float | None]:
    """Step the optimizer, or drop the gradients; update successful, and the gradients' norm."""
    if skip:
        # Not left behind: nobody is to step with them by mistake.
        _zero_gradients(model, optimizer)
        return False, None
    update_successful, grad_norm, _ = optimizer.step()
    return bool(update_successful), None if grad_norm is None else float(grad_norm)


def _zero_gradients(model: list[Any], optimizer: Any) -> None:
    # Two places: the wrapper's buffers, in which gradients are made, and the optimizer's.
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def samples_counted(
    given: int | None, schedule: MicroBatchSchedule, *, is_needed: bool = False
) -> int | None:
    """Samples that a step counts as; None where neither the caller nor the schedule says."""
    if given is not None:
        return at_least("increment", given, 1, ConfigError)
    if schedule.samples_per_step is None and is_needed:
        raise ConfigError(
            "no ",
            Argument("global_batch_size"),
            " says how many samples a step is; set ",
            Argument("increment"),
            " to what lr_decay_steps counts a step as: prompts times trajectories of each, or 1",
        )
    return schedule.samples_per_step
