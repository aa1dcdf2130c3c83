"""`Statement` and `agree`: the former manner of `batch.consensus`, for code that still uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mcore_batching.batch.agreement.figures import Figure
from mcore_batching.batch.consensus import Agreement as Block
from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import CollectiveError, RankFailedError

Result = TypeVar("Result")
_KINDS = {"largest": "max", "least": "min", "total": "sum", "rank total": "sum_over_ranks"}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One rank's part in an agreement."""

    equal: Mapping[str, Any] = field(default_factory=dict)
    equal_in_replica: Mapping[str, Any] = field(default_factory=dict)
    equal_in_stage: Mapping[str, Any] = field(default_factory=dict)
    tell: Any = None
    asks: bool | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def put_into(self, block: Block) -> tuple[Any, dict[str, Any]]:
        """Name the values in an agreement's block."""
        for name, value in self.equal.items():
            block.same(name, value)
        for name, value in self.equal_in_replica.items():
            block.same(name, value, within="replica")
        for name, value in self.equal_in_stage.items():
            block.same(name, value, within="stage")
        reductions = {
            name: getattr(block, _KINDS[each.kind])(name, each.read(each.values))
            for name, each in self.figures.items()
        }
        wanted = self.tell is not None if self.asks is None else self.asks
        return block.every("told", self.tell, wanted=wanted), reductions


@dataclass(frozen=True)
class Agreement(Generic[Result]):
    """The outcome of `agree`."""

    result: Result
    told: dict[int, Any]
    figures: dict[str, Any]


def no_statement(_: object) -> Statement:
    """The statement of a rank that only succeeded."""
    return Statement()


def agree(
    consensus: Consensus,
    stage: str,
    work: Callable[[], Result],
    says: Callable[[Result], Statement] = no_statement,
    *,
    failure: type[CollectiveError] = RankFailedError,
    mismatch: type[CollectiveError] | None = None,
) -> Agreement[Result]:
    """Do ``work`` on every rank; return only if it succeeded on all. A collective."""
    with consensus.agreement(stage, failure=failure, mismatch=mismatch) as block:
        result = work()
        told, reductions = says(result).put_into(block)
    figures = {name: each.value for name, each in reductions.items()}
    return Agreement(result, told.by_rank, figures)
