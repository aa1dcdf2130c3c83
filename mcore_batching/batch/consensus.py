"""Agreement between ranks: an error on one rank is raised on all, and settings must be the same.

    with Consensus(group).agreement("reading the batch") as agree:
        batch = read(path)                         # what it raises on one rank, all ranks raise
        agree.same("names", sorted(batch))         # compared over all ranks
        rows = agree.sum("rows", len(batch["x"]))  # reduced over all ranks
    rows.value                                     # there after the block

A rank that raises while others wait in a collective leaves them hanging, so work that may fail runs
inside a block, and makes no collective calls there. The block's end is the collective: ⌈log2 ranks⌉
rounds of one message of 1.3 KB, reductions included, and as many for each value that ranks gather.
All ranks gather each other's pickled reports only if a rank failed or differs, if numbers are NaN
or too many for a message, and in a group without gloo.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

import torch.distributed as dist

from mcore_batching.batch.errors import (
    CollectiveError,
    DisagreementError,
    RankFailedError,
    described,
    readable,
)
from mcore_batching.batch.messages import (
    MODULUS,
    Numbers,
    RankMessages,
    carries_host_messages,
    digest_of,
    reduced,
    residue_of,
)

Value = TypeVar("Value", bound=float | Sequence[float])
Given = TypeVar("Given")
Scope = Literal["job", "replica", "stage"]
_SCOPES: tuple[Scope, ...] = ("job", "replica", "stage")


class Reduction(Generic[Value]):
    """A number, or a list of numbers, to be reduced over ranks; `value` after the agreement."""

    def __init__(self, kind: str, value: Value) -> None:
        self.kind = kind  # "max", "min", "sum" over replicas, or "sum over ranks"
        self.is_list = isinstance(value, Sequence)
        self.own: list[Any] = list(cast(Any, value)) if self.is_list else [value]
        self._joined: list[Any] | None = None

    @property
    def shape(self) -> str:
        """Kind and count, which must be the same on all ranks."""
        return f"{self.kind} of {len(self.own)}" if self.is_list else self.kind

    @property
    def value(self) -> Value:
        """The reduced number or list, the same on every rank."""
        if self._joined is None:
            raise RuntimeError("a reduction has a value once the agreement's block has ended")
        return cast(Value, self._joined if self.is_list else self._joined[0])

    @property
    def is_maximum(self) -> bool:
        """True if ranks join it by maxima (a minimum with its sign changed), False if by sums."""
        return self.kind in ("max", "min")

    def numbers(self, *, is_first: bool) -> list[Any]:
        """The numbers that this rank sends; in a "sum" a replica's first rank alone counts."""
        if self.kind == "min":
            return [-each for each in self.own]
        # Ranks of a replica hold the same samples, which must count once.
        counts = is_first or self.kind != "sum"
        return self.own if counts else [0] * len(self.own)

    def settle(self, numbers: Sequence[Any]) -> None:
        """Take the joined numbers of all ranks."""
        self._joined = [-each for each in numbers] if self.kind == "min" else list(numbers)


class Gathered(Generic[Given]):
    """A value of each of some ranks; `by_rank` and `values` after the agreement."""

    def __init__(self, own: bytes, ranks: Sequence[int], needs: Reduction[list[int]]) -> None:
        self.own = own  # this rank's value, pickled
        self.ranks = ranks
        self.needs = needs  # bytes of the longest; 1 if any rank wants the values
        self.by_rank: dict[int, Given] = {}
        """By global rank, in their order; this rank's alone if no rank wanted the others'."""

    @property
    def values(self) -> list[Given]:
        """The values, in the order of the ranks."""
        return list(self.by_rank.values())


@dataclass
class _Report:
    """One rank's outcome, as it is sent where the short messages do not do."""

    operation: str
    error: str | None = None
    # Values are only compared, so texts will do: any object has one, and few can be pickled.
    same: dict[Scope, dict[str, str]] = field(default_factory=lambda: {s: {} for s in _SCOPES})
    shapes: str = ""
    maxima: list[Any] = field(default_factory=list)
    sums: list[Any] = field(default_factory=list)


class Agreement:
    """The block of `Consensus.agreement`: its body may fail on any rank, its end is a collective.

    Names of values, reductions and calls are this rank's, in any order; ranks must agree on the
    reductions' names, kinds and counts.
    """

    def __init__(
        self,
        consensus: Consensus,
        operation: str,
        failure: type[CollectiveError],
        mismatch: type[CollectiveError],
    ) -> None:
        self.operation = operation
        self._consensus = consensus
        self._failure = failure
        self._mismatch = mismatch
        self._report = _Report(operation)
        self._reductions: dict[str, Reduction[Any]] = {}
        self._gathered: dict[str, Gathered[Any]] = {}

    def same(self, name: str, value: Any, *, within: Scope = "job") -> None:
        """Require that ``value`` has the same ``repr`` on all ranks that name it.

        Args:
            name: the value's name in the error.
            value: anything that has a ``repr``.
            within: the ranks that are compared: all, those of each replica, or those of each
                replica that run the same pipeline stage.
        """
        self._report.same[within][name] = repr(value)

    def max(self, name: str, value: Value) -> Reduction[Value]:
        """For each number, the largest of all ranks."""
        return self._reduction(name, "max", value)

    def min(self, name: str, value: Value) -> Reduction[Value]:
        """For each number, the least of all ranks."""
        return self._reduction(name, "min", value)

    def sum(self, name: str, value: Value) -> Reduction[Value]:
        """For each number, the sum over replicas; all ranks of a replica give the same number."""
        return self._reduction(name, "sum", value)

    def sum_over_ranks(self, name: str, value: Value) -> Reduction[Value]:
        """For each number, the sum over all ranks."""
        return self._reduction(name, "sum over ranks", value)

    def _reduction(self, name: str, kind: str, value: Value) -> Reduction[Value]:
        made = Reduction(kind, value)
        self._reductions[name] = made
        return made

    def gather(self, name: str, value: Given) -> Gathered[Given]:
        """The value of each replica, from the rank at this one's place in it, so that all ranks of
        a replica that gave the same receive the same; else as `every`."""
        return self._gather(name, value, self._consensus.counterparts, wanted=True)

    def every(self, name: str, value: Given, *, wanted: bool = True) -> Gathered[Given]:
        """The value of each rank, in log2 rounds of messages behind the agreement.

        Args:
            name: the value's name.
            value: this rank's, picklable, of any size; None: nothing, and no message where all
                ranks have nothing.
            wanted: True if this rank needs the other ranks' values; no message if none does.
        """
        return self._gather(name, value, self._consensus.ranks, wanted=wanted)

    def _gather(
        self, name: str, value: Given, ranks: Sequence[int], *, wanted: bool
    ) -> Gathered[Given]:
        own = b"" if value is None else pickle.dumps(value)
        if own:
            pickle.loads(own)  # fails here, and not on the others, if it cannot be read
        needs = self.max(f"{name} (bytes, wanted)", [len(own), int(wanted)])
        self._gathered[name] = made = Gathered[Given](own, ranks, needs)
        made.by_rank = {self._consensus.rank: value}
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if cause is not None and not isinstance(cause, Exception | SystemExit):
            return  # an interrupt ends this process; the failure watch reports it
        # This rank's own error is no reason to leave here: the others are in these messages.
        report = self._finished(cause)
        numbers = self._consensus.reduced(report)
        if numbers is None:
            reports = self._consensus.reports(report)
            if isinstance(cause, SystemExit):
                return  # raised with its exit status; the others raise `failure`
            if cause is not None and all(each.error == report.error for each in reports.values()):
                return  # the same error everywhere, such as a wrong flag: without a list of ranks
            self._require_agreed(reports, cause)
            # Too many numbers, or a NaN: reductions as the messages would have joined them.
            maxima = zip(*(each.maxima for each in reports.values()), strict=True)
            sums = zip(*(each.sums for each in reports.values()), strict=True)
            numbers = [max(each) for each in maxima], [sum(each) for each in sums]
        self._settle(*numbers)
        for _, each in sorted(self._gathered.items()):
            self._consensus.receive(self.operation, each)

    def _finished(self, cause: BaseException | None) -> _Report:
        if cause is not None:
            return _Report(self._report.operation, error=described(cause))
        report = self._report
        is_first = self._consensus.is_first_of_replica
        # By name, not in the order of the calls, which may differ between ranks.
        for name, each in sorted(self._reductions.items()):
            numbers = report.maxima if each.is_maximum else report.sums
            numbers += each.numbers(is_first=is_first)
            report.shapes += f"{', ' if report.shapes else ''}{name} ({each.shape})"
        return report

    def _settle(self, maxima: Sequence[Any], sums: Sequence[Any]) -> None:
        left = {True: list(maxima), False: list(sums)}
        for _, each in sorted(self._reductions.items()):
            numbers = left[each.is_maximum]
            each.settle(numbers[: len(each.own)])
            del numbers[: len(each.own)]

    def _require_agreed(self, reports: Mapping[int, _Report], cause: BaseException | None) -> None:
        """Raise what some ranks raised, or what differs."""
        # Ranks in different operations may mean anything by their values: that comes first.
        operations = {rank: {"operation": repr(each.operation)} for rank, each in reports.items()}
        _require_same(operations, self._mismatch)
        failures = {rank: each.error for rank, each in reports.items() if each.error is not None}
        if failures:
            raise self._failure(failures) from cause
        _require_same({rank: each.same["job"] for rank, each in reports.items()}, self._mismatch)
        shapes = {rank: {"reductions": each.shapes} for rank, each in reports.items()}
        _require_same(shapes, self._mismatch)
        # Stages are parts of replicas: what differs in a replica would be named twice.
        parts: dict[Scope, Sequence[Sequence[int]]]
        parts = {"replica": self._consensus.replicas, "stage": self._consensus.stages}
        for scope, of_scope in parts.items():
            differing: dict[int, str] = {}
            for ranks in of_scope:
                differing |= differences({rank: reports[rank].same[scope] for rank in ranks})
            if differing:
                raise self._mismatch(differing)


class Consensus:
    """Agreement between the ranks of a process group.

    Args:
        group: the ranks; None for this process alone.
        replicas: global ranks that hold the same samples, as a partition; None: each has its own.
        stages: ranks of a replica that also run the same layers; None: the replicas.
        mismatch: the error for values that differ and must not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        replicas: Sequence[Sequence[int]] | None = None,
        stages: Sequence[Sequence[int]] | None = None,
        mismatch: type[CollectiveError] = DisagreementError,
    ) -> None:
        self.group = group
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.ranks: list[int] = (
            [self.rank] if group is None else dist.get_process_group_ranks(group)
        )
        self._mismatch = mismatch
        replicas = [[rank] for rank in self.ranks] if replicas is None else replicas
        self.regroup(replicas, replicas if stages is None else stages)
        self._messages: RankMessages | None = None
        if group is not None and carries_host_messages(group):
            self._messages = RankMessages(group)

    def regroup(self, replicas: Sequence[Sequence[int]], stages: Sequence[Sequence[int]]) -> None:
        """Set `replicas` and `stages` anew, as in the constructor."""
        self.replicas, self.stages = replicas, stages
        self._in_replica = self._position_in(self.replicas)
        self._in_stage = self._position_in(self.stages)

    def agreement(
        self,
        operation: str,
        *,
        failure: type[CollectiveError] = RankFailedError,
        mismatch: type[CollectiveError] | None = None,
    ) -> AbstractContextManager[Agreement]:
        """A block that ends without error only if its body succeeded on every rank. A collective.

        Args:
            operation: what is being done, in words; ranks in different operations disagree.
            failure: raised on every rank if the body raised on any.
            mismatch: raised if values that must be the same differ; None: the constructor's.

        Raises, at the block's end:
            CollectiveError: ``failure`` or ``mismatch``, the same on every rank; if all ranks
                raised the same exception, that itself.
            SystemExit: on a rank where the body raised it; the others raise ``failure``.
        """
        return Agreement(self, operation, failure, mismatch or self._mismatch)

    @property
    def is_first_of_replica(self) -> bool:
        """True on the first rank of each replica."""
        return self._in_replica[1] == 0

    @property
    def counterparts(self) -> list[int]:
        """The rank at this one's place in each replica."""
        return [ranks[self._in_replica[1]] for ranks in self.replicas]

    def reduced(self, report: _Report) -> Numbers | None:
        """Joined reductions, by the short messages; None if the ranks must gather their reports. A
        collective."""
        if self._messages is None:  # alone, or a group without host messages, which gathers
            return None
        key, same = digest_of(report.operation, report.shapes), report.same
        # Equal on all ranks if the largest is the least. A rank that names no values is not
        # compared.
        job = digest_of(same["job"]) if same["job"] else -math.inf
        least = -job if same["job"] else -math.inf
        residue = residue_of("replica", same["replica"], *self._in_replica)
        residue += residue_of("stage", same["stage"], *self._in_stage)
        own = [key, -key, job, least, *report.maxima], [residue, *report.sums]
        found = reduced(self._messages, own if report.error is None else None)
        if found is None:
            return None
        (key, other, job, least, *maxima), (residue, *sums) = found
        differs = key != -other or residue % MODULUS or (job > -math.inf and job != -least)
        return None if differs else (maxima, sums)

    def reports(self, report: _Report) -> dict[int, _Report]:
        """Every rank's report by global rank. A collective."""
        if self.group is None:  # alone: agrees with itself
            return {self.rank: report}
        reports: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(reports, report, group=self.group)
        return dict(zip(self.ranks, reports, strict=True))

    def receive(self, operation: str, gathered: Gathered[Any]) -> None:
        """Give a `Gathered` the values of its ranks. A collective over them."""
        ranks, (size, is_wanted) = gathered.ranks, gathered.needs.value
        if not size:
            gathered.by_rank = dict.fromkeys(ranks)
        elif is_wanted and len(ranks) > 1:
            # A gather takes as much from every rank: the longest. Pickles mark their end.
            own = (gathered.own or pickle.dumps(None)).ljust(size)
            received = dict(zip(ranks, self.gather_messages(operation, own, ranks), strict=True))
            gathered.by_rank = {rank: pickle.loads(each) for rank, each in received.items()}

    def gather_messages(self, operation: str, own: bytes, ranks: Sequence[int]) -> list[bytes]:
        """The messages of some ranks, of one length. A collective over them."""
        assert self.group is not None
        if self._messages is not None:
            return RankMessages(self.group, ranks).gather(own)
        received: list[Any] = [b""] * len(self.ranks)
        dist.all_gather_object(received, own, group=self.group)
        return [each for rank, each in zip(self.ranks, received, strict=True) if rank in ranks]

    def _position_in(self, parts: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Number of this rank's part, this rank's place in it, and the part's size."""
        return next(
            (number, list(ranks).index(self.rank), len(ranks))
            for number, ranks in enumerate(parts)
            if self.rank in ranks
        )


def _require_same(values: Mapping[int, Mapping[str, str]], mismatch: type[CollectiveError]) -> None:
    """Raise `mismatch` if any values by rank and name differ."""
    failures = differences(values)
    if failures:
        raise mismatch(failures)


def differences(values: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """For each rank with another value than most: the names, its values and the usual ones."""
    failures: dict[int, list[str]] = {}
    for name in sorted({name for each in values.values() for name in each}):
        by_rank = {rank: each[name] for rank, each in values.items() if name in each}
        usual = Counter(by_rank.values()).most_common(1)[0][0]  # ties: the first rank's
        # A rank to look at: "on rank 0 it is 8" can be checked in its log.
        witness = next(rank for rank, value in by_rank.items() if value == usual)
        for rank, value in by_rank.items():
            if value != usual:
                failures.setdefault(rank, []).append(
                    f"{name} is {value}, on rank {witness} it is {usual}"
                )
    return {rank: readable("; ".join(texts)) for rank, texts in failures.items()}
