"""Errors of wrong settings, and those that every rank raises together.

An exception on one rank of a pipeline leaves the others waiting in a collective. So what may fail
is done before or after it, in an agreement of all ranks, and every rank raises the same named
error; the rank on which it happened chains its own exception to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mcore_batching.batch.errors import CollectiveError
from mcore_batching.planning.errors import MCoreBatchingError


class DynamicBatchArgumentError(MCoreBatchingError, ValueError):
    """Flags, or model settings, with which dynamic micro-batches would hang or train wrongly.

    The message lists every problem found, each with what to set instead.
    """


def refuse(what: str, problems: Iterable[str]) -> None:
    """Raise `DynamicBatchArgumentError` if ``what`` has problems, each named once."""
    listed = "".join(f"\n  - {problem}" for problem in dict.fromkeys(problems))
    if listed:
        raise DynamicBatchArgumentError(f"{what} cannot run with these settings:{listed}")


def one_of_each_problem(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A text for each problem, with the first module that has it; found are names and problems."""
    # Layers of a model are alike: a hundred of them would bury what else is wrong.
    first: dict[str, str] = {}
    for name, problem in found:
        first.setdefault(problem, name)
    return (f"{name} {problem}" for problem, name in first.items())


class PlanningFailedError(CollectiveError):
    """Planning, or reading the rollout data, raised an exception on some rank."""

    headline = "reading the rollout data or planning failed; no parameter was updated"


class CollationFailedError(CollectiveError):
    """Packing the samples of a step, or reading a call's arguments, raised on some rank."""

    headline = "collating the micro-batches failed; no rank started the pipeline"


class ForwardFailedError(CollectiveError):
    """A loss function, or a function given to `forward_only`, failed on some rank.

    It raised, or returned what it must not, or returned other names than elsewhere. Raised once
    the pipeline has run dry: the micro-batch counts as 0, no parameter is updated. If some of the
    ranks that share a micro-batch raise and others do not, `PipelineFailedError` ends the job.
    """

    headline = "a function of the model's output failed; no parameter was updated"


class NonFiniteError(CollectiveError):
    """A loss or a gradient is NaN or infinite on some rank. Raised before the optimizer's step."""

    headline = (
        "a loss or gradient is not finite; no parameter was updated (to drop such steps instead, "
        "set --dynamic-batch-on-nonfinite skip)"
    )


class PipelineFailedError(CollectiveError):
    """An exception between collectives on some rank: in the model, in Megatron's schedule, in the
    optimizer, or where lengths, plan, samples and outputs travel.

    The other ranks waited for that rank. The process groups are aborted: no collective works any
    more, and after a failure in the optimizer parameters may differ between ranks.
    """

    headline = (
        "a rank failed while others waited for it; the process groups are aborted, restart the "
        "job from its last checkpoint"
    )


class PlanMismatchError(CollectiveError):
    """Ranks that must agree on settings, plan, counts, field names or the call do not."""

    headline = "the ranks disagree; no parameter was updated"
