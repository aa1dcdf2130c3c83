"""Steps that a search has found, and the best of them.

Guarantees: a step that holds more tokens in flight than may be is never the best; between two that
end together the one that holds fewer is, and between equals the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_batching.planning.errors import InflightBoundError
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
        """Keep a step if it is better than the one so far."""
        bound = self._work.max_inflight_tokens
        if self._best is not None and candidate.end > self._best.end:
            return
        if self._best is not None and candidate.end == self._best.end:
            if self._held(candidate) >= self._held(self._best):
                return
        elif bound is not None:
            held = self._held(candidate)
            self._least_inflight = min(self._least_inflight, held)
            if held > bound:
                return
        self._best = candidate

    def _held(self, candidate: Candidate) -> float:
        """Tokens in flight on the first stage that holds most of them."""
        return max(self._work.inflight(slots) for slots in candidate.ranks)

    def result(self) -> Candidate:
        """The step.

        Raises:
            InflightBoundError: there is none.
        """
        if self._best is None:
            raise inflight_error(self._work.max_inflight_tokens, self._least_inflight)
        return self._best


def inflight_error(bound: int | None, least: float) -> InflightBoundError:
    """That no plan was found which holds no more tokens in flight than may be.

    Args:
        bound: how many may be.
        least: how many the best plan in this respect holds.
    """
    return InflightBoundError(
        f"found no plan whose first pipeline stage holds at most max_inflight_tokens={bound} "
        f"tokens at a time; the least found is {least:.0f}: set max_inflight_tokens to that or "
        "more, or decrease max_tokens_per_gpu"
    )
