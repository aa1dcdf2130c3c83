"""Times of a job's own passes, and the costs learnt from them (`fit`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_batching.planning.costs.cost import NOT_COSTS, REMOVED, CostModel
from mcore_batching.planning.errors import ConfigError

LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e6
"""Limits of a pass's time: below any clock's step, and eleven days. Squares of times between them
add up without overflow."""
MOST_LEARNT = 1e18
LEAST_LEARNT = 1 / MOST_LEARNT
"""Limits of a learnt cost or time above 0: squares of numbers between them are numbers, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured times of one row."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    forward_seconds: float
    """One forward pass."""
    backward_seconds: float
    """The backward pass after it."""
    context_parallel: int = 1
    """Ranks that the row is cut over."""

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward_seconds + self.backward_seconds

    @property
    def is_usable(self) -> bool:
        """True if both times may have been measured."""
        both = self.forward_seconds, self.backward_seconds
        return all(LEAST_SECONDS <= seconds <= MOST_SECONDS for seconds in both)


@dataclass(frozen=True, kw_only=True)
class LearntCosts:
    """Knowledge of what passes cost; the same on every rank."""

    cost_model: CostModel
    """In units of one token's forward work outside attention."""
    seconds_per_unit: float | None = None
    """Of a mean stage; None before anything was learnt."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LearntCosts:
        """Learnt costs from the dict of `to_data`; other keys, of older releases, are ignored. A
        `ConfigError` if it is none, or has numbers beyond what can be learnt."""
        try:
            costs = {k: v for k, v in data["cost_model"].items() if k not in REMOVED}
            made = cls(
                cost_model=CostModel(**costs),
                seconds_per_unit=data["seconds_per_unit"],
            )
            found = [v for k, v in asdict(made.cost_model).items() if k not in NOT_COSTS]
            speed = made.seconds_per_unit
            numbers = [each for each in (*found, 1.0 if speed is None else speed) if each != 0]
            if not all(LEAST_LEARNT <= each <= MOST_LEARNT for each in numbers):
                raise ValueError(f"numbers must be 0 or from {LEAST_LEARNT:g} to {MOST_LEARNT:g}")
            if made.cost_model.linear == 0 or speed == 0:
                raise ValueError("linear and seconds_per_unit must be above 0")
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"expected learnt costs as state_dict gave them, got {data!r:.80} ({error})"
            ) from None
        return made

    def to_data(self) -> dict[str, Any]:
        """Itself as a dict of numbers, for JSON or a checkpoint."""
        return asdict(self)

    def units(self, lengths: Iterable[int], context_parallel: int = 1) -> float:
        """Cost of both passes of a row of these lengths, on each of its ranks."""
        model = self.cost_model
        if context_parallel > 1:
            model = model.on_ranks(context_parallel)
        return model.micro_batch(lengths) * (1.0 + model.backward_ratio)
