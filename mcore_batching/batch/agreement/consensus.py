"""Agreement between ranks: an error on one rank is raised on all, and settings must be the same.

    def says(batch):
        return Statement(equal={"names": sorted(batch)}, figures={"rows": total(len(batch["x"]))})
    agreed = Consensus(group).agree("reading the batch", lambda: read(path), says)
    agreed.result, agreed.figures["rows"]    # this rank's batch, samples of all ranks

A rank that raises while others wait in a collective leaves them hanging, so work that may fail runs
inside `Consensus.agree`. Cost: ⌈log2 ranks⌉ rounds of one message of 1.3 KB, figures included. Only
if a rank failed, differs, or asks what others tell, all gather everybody's statement, pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from mcore_batching.batch.agreement._summary import (
    NUMBERS_IN_SUMMARY,
    Summary,
    differences,
    digest_of,
    reduced,
    require_equal,
    residue_of,
)
from mcore_batching.batch.agreement.figures import Figure, numbers_of, values_of
from mcore_batching.batch.agreement.rank_messages import RankMessages, carries_host_messages
from mcore_batching.batch.errors import (
    CollectiveError,
    DisagreementError,
    RankFailedError,
    described,
)
from mcore_batching.planning.errors import Argument

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One rank's part in an agreement.

    Attributes:
        equal: values by name that must be the same on all ranks that name them, by their ``repr``.
        equal_in_replica, equal_in_stage: the same, among the ranks of each replica or stage.
        tell: a small picklable object for ranks that ask.
        asks: True if this rank needs what the others tell; None: if it tells something.
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
    """The outcome of `Consensus.agree`: what this rank's work returned; every rank's
    `Statement.tell` by global rank, this rank's alone if none asked; the figures of all ranks."""

    result: Result
    told: dict[int, Any]
    figures: dict[str, Any]


@dataclass(frozen=True)
class _Note:
    """A rank's outcome as it is sent."""

    stage: str
    error: str | None = None
    said: Statement = Statement()  # values to compare as texts, `tell` as bytes


def no_statement(_: object) -> Statement:
    """The statement of a rank that says only that it succeeded."""
    return Statement()


class Consensus:
    """Agreement between the ranks of a process group.

    Args:
        group: the ranks; None for this process alone.
        replicas: global ranks that hold the same samples, as a partition; None: each has its own.
        stages: those of a replica that also run the same layers; None: the replicas.
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
        """Do ``work`` on every rank; return only if it succeeded on all. A collective.

        Args:
            stage: what is being done, in words; ranks in different stages disagree.
            work: what may fail; makes no collective calls.
            says: this rank's statement, from the work's result.
            failure: raised if ``work`` or ``says`` raised on any rank.
            mismatch: raised if values that must be equal differ; None: the constructor's.

        Raises:
            CollectiveError: ``failure`` or ``mismatch``, the same on every rank; if all ranks
                raised the same exception, that itself.
            SystemExit: on a rank whose work raised it; the others raise ``failure``.
        """
        cause: BaseException | None = None
        note = _Note(stage)
        try:
            result = work()
            note = _noted(stage, says(result))
            told = pickle.loads(note.said.tell)  # fails here, and not on the others, if it cannot
        except (Exception, SystemExit) as exception:
            cause = exception
            note = _Note(stage, error=described(exception, self._spell))
        # The usual way: all succeeded, no values differ, and none asks. This rank's own error is no
        # reason to leave here: the others are in these messages.
        settled = self._settled(note)
        if settled is not None:
            figures = values_of(note.said.figures, settled.maxima, settled.sums)
            return Agreement(result, {self.rank: told}, figures)
        notes = self._gather(note)
        if isinstance(cause, SystemExit):
            raise cause  # as its exit status asks; the others raise `failure`
        # Ranks in different stages may mean anything by their values: that comes first.
        stages = {rank: {"stage": repr(each.stage)} for rank, each in notes.items()}
        require_equal(stages, self._mismatch)
        failures = {rank: each.error for rank, each in notes.items() if each.error is not None}
        # The same error everywhere, such as a wrong flag: as it is, without a list of ranks.
        if cause is not None and list(failures.values()) == [note.error] * len(notes):
            raise cause
        if failures:
            raise failure(failures) from cause
        self._compare(notes, mismatch or self._mismatch)
        # Someone asked, nothing else: figures are joined as the messages would have joined them.
        firsts = {replica[0] for replica in self.replicas}
        said = {rank: each.said for rank, each in notes.items()}
        parts = [numbers_of(each.figures, is_first=rank in firsts) for rank, each in said.items()]
        maxima, sums = zip(*parts, strict=True)
        joined = [max(each) for each in zip(*maxima, strict=True)]
        added = [sum(each) for each in zip(*sums, strict=True)]
        told = {rank: pickle.loads(each.tell) for rank, each in said.items()}
        return Agreement(result, told, values_of(note.said.figures, joined, added))

    def do_alike(
        self,
        stage: str,
        work: Callable[[], Result],
        *,
        failure: type[CollectiveError] = RankFailedError,
    ) -> Result:
        """Do deterministic work on agreed input, which fails on all ranks or on none. No collective
        unless it fails."""
        try:
            return work()
        # Done again inside an agreement, which names the ranks that failed. If this rank is alone,
        # the others are in their next agreement, and all raise that the stages differ.
        except Exception:
            return self.agree(stage, work, failure=failure).result

    def _settled(self, note: _Note) -> Summary | None:
        """Joined figures by the short messages; None if the ranks must gather their notes."""
        if self._messages is None:  # alone, or a group without host messages, which gathers
            return None
        maxima, sums = numbers_of(note.said.figures, is_first=self._in_replica[1] == 0)
        most = NUMBERS_IN_SUMMARY
        rest = max(0, most - len(maxima))
        own = Summary(
            digest_of(note.stage, _shapes(note)),
            digest_of(note.said.equal) if note.said.equal else b"",
            residue_of("replica", note.said.equal_in_replica, *self._in_replica)
            + residue_of("stage", note.said.equal_in_stage, *self._in_stage),
            maxima[:most],
            sums[:rest],
        )
        settles = note.error is None and not note.said.asks
        summary = reduced(self._messages, own if settles else None, most)
        if summary is None or summary.residue:
            return None
        # More than fit: a second round for the rest, on all ranks, whose counts are the same.
        behind = Summary(maxima=maxima[most:], sums=sums[rest:])
        count = len(behind.maxima) + len(behind.sums)
        more = reduced(self._messages, behind, count) if count else behind
        return more and Summary(
            maxima=[*summary.maxima, *more.maxima], sums=[*summary.sums, *more.sums]
        )

    def _compare(self, notes: Mapping[int, _Note], mismatch: type[CollectiveError]) -> None:
        require_equal({rank: note.said.equal for rank, note in notes.items()}, mismatch)
        require_equal({rank: {"figures": _shapes(note)} for rank, note in notes.items()}, mismatch)
        # Stages are parts of replicas: what differs in a replica would be said twice.
        for parts, name in ((self.replicas, "equal_in_replica"), (self.stages, "equal_in_stage")):
            failures: dict[int, str] = {}
            for ranks in parts:
                failures |= differences({rank: getattr(notes[rank].said, name) for rank in ranks})
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
        if self.group is None:  # alone: whoever agrees with itself
            return {self.rank: note}
        notes: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(notes, note, group=self.group)
        return dict(zip(self.ranks, notes, strict=True))


def _noted(stage: str, said: Statement) -> _Note:
    def texts(values: Mapping[str, Any]) -> dict[str, str]:
        return {name: repr(value) for name, value in values.items()}

    # Values are only compared, so texts will do: any object has one, and few can be pickled.
    sent = replace(
        said,
        equal=texts(said.equal),
        equal_in_replica=texts(said.equal_in_replica),
        equal_in_stage=texts(said.equal_in_stage),
        tell=pickle.dumps(said.tell),
        asks=said.tell is not None if said.asks is None else said.asks,
    )
    return _Note(stage, said=sent)


def _shapes(note: _Note) -> str:
    """Name, kind and count of a rank's figures, which must be the same to join them."""
    return ", ".join(f"{name} ({each.shape})" for name, each in sorted(note.said.figures.items()))
