"""Agreement between all ranks of a Megatron job, and sharing among its replicas.

A replica is what holds one shard of the batch: all pipeline stages, tensor-parallel and
context-parallel ranks of one data-parallel rank. Everything travels over gloo groups of this
module's own, so neither the GPU nor Megatron's communicators are involved.
"""

from __future__ import annotations

import copy
import datetime
import functools
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

# Not by `dist.new_group`: slime puts another in its place, and gloo's queries fail on its groups.
from torch.distributed.distributed_c10d import new_group, new_subgroups_by_enumeration

from mcore_batching.batch.consensus import Agreement, Consensus, Reduction
from mcore_batching.batch.errors import CollectiveError
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron.errors import PlanMismatchError, PlanningFailedError
from mcore_batching.megatron.serialize import deserialize, serialize
from mcore_batching.megatron.watch import FailureWatch

Given = TypeVar("Given")


class Gathered(Generic[Given]):
    """A value of each data-parallel rank, in their order; `values` after the agreement."""

    def __init__(self, packed: bytes, size: Reduction[int]) -> None:
        self.packed = packed  # this rank's value, pickled
        self.size = size  # the longest of all ranks
        self.values: list[Given] = []


class JobAgreement(Agreement):
    """An agreement of all ranks of the job, watched: a failed pipeline of any rank is raised as
    `PipelineFailedError`."""

    def __init__(
        self,
        consensus: JobConsensus,
        stage: str,
        failure: type[CollectiveError],
        mismatch: type[CollectiveError],
    ) -> None:
        super().__init__(consensus, stage, failure, mismatch)
        self._job_consensus = consensus
        self._waiting = consensus.watch.waiting()
        self._gathered: dict[str, Gathered[Any]] = {}

    def gather(self, name: str, value: Given) -> Gathered[Given]:
        """The values of all data-parallel ranks, in log2 rounds of messages behind the agreement.

        The ranks at the same place in each replica gather, so all ranks of a replica that gave the
        same receive the same.

        Args:
            name: the value's name.
            value: this rank's, picklable, of any size; None: nothing, and no message where all
                ranks have nothing.
        """
        packed = b"" if value is None else pickle.dumps(value)
        made = Gathered[Given](packed, self.max(f"{name} (bytes)", len(packed)))
        self._gathered[name] = made
        return made

    def __enter__(self) -> Self:
        self._waiting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, cause, traceback)
        except BaseException as exception:
            self._waiting.__exit__(type(exception), exception, exception.__traceback__)
            raise
        self._waiting.__exit__(kind, cause, traceback)
        if cause is None:
            for _, each in sorted(self._gathered.items()):
                each.values = self._job_consensus.gather_bytes(self.stage, each)


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
        made = copy.copy(self)  # the same groups and messages: only who must say the same changes
        made.regroup(
            _ranks_by([rank for _, _, rank in self._places]),
            _ranks_by([(rank, stage) for _, stage, rank in self._places]),
        )
        return made

    def agreement(
        self,
        stage: str,
        *,
        failure: type[CollectiveError] = PlanningFailedError,
        mismatch: type[CollectiveError] | None = None,
    ) -> JobAgreement:
        """`Consensus.agreement`, by default for planning; raises `PipelineFailedError`, too, if a
        pipeline has failed on any rank."""
        return JobAgreement(self, stage, failure, mismatch or PlanMismatchError)

    def gather_bytes(self, stage: str, gathered: Gathered[Any]) -> list[Any]:
        """The values of a `JobAgreement.gather`. A collective over the ranks at this rank's place
        in each replica."""
        place, size = self._replica.index(self.rank), gathered.size.value
        counterparts = [ranks[place] for ranks in self.replicas]
        if not size:
            return [None] * len(counterparts)
        # A gather takes as much from every rank: the longest. Pickles end where they say.
        own = (gathered.packed or pickle.dumps(None)).ljust(size)
        with self.watch.reporting(stage):
            received = RankMessages(self._world, counterparts).gather(own)
        return [*map(pickle.loads, received)]

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
