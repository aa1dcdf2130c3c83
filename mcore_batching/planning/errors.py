"""The planner's errors.

Guarantees: each is a `ValueError`; its message says what was expected, what came, and what to set;
it survives pickling with its message and attributes, so that a rank can send it to the others.
"""

from __future__ import annotations

from typing import Any


def _rebuild(
    cls: type[PlanningError], args: tuple[object, ...], state: dict[str, Any]
) -> PlanningError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class PlanningError(ValueError):
    """Base of every error that the planner raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from message and attributes: subclasses' constructors take other arguments."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ParallelDimsError(PlanningError):
    """A `ParallelDims` that no Megatron job can have."""


class ConfigError(PlanningError):
    """A `PlannerConfig` or `CostModel` out of range, or one that leaves no room for any token."""


class InflightBoundError(ConfigError):
    """No plan was found that keeps to `max_inflight_tokens`."""


class LengthError(PlanningError):
    """Lengths, owners or counts that describe no batch.

    Attributes: `index`, the position of the offending entry, or None if the whole is at fault.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        """Take the message as it is."""
        super().__init__(message)
        self.index = index


class ItemTooLargeError(PlanningError):
    """An item that fits no bin. Attributes: `index`, `size`, `capacity`."""

    def __init__(self, *, index: int, size: int, capacity: int) -> None:
        """Compose the message from the item and the bin."""
        super().__init__(
            f"item {index} has size {size}, more than a bin's capacity of {capacity}; "
            f"set capacity to {size} or more, or leave the item out"
        )
        self.index = index
        self.size = size
        self.capacity = capacity


class OversizeSampleError(PlanningError):
    """A sample longer than the cap, under `on_oversize="error"`.

    Attributes: `index`, `length` and `padded_length` and `cap` in tokens,
    `needed_max_tokens_per_gpu` the least value under which it fits.
    """

    def __init__(
        self,
        *,
        index: int,
        length: int,
        padded_length: int,
        cap: int,
        needed_max_tokens_per_gpu: int,
        num_oversize: int = 1,
    ) -> None:
        """Compose the message from the sample, the cap and what to set."""
        others = f" (and {num_oversize - 1} more samples)" if num_oversize > 1 else ""
        super().__init__(
            f"sample {index} has {length} tokens, {padded_length} after padding, but a micro-batch "
            f"may hold at most {cap}{others}; set --max-tokens-per-gpu >= "
            f"{needed_max_tokens_per_gpu}, or --on-oversize own-bin to run such samples alone"
        )
        self.index = index
        self.length = length
        self.padded_length = padded_length
        self.cap = cap
        self.needed_max_tokens_per_gpu = needed_max_tokens_per_gpu
        self.num_oversize = num_oversize


class InvariantError(PlanningError):
    """A plan that breaks one of the invariants.

    Attributes: `invariant`, its name ("exact cover", "cap", "equal count", "feasible",
    "split before placeholder", "deterministic" or "order"); `indices`, the sample indices
    concerned; `step`, `rank` and `slot`, each None where the fault is not in one place.
    """

    def __init__(
        self,
        invariant: str,
        message: str,
        *,
        indices: tuple[int, ...] = (),
        step: int | None = None,
        rank: int | None = None,
        slot: int | None = None,
    ) -> None:
        """Put the invariant's name and the place before `message`."""
        where = [
            f"{name} {value}"
            for name, value in (("step", step), ("rank", rank), ("slot", slot))
            if value is not None
        ]
        place = f" at {', '.join(where)}" if where else ""
        super().__init__(f"invariant '{invariant}' is broken{place}: {message}")
        self.invariant = invariant
        self.detail = message
        self.indices = indices
        self.step = step
        self.rank = rank
        self.slot = slot


class PlanFormatError(PlanningError):
    """Text that is not a plan, or one of a format, version or digest that does not fit."""
