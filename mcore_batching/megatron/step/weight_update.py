"""Optimizer and scheduler of a train step: made ready, updated or left alone, and advanced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import ConfigError, at_least


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """The update that ends a train step."""

    optimizer: Any
    scheduler: Any  # None: none
    increment: int | None  # samples that the step counts as; None: what the schedule says

    def check(self, model: list[Any]) -> None:
        """Refuse a model or optimizer over which Megatron would fail in the middle of a step."""
        if not all(hasattr(chunk, "zero_grad_buffer") for chunk in model):
            kinds = ", ".join(type(chunk).__name__ for chunk in model)
            raise TypeError(
                f"model must be wrapped in Megatron's DistributedDataParallel, got {kinds}"
            )
        # By what a step calls: Megatron has several optimizers without a base of their own.
        if not all(hasattr(self.optimizer, name) for name in ("zero_grad", "scale_loss", "step")):
            kind = type(self.optimizer).__name__
            raise TypeError(
                f"optimizer must be Megatron's, from get_megatron_optimizer, got {kind}"
            )

    def samples_counted(self, schedule: MicroBatchSchedule) -> int | None:
        """Samples that a step counts as; None where nobody says and no scheduler asks."""
        if self.increment is not None:
            return at_least("increment", self.increment, 1, ConfigError)
        if schedule.samples_per_step is None and self.scheduler is not None:
            raise ConfigError(
                "no global_batch_size (--global-batch-size) says how many samples a step is; set "
                "increment to what lr_decay_steps counts a step as: prompts times trajectories of "
                "each, or 1 where it counts steps"
            )
        return schedule.samples_per_step

    @contextlib.contextmanager
    def hooks_set(self, model: list[Any]) -> Iterator[None]:
        """Gradients zeroed and, inside the block, the hooks of ``megatron.training`` set where
        nobody has set them."""
        self._zero_gradients(model)
        config = get_model_config(model[0])
        hooks = {
            "grad_scale_func": self.optimizer.scale_loss,
            # Without it no gradient is added up over ranks: the schedule leaves that to this hook.
            "finalize_model_grads_func": finalize_model_grads,
        }
        # Else the overlapping reduction starts after the first micro-batch, without the others'.
        if getattr(getattr(model[0], "ddp_config", None), "overlap_grad_reduce", False):
            no_sync = [chunk.no_sync for chunk in model]
            hooks["no_sync_func"] = no_sync if len(no_sync) > 1 else no_sync[0]
        with contextlib.ExitStack() as stack:
            for name, hook in hooks.items():
                # For the step alone: the next may be another optimizer's, whose scale is its own.
                if getattr(config, name) is None:
                    stack.enter_context(compat.schedules.replaced(config, name, hook))
            yield

    def apply(
        self, model: list[Any], samples: int | None, *, skip: bool
    ) -> tuple[bool, float | None]:
        """Step optimizer and scheduler, or drop the gradients; update successful, and the
        gradients' norm."""
        if skip:
            # Not left behind: nobody is to step with them by mistake.
            self._zero_gradients(model)
            return False, None
        update_successful, grad_norm, _ = self.optimizer.step()
        if update_successful and self.scheduler is not None:
            self.scheduler.step(increment=samples)
        return bool(update_successful), None if grad_norm is None else float(grad_norm)

    def _zero_gradients(self, model: list[Any]) -> None:
        # Two places: the wrapper's buffers, in which gradients are made, and the optimizer's.
        for chunk in model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
