"""Agreement between all ranks of a Megatron job, and sharing among its replicas.

A replica is what holds one shard of the batch: all pipeline stages, tensor-parallel and
context-parallel ranks of one data-parallel rank. Everything travels over gloo groups of this
module's own, so neither the GPU nor Megatron's communicators are involved.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

# Not by `dist.new_group`: slime puts another in its place, and gloo's queries fail on its groups.
from torch.distributed.distributed_c10d import new_group, new_subgroups_by_enumeration

from mcore_batching.batch.consensus import Agreement, Consensus
from mcore_batching.batch.errors import CollectiveError
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron.errors import PlanMismatchError, PlanningFailedError
from mcore_batching.megatron.serialize import deserialize, serialize
from mcore_batching.megatron.watch import FailureWatch


class JobConsensus(Consensus):
    """Agreement over all ranks, which make it together."""

    def __init__(self, timeout_seconds: float, watch: FailureWatch) -> None:
        self.watch = watch
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self.data_parallel_rank: int = parallel_state.get_data_parallel_rank()
        self._world = world = new_group(backend="gloo", timeout=self._timeout)
        # One gather brings every rank the places of all: the partitions below need no further one.
        stage = parallel_state.get_pipeline_model_parallel_rank()
        with_rows = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        places: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(places, (self.data_parallel_rank, stage, with_rows), group=world)
        self._places = places
        super().__init__(
            world,
            replicas=_ranks_by([replica for replica, _, _ in places]),
            stages=_ranks_by([place[:2] for place in places]),
            mismatch=PlanMismatchError,
        )

    # Each made at the first call that needs it: most jobs neither share nor exchange samples.
    @functools.cached_property
    def _replica_group(self) -> dist.ProcessGroup | None:
        return self._own_group(self.replicas)

    @functools.cached_property
    def counterpart_group(self) -> dist.ProcessGroup | None:
        """The ranks at this rank's place in each replica. A collective the first time."""
        return self._own_group(list(zip(*self.replicas, strict=True)))

    @functools.cached_property
    def of_rows(self) -> JobConsensus:
        """Itself, where under dynamic CP every context-parallel rank has rows of its own: a replica
        is then what runs the same rows. Not for what replicas share or exchange, which is samples.
        """
        made = copy.copy(self)  # the same groups and messages: only what is compared changes
        made.regroup(
            _ranks_by([rank for _, _, rank in self._places]),
            _ranks_by([(rank, stage) for _, stage, rank in self._places]),
        )
        return made

    @contextlib.contextmanager
    def agreement(
        self,
        stage: str,
        *,
        failure: type[CollectiveError] = PlanningFailedError,
        mismatch: type[CollectiveError] | None = None,
    ) -> Iterator[Agreement]:
        """`Consensus.agreement`, by default for planning; raises `PipelineFailedError`, too, if a
        pipeline has failed on any rank."""
        with (
            self.watch.waiting(),
            super().agreement(stage, failure=failure, mismatch=mismatch) as agree,
        ):
            yield agree

    def gather_messages(self, stage: str, own: bytes, ranks: Sequence[int]) -> list[bytes]:
        """`Consensus.gather_messages`; a failure is reported to all ranks."""
        with self.watch.reporting(stage):
            return super().gather_messages(stage, own, ranks)

    @property
    def _replica(self) -> Sequence[int]:
        return self.replicas[self._in_replica[0]]

    def share_within_replica(self, value: Any) -> Any:
        """Hand a value to the ranks of each replica that lack it (None). A collective over all.

        Raises:
            PlanningFailedError: a value cannot be serialised.
            PlanMismatchError: no rank of some replica has the value.
            PipelineFailedError: a value does not fit into memory on some rank.
        """
        with self.watch.reporting("sharing data"):
            has = RankMessages(self._world, self._replica).gather(bytes([value is not None]))
            among = self._replica_group
        having = [rank for rank, each in zip(self._replica, has, strict=True) if any(each)]
        # Nothing travels where all have it, or none: the latter is an error below, raised once all
        # replicas have met.
        source = having[0] if 0 < len(having) < len(self._replica) else None
        read = self.handed(lambda: value, source, among)
        with self.agreement("sharing data") as agree:
            received = read()
            has_any = agree.every("has data", bool(having), wanted=not having)
        lacking = {
            ranks[0]: f"no rank of data-parallel rank {replica} (global ranks {list(ranks)}) was "
            "given rollout_data: pass it on at least one, without samples an empty batch"
            for replica, ranks in enumerate(self.replicas)
            if not has_any.by_rank.get(ranks[0], True)
        }
        if lacking:
            raise PlanMismatchError(lacking)
        return received

    def broadcast_bytes(self, stage: str, data: bytes, size: int) -> bytes:
        """The first rank's bytes on every rank, which all have agreed on the number of. A
        collective."""
        with self.watch.reporting(stage):
            buffer = torch.empty(size, dtype=torch.uint8)
            if self.rank == self.ranks[0]:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, src=self.ranks[0], group=self._world)
        return buffer.numpy().tobytes()

    def handed(
        self, make: Callable[[], Any], source: int | None, among: dist.ProcessGroup | None = None
    ) -> Callable[[], Any]:
        """The value that global rank ``source`` makes, broadcast; each rank's own if it is None.

        A collective over the ranks of a group, by default all.

        Returns:
            gives the value; to be called in an agreement, since on the source it raises what making
            it raised.
        """
        failed: list[Exception] = []
        box: list[Any] = [None]
        with self.watch.reporting("sharing data"):
            # Here: replicas in which nothing travels must count as many of these as the others.
            if source is None:
                return make
            if self.rank == source:
                try:
                    box = [serialize(make()).numpy().tobytes()]
                except Exception as exception:
                    failed.append(exception)  # the others wait for the broadcast
            dist.broadcast_object_list(box, src=source, group=among or self.group)

        def read() -> Any:
            if failed:
                raise failed[0]
            # Nothing arrives where the source failed, which raises in the same agreement.
            data = bytearray(box[0] or b"")
            return deserialize(torch.frombuffer(data, dtype=torch.uint8)) if data else None

        return read

    def _own_group(self, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The group of this rank's part, made by all ranks together."""
        own: dist.ProcessGroup | None
        own, _ = new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            list(map(list, partition)), timeout=self._timeout, backend="gloo"
        )
        return own


def _ranks_by(labels: Sequence[Any]) -> list[list[int]]:
    """The ranks of each label, which every rank has one of."""
    return [
        [rank for rank, each in enumerate(labels) if each == label] for label in sorted(set(labels))
    ]
