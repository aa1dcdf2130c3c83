"""Agreement between ranks: an error on one rank is raised on all, and settings must be the same.

    consensus = Consensus(group)
    agreed = consensus.agree(
        "reading the batch",
        lambda: read(path),
        lambda batch: Statement(
            equal={"fields": sorted(batch)},
            figures={"samples": total(len(batch["tokens"]))},
        ),
    )
    agreed.result               # this rank's batch
    agreed.figures["samples"]   # of all ranks together

A rank that raises while others wait in a collective leaves them hanging. So work that may fail runs
inside `Consensus.agree`, and no rank goes on before it knows that all succeeded.

Cost: ⌈log2 ranks⌉ rounds of one 1 KB message, which carries figures too
(`mcore_batching.batch.figures`). Only if a rank failed, differs, or asks what others tell, all
ranks gather everybody's statement, one pickled object per rank.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from mcore_batching.batch._summary import (
    NUMBERS_IN_SUMMARY,
    Numbers,
    Summary,
    digest_if_any,
    digest_of,
    reduced,
    residue_of,
)
from mcore_batching.batch.errors import BatchError, described, readable
from mcore_batching.batch.figures import Figure, numbers_of, values_of
from mcore_batching.batch.rank_messages import RankMessages, carries_host_messages
from mcore_batching.planning.errors import Argument, MCoreBatchingError

Result = TypeVar("Result")


class CollectiveError(MCoreBatchingError, RuntimeError):
    """Base of the errors that all ranks raise together.

    Attributes:
        failures: by global rank, what was wrong there; long texts are cut to `LONGEST_TEXT`.
    """

    headline = "a collective step failed"

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(self.failures.items())]
        super().__init__("\n".join([f"{self.headline}:", *lines]))


class RankFailedError(CollectiveError, BatchError):
    """Work that failed on some ranks."""

    headline = "failed on some ranks, so none goes on"


class DisagreementError(CollectiveError, BatchError):
    """Values that differ between ranks and must not."""

    headline = "the ranks disagree, so none goes on"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One rank's part in an agreement.

    Attributes:
        equal: values by name that must be the same on all ranks, compared by their ``repr``. A
            rank that leaves a name out is not compared.
        equal_in_replica: the same, among the ranks of each replica.
        equal_in_stage: the same, among the ranks of each stage of a replica.
        tell: a small picklable object for ranks that ask.
        asks: True if this rank needs what the others tell; then all ranks gather. None: True if
            this rank tells something.
        figures: numbers by name, joined over all ranks; the same names, kinds and counts on each.
    """

    equal: Mapping[str, Any] = field(default_factory=dict)
    equal_in_replica: Mapping[str, Any] = field(default_factory=dict)
    equal_in_stage: Mapping[str, Any] = field(default_factory=dict)
    tell: Any = None
    asks: bool | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement(Generic[Result]):
    """The outcome of `Consensus.agree`.

    Attributes:
        result: what this rank's work returned.
        told: every rank's `Statement.tell`, by global rank; this rank's alone if no rank asked.
        figures: of all ranks, by name.
    """

    result: Result
    told: dict[int, Any]
    figures: dict[str, Any]


@dataclass(frozen=True)
class _Note:
    """A rank's outcome as it is sent; values that are only compared are sent as texts."""

    stage: str
    error: str | None = None
    asks: bool = False
    equal: dict[str, str] = field(default_factory=dict)
    equal_in_replica: dict[str, str] = field(default_factory=dict)
    equal_in_stage: dict[str, str] = field(default_factory=dict)
    tell: bytes = b""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def no_statement(result: object) -> Statement:
    """The statement of a rank that says only that it succeeded."""
    del result
    return Statement()


class Consensus:
    """Agreement between the ranks of a process group.

    Args:
        group: the ranks; None for this process alone, without collective calls.
        replicas: partition of the group's global ranks into those that hold the same samples; None:
            each rank has its own.
        stages: partition into those that also run the same layers; None: the replicas.
        mismatch: the error for values that differ and must not.
        spell: how messages write an argument, for instance as a command-line flag.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        replicas: Sequence[Sequence[int]] | None = None,
        stages: Sequence[Sequence[int]] | None = None,
        mismatch: type[CollectiveError] = DisagreementError,
        spell: Callable[[Argument], str] = str,
    ) -> None:
        self.group = group
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.ranks: list[int] = (
            [self.rank] if group is None else dist.get_process_group_ranks(group)
        )
        self._mismatch = mismatch
        self._spell = spell
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

    def agree(
        self,
        stage: str,
        work: Callable[[], Result],
        says: Callable[[Result], Statement] = no_statement,
        *,
        failure: type[CollectiveError] = RankFailedError,
        mismatch: type[CollectiveError] | None = None,
    ) -> Agreement[Result]:
        """Do ``work`` on every rank; return only if it succeeded on all, with equal statements.

        A collective over the group.

        Args:
            stage: what is being done, in words. Ranks in different stages disagree.
            work: what may fail; makes no collective calls.
            says: this rank's statement, from the work's result.
            failure: the error to raise if ``work`` or ``says`` raised on any rank.
            mismatch: the error to raise if a statement's values differ; None: the constructor's.

        Raises:
            CollectiveError: the same on every rank: ``failure``, chained to this rank's own
                exception, or ``mismatch``. If all ranks raised the same, that exception itself.
            SystemExit: on a rank whose work raised it; the others raise ``failure``.
        """
        cause: BaseException | None = None
        note = _Note(stage)
        told: Any = None
        try:
            result = work()
            note = _noted(stage, says(result))
            told = pickle.loads(note.tell)  # fails here, and not on the others, if it cannot
        except (Exception, SystemExit) as exception:
            cause = exception
            note = _Note(stage, error=self._described(exception))
        # The usual way: all succeeded, no values differ, and none asks.
        numbers = self._settled(note)
        if numbers is not None:
            return Agreement(result, {self.rank: told}, values_of(note.figures, numbers))
        notes = self._gather(note)
        if isinstance(cause, SystemExit):
            raise cause
        _require_equal(
            {rank: {"stage": repr(each.stage)} for rank, each in notes.items()}, self._mismatch
        )
        failures = {rank: each.error for rank, each in notes.items() if each.error is not None}
        if cause is not None and list(failures.values()) == [note.error] * len(notes):
            raise cause
        if failures:
            raise failure(failures) from cause
        self._compare(notes, mismatch or self._mismatch)
        firsts = {replica[0] for replica in self.replicas}
        numbers = functools.reduce(
            Numbers.joined,
            [numbers_of(each.figures, is_first=rank in firsts) for rank, each in notes.items()],
        )
        told = {rank: pickle.loads(each.tell) for rank, each in notes.items()}
        return Agreement(result, told, values_of(note.figures, numbers))

    def do_alike(
        self,
        stage: str,
        work: Callable[[], Result],
        *,
        failure: type[CollectiveError] = RankFailedError,
    ) -> Result:
        """Do deterministic work on agreed input, which fails on all ranks or on none.

        No collective unless it fails. If it still fails on this rank alone, the others are in
        their next agreement, and all ranks raise that the stages differ.

        Args:
            stage: as for `agree`.
            work: as for `agree`; done a second time if it fails.
            failure: as for `agree`.
        """
        try:
            return work()
        except Exception:
            return self.agree(stage, work, failure=failure).result

    def _settled(self, note: _Note) -> Numbers | None:
        """Joined figures by the short messages; None if the ranks must gather their notes."""
        if self._messages is None:
            return None
        numbers = numbers_of(note.figures, is_first=self._in_replica[1] == 0)
        head, rest = numbers.split(NUMBERS_IN_SUMMARY)
        own = Summary(
            digest_of(note.stage, _shapes(note)),
            digest_if_any(note.equal),
            residue_of("replica", note.equal_in_replica, *self._in_replica)
            + residue_of("stage", note.equal_in_stage, *self._in_stage),
            head,
            settles=note.error is None and not note.asks,
        )
        summary = reduced(self._messages, own)
        if not summary.settles or summary.residue or not summary.numbers.fit:
            return None
        if not (rest.maxima or rest.sums):
            return summary.numbers
        behind = reduced(self._messages, rest)
        return summary.numbers.followed_by(behind) if behind.fit else None

    def _compare(self, notes: Mapping[int, _Note], mismatch: type[CollectiveError]) -> None:
        _require_equal({rank: note.equal for rank, note in notes.items()}, mismatch)
        _require_equal({rank: {"figures": _shapes(note)} for rank, note in notes.items()}, mismatch)
        failures: dict[int, str] = {}
        for replica in self.replicas:
            failures |= _differences({rank: notes[rank].equal_in_replica for rank in replica})
        for stage in self.stages if not failures else ():
            failures |= _differences({rank: notes[rank].equal_in_stage for rank in stage})
        if failures:
            raise mismatch(failures)

    def _position_in(self, parts: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Number of this rank's part, this rank's place in it, and the part's size."""
        return next(
            (number, list(ranks).index(self.rank), len(ranks))
            for number, ranks in enumerate(parts)
            if self.rank in ranks
        )

    def _gather(self, note: _Note) -> dict[int, _Note]:
        if self.group is None:
            return {self.rank: note}
        notes: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(notes, note, group=self.group)
        return dict(zip(self.ranks, notes, strict=True))

    def _described(self, error: BaseException) -> str:
        """Type and message. Messages of this package spell their arguments, on this rank too."""

        def message(error: BaseException) -> str:
            if isinstance(error, MCoreBatchingError):
                error.args = (error.text(self._spell),)
            return str(error)

        return described(error, message)


def _noted(stage: str, statement: Statement) -> _Note:
    return _Note(
        stage,
        asks=statement.tell is not None if statement.asks is None else statement.asks,
        equal={name: repr(value) for name, value in statement.equal.items()},
        equal_in_replica={n: repr(value) for n, value in statement.equal_in_replica.items()},
        equal_in_stage={n: repr(value) for n, value in statement.equal_in_stage.items()},
        tell=pickle.dumps(statement.tell),
        figures=statement.figures,
    )


def _shapes(note: _Note) -> str:
    """Name, kind and count of a rank's figures, which must be the same to join them."""
    return ", ".join(f"{name} ({each.shape})" for name, each in sorted(note.figures.items()))


def _require_equal(said: Mapping[int, Mapping[str, str]], mismatch: type[CollectiveError]) -> None:
    failures = _differences(said)
    if failures:
        raise mismatch(failures)


def _differences(said: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """For each rank with another value than most: the names, its values and the usual ones."""
    failures: dict[int, list[str]] = {}
    for name in sorted({name for values in said.values() for name in values}):
        by_rank = {rank: values[name] for rank, values in said.items() if name in values}
        usual = Counter(by_rank.values()).most_common(1)[0][0]  # ties: the first rank's
        witness = next(rank for rank, value in by_rank.items() if value == usual)
        for rank, value in by_rank.items():
            if value != usual:
                failures.setdefault(rank, []).append(
                    f"{name} is {value}, on rank {witness} it is {usual}"
                )
    return {rank: readable("; ".join(texts)) for rank, texts in failures.items()}
