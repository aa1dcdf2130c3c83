"""Where all ranks compare notes before a collective that could hang.

Guarantees
- An exception inside `Consensus.guard` on any rank is raised on every rank, as the same named
  error, within one small all-gather.
- What must be equal is compared before it is relied on; a difference is a `PlanMismatchError` on
  every rank that says which rank differs and in what.
- The notes travel over gloo groups of this module's own, so neither the GPU nor Megatron's
  communicators are involved.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_batching.megatron.errors import (
    CollectiveError,
    PlanMismatchError,
    PlanningFailedError,
)

Result = TypeVar("Result")

DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Note:
    """What one rank tells all others.

    Attributes:
        data_parallel_rank: the replica that the rank belongs to; all its ranks hold the same
            samples.
        speaks_for_replica: whether this rank is the one of its replica to be counted in sums.
        value: what the rank has to say, None if it failed.
        error: what went wrong, None if nothing did.
    """

    data_parallel_rank: int
    speaks_for_replica: bool
    value: Any
    error: str | None


class Consensus:
    """Small object collectives over all ranks, and over the ranks of one replica.

    A replica is what holds one shard of the batch: all pipeline stages, tensor-parallel and
    context-parallel ranks of one data-parallel rank. Making one is a collective over all ranks.

    Args:
        timeout_seconds: how long a rank waits for the others before it raises.
    """

    def __init__(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self.data_parallel_rank: int = parallel_state.get_data_parallel_rank()
        self._world = dist.new_group(backend="gloo", timeout=timeout)
        replicas = self._gather((self.data_parallel_rank,))
        self._ranks_of: dict[int, list[int]] = {}
        for rank, (replica,) in enumerate(replicas):
            self._ranks_of.setdefault(replica, []).append(rank)
        self._timeout = timeout
        self._replica: dist.ProcessGroup | None = None
        self._peer_group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self.rank == self._ranks_of[self.data_parallel_rank][0]

    def guard(
        self,
        failure: type[CollectiveError],
        work: Callable[[], Result],
        says: Callable[[Result], Any],
    ) -> tuple[Result, list[Note]]:
        """Do ``work`` on every rank, then tell every rank how it went.

        Args:
            failure: the error to raise on all ranks if any raised in ``work``.
            work: what may fail; makes no collective calls.
            says: what this rank tells the others about the result (small, picklable).

        Returns:
            this rank's result, and every rank's note in the order of ranks.

        Raises:
            CollectiveError: ``failure``, on every rank, if ``work`` raised on any. Where it raised
                the same everywhere, that exception itself.
        """
        cause: Exception | None = None
        value: Any = None
        error: str | None = None
        try:
            result = work()
            value = says(result)
        except Exception as exception:
            cause = exception
            error = f"{type(exception).__name__}: {exception}"
        notes = self._gather(Note(self.data_parallel_rank, self.speaks_for_replica, value, error))
        failures = {rank: note.error for rank, note in enumerate(notes) if note.error is not None}
        if cause is not None and list(failures.values()) == [error] * len(notes):
            raise cause  # the same on every rank as it is
        if failures:
            raise failure(failures) from cause
        return result, notes

    def share_within_replica(self, value: Any, has_value: Sequence[bool]) -> Any:
        """Hand a value to the ranks of each replica that lack it.

        Args:
            value: this rank's value, ignored where it has none.
            has_value: for every global rank, whether it has the value.

        Raises:
            PlanMismatchError: no rank of some replica has the value.
        """
        lacking = {
            replica: ranks
            for replica, ranks in self._ranks_of.items()
            if not any(has_value[rank] for rank in ranks)
        }
        if lacking:
            raise PlanMismatchError(
                {
                    ranks[0]: f"no rank of data-parallel rank {replica} (global ranks {ranks}) was "
                    "given rollout_data: pass it on at least one of them, an empty batch if it "
                    "has no samples"
                    for replica, ranks in lacking.items()
                }
            )
        if all(has_value):
            return value
        ranks = self._ranks_of[self.data_parallel_rank]
        source = next(rank for rank in ranks if has_value[rank])
        return self._broadcast(value, source, self._replica_group())

    def share(self, value: Any, source: int) -> Any:
        """Hand the value of global rank ``source`` to all ranks."""
        return self._broadcast(value, source, self._world)

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """Hand each data-parallel rank one value, and get one from each.

        A collective over all ranks: those that hold the same place in their replicas exchange
        among themselves, so all ranks of a replica end up with the same.

        Args:
            values: for every data-parallel rank, what to hand to it.

        Returns:
            from every data-parallel rank, what it handed to this one; tensors on the host.

        Raises:
            PlanningFailedError: on every rank, if a value cannot be serialised on any.
        """
        outgoing, notes = self.guard(
            PlanningFailedError,
            lambda: [_serialised(value) for value in values],
            lambda outgoing: [len(each) for each in outgoing],
        )
        peers = self._peers()
        incoming_sizes = [notes[rank].value[self.data_parallel_rank] for rank in peers]
        # A view of bytes() would be read-only, which torch warns of.
        sent = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
        received = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            received, sent, incoming_sizes, [len(each) for each in outgoing], group=self._peer_group
        )
        parts = torch.split(received, incoming_sizes)
        return [_deserialised(part.numpy().tobytes()) for part in parts]

    def _peers(self) -> list[int]:
        """The ranks at this rank's place in every replica, by data-parallel rank; makes their
        group at the first call, by all ranks together."""
        place = self._ranks_of[self.data_parallel_rank].index(self.rank)
        if self._peer_group is None:
            for peers in zip(*(self._ranks_of[r] for r in sorted(self._ranks_of)), strict=True):
                group = dist.new_group(list(peers), backend="gloo", timeout=self._timeout)
                if self.rank in peers:
                    self._peer_group = group
        return [self._ranks_of[replica][place] for replica in sorted(self._ranks_of)]

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self._world)
        dist.all_gather_object(gathered, value, group=self._world)
        return gathered

    def _replica_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's replica; made at the first call, by all ranks together."""
        if self._replica is None:
            for replica in sorted(self._ranks_of):
                # Every rank takes part in making every group, as torch.distributed requires.
                ranks = self._ranks_of[replica]
                group = dist.new_group(ranks, backend="gloo", timeout=self._timeout)
                if replica == self.data_parallel_rank:
                    self._replica = group
        return self._replica

    def _broadcast(self, value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
        def serialise() -> bytes | None:
            return _serialised(value) if self.rank == source else None

        serialised, _ = self.guard(PlanningFailedError, serialise, lambda _: None)
        box = [serialised]
        dist.broadcast_object_list(box, src=source, group=group)
        return _deserialised(box[0] or b"")


def _serialised(value: Any) -> bytes:
    # By torch, so that tensors arrive on the host: pickle would put a CUDA tensor on the device
    # that it had on the source.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _deserialised(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def require_equal(notes: Sequence[Note], what: Callable[[Note], Mapping[str, Any]]) -> None:
    """Raise unless all ranks say the same.

    Args:
        notes: one for each rank.
        what: names to values that must agree, taken from a note.

    Raises:
        PlanMismatchError: naming every rank that differs from the most common value, and in what.
    """
    _require_equal_among(dict(enumerate(notes)), what)


def require_equal_within_replicas(
    notes: Sequence[Note], what: Callable[[Note], Mapping[str, Any]]
) -> None:
    """Raise unless the ranks of each replica say the same.

    Raises:
        PlanMismatchError: as `require_equal`.
    """
    failures: dict[int, str] = {}
    for replica in sorted({note.data_parallel_rank for note in notes}):
        among = {
            rank: note for rank, note in enumerate(notes) if note.data_parallel_rank == replica
        }
        try:
            _require_equal_among(among, what)
        except PlanMismatchError as error:
            failures |= error.failures
    if failures:
        raise PlanMismatchError(failures)


def _require_equal_among(
    notes: Mapping[int, Note], what: Callable[[Note], Mapping[str, Any]]
) -> None:
    said = {rank: what(note) for rank, note in notes.items()}
    names = sorted({name for values in said.values() for name in values})
    failures: dict[int, list[str]] = {}
    for name in names:
        by_rank = {rank: repr(values.get(name)) for rank, values in said.items()}
        votes = list(by_rank.values())
        usual = max(votes, key=votes.count)  # ties: what the lowest rank says
        witness = next(rank for rank, value in by_rank.items() if value == usual)
        for rank, value in by_rank.items():
            if value != usual:
                failures.setdefault(rank, []).append(
                    f"{name} is {value}, on rank {witness} it is {usual}"
                )
    if failures:
        raise PlanMismatchError({rank: "; ".join(texts) for rank, texts in failures.items()})


_current: tuple[Any, Consensus] | None = None


def get_consensus(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Consensus:
    """The rendezvous over Megatron's present process groups, made at the first call.

    A collective over all ranks when it has to be made.
    """
    global _current
    groups = parallel_state.get_data_parallel_group()
    if _current is None or _current[0] is not groups:
        _current = (groups, Consensus(timeout_seconds))
    return _current[1]
