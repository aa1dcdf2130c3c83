"""`Job`: the training job in one object.

    job = job_of(args)          at the start of a public call
    job.options                 Megatron's arguments, parsed
    job.consensus, job.watch    agreement between all ranks, and the watch over their failures
    job.memory                  what calls leave for later ones, as long as Megatron's groups live

A job is as old as Megatron's data-parallel group: where the model's parallelism is set up anew, a
new job begins, without anything of the former. Where the same groups are connected anew, as by
slime around an offloaded model, the job goes on and connects anew as well.

A replica is what holds one shard of the batch: all pipeline stages, tensor-parallel and
context-parallel ranks of one data-parallel rank. Agreements travel over gloo groups of this
module's own, so neither the GPU nor Megatron's communicators are involved.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

# Not by `dist.new_group`: slime puts another in its place, and gloo's queries fail on its groups.
from torch.distributed.distributed_c10d import new_group, new_subgroups_by_enumeration

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.consensus import Agreement, Consensus
from mcore_batching.batch.errors import CollectiveError
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS
from mcore_batching.megatron.errors import (
    DynamicBatchArgumentError,
    ForwardFailedError,
    PlanMismatchError,
    PlanningFailedError,
)
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.watch import FailureWatch, watch_of_world
from mcore_batching.planning.plans.records import StepRecorder


class JobConsensus(Consensus):
    """Agreement over all ranks, which make it together."""

    def __init__(self, timeout_seconds: float, watch: FailureWatch) -> None:
        self.watch = watch
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        world = new_group(backend="gloo", timeout=self._timeout)
        # One gather brings every rank the places of all: the partitions below need no further one.
        place = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        places: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(places, place, group=world)
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
        operation: str,
        *,
        failure: type[CollectiveError] = PlanningFailedError,
        mismatch: type[CollectiveError] | None = None,
    ) -> Iterator[Agreement]:
        """`Consensus.agreement`, by default for planning; raises `PipelineFailedError`, too, if a
        pipeline has failed on any rank."""
        with (
            self.watch.waiting(),
            super().agreement(operation, failure=failure, mismatch=mismatch) as agree,
        ):
            yield agree

    def gather_messages(self, operation: str, own: bytes, ranks: Sequence[int]) -> list[bytes]:
        """`Consensus.gather_messages`; a failure is reported to all ranks."""
        with self.watch.reporting(operation):
            return super().gather_messages(operation, own, ranks)

    def broadcast(
        self, operation: str, data: Tensor, size: int, source: int | None, *, to_all: bool = True
    ) -> Tensor:
        """The bytes, uint8 ``[bytes]`` on the host, of global rank ``source`` on every rank, or on
        those of its replica; this rank's own where it has no source. A collective over all ranks,
        which have agreed on ``size``, the most bytes of any source."""
        # The others count as many of these where nothing travels.
        with self.watch.reporting(operation):
            among = self.group if to_all else self._replica_group
            if source is None:
                return data
            buffer = torch.zeros(size, dtype=torch.uint8)
            if self.rank == source:
                buffer[: data.numel()] = data
            dist.broadcast(buffer, src=source, group=among)
        return buffer

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


class JobMemory:
    """Objects that calls leave for later ones, the same on every rank."""

    def __init__(self, data_parallel_group: Any) -> None:
        self.data_parallel_group = data_parallel_group  # Megatron's, with which it ends
        self.said: set[str] = set()  # keys of lines that are printed once a job
        # Ranks that share a row with this one, by their number; none before any are made.
        self.row_groups: dict[int, dist.ProcessGroup] = {}
        self.recorders: dict[str, StepRecorder] = {}  # by folder
        # What learns a model's costs, by its first chunk. Weak keys: ranks collect garbage at
        # different times, so no other model takes over what a dead one has learnt.
        self.learners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.planner: Any = None  # the planning rank's, from the first plan on
        # The default process group, and the consensus over it from the first agreement on.
        self.connection: tuple[weakref.ref[Any], JobConsensus] | None = None

    def disconnect(self) -> None:
        """End the watch's thread."""
        if self.connection is not None:
            self.connection[1].watch.stop()
            self.connection = None


@dataclasses.dataclass(frozen=True)
class Job:
    """The job as one call sees it."""

    options: Options  # Megatron's arguments of the call
    memory: JobMemory

    @property
    def consensus(self) -> JobConsensus:
        """Agreement between all ranks. A collective over them where it has to be made."""
        world, connection = dist.group.WORLD, self.memory.connection
        # After an abort there is no group, and the next call is to raise the same error.
        if connection is not None and (world is None or connection[0]() is world):
            return connection[1]
        self.memory.disconnect()
        seconds = DEFAULT_TIMEOUT_SECONDS
        # With a wrong one this rank has yet to reach the others, to report it.
        with contextlib.suppress(DynamicBatchArgumentError):
            seconds = self.options.checked_timeout_seconds()
        watch = watch_of_world()
        try:
            made = JobConsensus(seconds, watch)  # raises where there is no group
            with made.agreement("reading the arguments"):
                self.options.checked_timeout_seconds()
        except BaseException:
            watch.stop()  # the next call makes another
            raise
        self.memory.connection = weakref.ref(world), made
        return made

    @property
    def consensus_of_rows(self) -> JobConsensus:
        """The same; each of its replicas consists of ranks that run the same rows."""
        has_sizes = self.options.max_context_parallel is not None
        return self.consensus.of_rows if has_sizes else self.consensus

    @property
    def watch(self) -> FailureWatch:
        """Over the failures of all ranks; a collective where `consensus` is."""
        return self.consensus.watch

    @property
    def recorder(self) -> StepRecorder | None:
        """Writes the job's steps on rank 0; None without ``--dynamic-batch-record``."""
        # On every rank, though one writes: a folder that cannot be made fails on all.
        directory, recorders = self.options.record, self.memory.recorders
        if directory is None:
            return None
        if directory not in recorders:
            recorders[directory] = StepRecorder(directory, writes=dist.get_rank() == 0)
        return recorders[directory]

    def say_once(self, what: str, text: str) -> None:
        """Print a line once a job, where stock code prints its log; `what` names it."""
        if what not in self.memory.said:
            self.memory.said.add(what)
            # The last rank, as Megatron's own log.
            if dist.get_rank() == dist.get_world_size() - 1:
                say(text)

    def defer(
        self, failed: list[Exception], exception: Exception, row: PackedMicroBatch | None = None
    ) -> None:
        """Keep what a function of the model's output raised, to be raised after the pipeline.

        It is added to those that failed so far, and raised at once where ranks that share the
        micro-batch, `row` where rows may have sizes of their own, have not raised.
        """
        failed.append(exception)
        size = parallel_state.get_context_parallel_world_size()
        if row is not None:
            size = row.context_parallel_size
        # A loss communicates with the ranks of its row: unless all of them raised, one may be
        # waiting for this one, and the exception must leave the pipeline at once.
        sharing = size * parallel_state.get_tensor_model_parallel_world_size()
        block = parallel_state.get_data_parallel_rank(with_context_parallel=True) // size
        if sharing > 1 and not self.watch.is_joined(f"block {block} of {size} raises", sharing):
            raise exception

    def agreement(
        self, operation: str, *, failure: type[CollectiveError] = PlanningFailedError
    ) -> AbstractContextManager[Agreement]:
        """A block that all ranks pass or none, as `Consensus.agreement`. A collective."""
        return self.consensus.agreement(operation, failure=failure)

    @contextlib.contextmanager
    def agreement_after_pipeline(
        self, operation: str, failed: Sequence[Exception]
    ) -> Iterator[Agreement]:
        """The agreement once the pipeline has drained: ranks pass it if functions of the model's
        output raised nothing on any, as `defer` kept it. A collective; raises
        `ForwardFailedError`."""
        with self.consensus_of_rows.agreement(
            f"{operation}, after the pipeline",
            failure=ForwardFailedError,
            mismatch=ForwardFailedError,
        ) as agree:
            if failed:
                raise failed[0]
            yield agree


def say(text: str) -> None:
    """Print a line of the log; a full disk is no reason to leave the other ranks waiting."""
    with contextlib.suppress(OSError):
        print(f"mcore_batching: {text}", flush=True)


# The present job's. A global: it ends with Megatron's process groups, which are globals.
_memory: JobMemory | None = None


def present_memory() -> JobMemory | None:
    """The present job's memory; None before its first call."""
    if _memory is None:
        return None
    group = parallel_state.get_data_parallel_group()
    return _memory if _memory.data_parallel_group is group else None


def job_of(args: Any = None) -> Job:
    """The present job, a new one where Megatron's parallelism was set up anew. Not a collective.

    Megatron's arguments may be None where nothing is read of them.
    """
    global _memory
    memory = present_memory()
    if memory is None:
        if _memory is not None:
            _memory.disconnect()
        memory = _memory = JobMemory(parallel_state.get_data_parallel_group())
    return Job(Options.of(args), memory)
