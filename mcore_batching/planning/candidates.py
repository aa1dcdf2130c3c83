"""Steps that a search has found, and the best of them.

Guarantees: a step that holds more tokens in flight than may be is never the best; between equals
the first stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.step_work import Slots, StepWork


@dataclass
class Candidate:
    """A whole step.

    Attributes:
        ranks: every rank's slots.
        ends: when each rank's step ends.
    """

    ranks: list[Slots]
    ends: list[float]

    @property
    def end(self) -> float:
        """When the slowest rank's step ends."""
        return max(self.ends)


class BestStep:
    """The step that ends first among those that fit into memory."""

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._best: Candidate | None = None
        self._least_inflight = math.inf

    @property
    def found(self) -> bool:
        """Whether there is one."""
        return self._best is not None

    def consider(self, candidate: Candidate) -> None:
        """Keep a step if it is better; the earlier one wins ties."""
        if self._best is not None and candidate.end >= self._best.end:
            return
        if self._work.max_inflight_tokens is not None:
            held = max(self._work.inflight(slots) for slots in candidate.ranks)
            self._least_inflight = min(self._least_inflight, held)
            if held > self._work.max_inflight_tokens:
                return
        self._best = candidate

    def result(self) -> Candidate:
        """The step.

        Raises:
            ConfigError: there is none.
        """
        if self._best is None:
            raise ConfigError(
                f"found no plan whose first pipeline stage holds at most max_inflight_tokens="
                f"{self._work.max_inflight_tokens} tokens at a time; the least found is "
                f"{self._least_inflight:.0f}: set max_inflight_tokens to that or more, or decrease "
                "max_tokens_per_gpu"
            )
        return self._best
