"""Errors: wrong settings, and those that every rank raises together.

An exception on one rank of a pipeline leaves the others waiting in a collective. The engine
therefore finds out about it before the pipeline starts, and raises the same named error on every
rank; the rank on which it happened chains its own exception to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcore_batching.planning.errors import MCoreBatchingError


class DynamicBatchArgumentError(MCoreBatchingError, ValueError):
    """Flags, or model settings, with which dynamic micro-batches would hang or train wrongly.

    The message lists every problem found, each with what to set instead.
    """


class CollectiveError(MCoreBatchingError, RuntimeError):
    """Base of the errors that all ranks raise together.

    Attributes:
        failures: global rank to what was wrong there.
    """

    headline = "a collective step failed"

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(self.failures.items())]
        super().__init__("\n".join([f"{self.headline}:", *lines]))


class PlanningFailedError(CollectiveError):
    """Planning, or reading the rollout data, raised an exception on some rank."""

    headline = "planning the micro-batches failed; no rank started the pipeline"


class CollationFailedError(CollectiveError):
    """Packing the samples of a step raised an exception on some rank."""

    headline = "collating the micro-batches failed; no rank started the pipeline"


class ForwardFailedError(CollectiveError):
    """A loss function, or a function given to ``forward_only``, raised on some rank.

    Raised once the pipeline has run dry: the micro-batch counts as 0, no update is made.
    """

    headline = "a function of the model's output failed; no parameter was updated"


class PlanMismatchError(CollectiveError):
    """Ranks that must agree on settings, plan, counts or field names do not."""

    headline = "the ranks disagree about the plan; no rank started the pipeline"
