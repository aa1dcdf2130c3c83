"""`get_data_iterator`: from rollout data on every rank to a schedule of micro-batches.

Guarantees
- All ranks return the same number of steps and the same number of micro-batches for each, or all
  raise the same named error.
- Every sample of the rank is in exactly one micro-batch of exactly one step; a rank without
  samples takes part with placeholders.
- The count obeys the interleaved schedule's rule, rounded up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state

from mcore_batching.batch import DEFAULT_SCHEMA, Schema
from mcore_batching.megatron.arguments import (
    planner_config,
    planner_cost_model,
    uses_dynamic_batch_size,
)
from mcore_batching.megatron.consensus import (
    DEFAULT_TIMEOUT_SECONDS,
    Consensus,
    get_consensus,
    require_equal,
    require_equal_within_replicas,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError, PlanningFailedError
from mcore_batching.megatron.exchange import plan_globally
from mcore_batching.megatron.recording import open_record
from mcore_batching.megatron.rollout_batch import RolloutBatch
from mcore_batching.megatron.schedule import MicroBatches, MicroBatchSchedule, Shard
from mcore_batching.megatron.topology import current_dims, model_chunks
from mcore_batching.megatron.validation import prepare_model
from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    ShardOutlook,
    fill_shard,
    shard_outlook,
    shard_packings,
    soonest_packing,
)

_Packed = list[tuple[list[int], list[list[list[int]]]]]
"""For every step, its local sample indices and the bins they may be packed into."""
_Filled = list[list[MicroBatches]]
"""For every step, what each of these packings comes to [steps][packings]."""


class DataIterator:
    """Walks through the micro-batches of a `MicroBatchSchedule`, one virtual pipeline stage's view.

    The names that frameworks read are kept: ``rollout_data``, ``micro_batch_indices``, ``offset``,
    ``get_next`` and ``reset``.
    """

    def __init__(self, schedule: MicroBatchSchedule) -> None:
        self.schedule = schedule
        self.offset = 0
        self._forward_only: MicroBatchSchedule | None = None

    @property
    def rollout_data(self) -> dict[str, list[Any]]:
        """Field name to one value a sample of this rank."""
        return self.schedule.rollout_data

    @property
    def micro_batch_indices(self) -> list[list[int]]:
        """Local sample indices of every micro-batch of every step; ``[]`` for a placeholder."""
        return [list(indices) for indices in self.schedule.micro_batches]

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch as lists of per-sample values.

        Args:
            keys: fields to return.

        Returns:
            for each key one value a sample, one fabricated value for a placeholder, None for a
            key that the rollout data lacks.

        Raises:
            IndexError: all micro-batches have been drawn; `reset` starts again.
        """
        micro_batches = self.schedule.micro_batches
        if self.offset >= len(micro_batches):
            raise IndexError(
                f"all {len(micro_batches)} micro-batches have been drawn; call reset() first"
            )
        present = [key for key in keys if key in self.schedule.template]
        values = self.schedule.samples(micro_batches[self.offset], present)
        self.offset += 1
        return {key: values.get(key) for key in keys}

    def for_forward_passes(self, args: Any, model: list[Any]) -> MicroBatchSchedule:
        """The schedule of forward passes alone: the same one, or one planned for them.

        A collective over all ranks where it has to be made, at the first call under
        ``--dynamic-batch-forward-only-plan own``.

        Args:
            args: Megatron's arguments.
            model: this rank's model chunks.
        """
        if getattr(args, "dynamic_batch_forward_only_plan", "shared") == "shared":
            return self.schedule
        if self._forward_only is None:
            data = self.rollout_data
            iterators, _ = plan_micro_batches(
                args,
                model,
                lambda: data,
                schema=self.schedule.schema,
                steps=[
                    sorted(i for indices in step for i in indices) for step in self.schedule.steps
                ],
                cost_model=self.schedule.cost_model,
                forward_only=True,
            )
            self._forward_only = iterators[0].schedule
        return self._forward_only

    def reset(self) -> DataIterator:
        """Start again from the first micro-batch."""
        self.offset = 0
        return self


def get_data_iterator(
    args: Any,
    model: list[Any],
    rollout_data: dict[str, list[Any]] | None,
    *,
    schema: Schema = DEFAULT_SCHEMA,
    steps: Sequence[Sequence[int]] | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[DataIterator], list[int]]:
    """Plan this rank's micro-batches together with all other ranks.

    A collective over all ranks. Each data-parallel rank packs its own samples, the counts are
    compared, and ranks with fewer micro-batches split theirs, then add placeholders.

    Args:
        args: Megatron's arguments: ``max_tokens_per_gpu``, ``global_batch_size`` and the
            ``dynamic_batch_*`` options. Where ``use_dynamic_batch_size`` is there and False,
            micro-batches hold ``micro_batch_size`` samples each, however long.
        model: this rank's model chunks.
        rollout_data: field name to one value a sample, for the samples of this data-parallel
            rank; ``tokens``, ``total_lengths`` and ``response_lengths`` are required. The ranks of
            a replica (pipeline, tensor, context) may all hold it, or only some: it is then sent
            to those that pass None. A data-parallel rank may have no samples (empty lists).
        schema: the kind of every field; extend it with `Schema.declare` for fields of your own.
        steps: local sample indices of every optimizer step. None: steps of ``global_batch_size``
            samples over all ranks, the last one short, each rank giving the share of its samples
            that falls into it (with equal shards: ``global_batch_size / data_parallel``
            consecutive ones). ``rollout_data["dynamic_global_batch_size"]`` overrides the
            argument.
        cost_model: what samples and micro-batches cost; None: the one in
            ``--dynamic-batch-cost-model``, or the default one.

    Returns:
        one iterator a virtual pipeline stage, and the number of micro-batches of each step, the
        same on every rank.

    Raises:
        DynamicBatchArgumentError: settings under which training would hang or be wrong.
        PlanningFailedError: on every rank, if any could not plan (a `SchemaError`, an
            `OversizeSampleError`, …).
        PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
    """
    if getattr(args, "dynamic_batch_exchange", False):
        raise DynamicBatchArgumentError(
            "--dynamic-batch-exchange moves samples to other ranks, and get_data_iterator leaves "
            "every sample where its rollout data is: unset --dynamic-batch-exchange here"
        )
    return plan_micro_batches(
        args, model, lambda: rollout_data, schema=schema, steps=steps, cost_model=cost_model
    )


def plan_micro_batches(
    args: Any,
    model: list[Any],
    read: Callable[[], dict[str, list[Any]] | None],
    *,
    schema: Schema = DEFAULT_SCHEMA,
    steps: Sequence[Sequence[int]] | None = None,
    cost_model: CostModel | None = None,
    forward_only: bool = False,
) -> tuple[list[DataIterator], list[int]]:
    """`get_data_iterator` for rollout data that is yet to be read.

    Under ``args.dynamic_batch_exchange`` the samples of all ranks form one step, which is planned
    as one, and samples move between data-parallel ranks.

    Args:
        args: as in `get_data_iterator`.
        model: this rank's model chunks.
        read: gives this rank's rollout data; what it raises is raised on every rank.
        schema: the kind of every field.
        steps: as in `get_data_iterator`.
        cost_model: as in `get_data_iterator`.
        forward_only: plan for forward passes alone.

    Returns:
        as `get_data_iterator`.

    Raises:
        CollectiveError: as `get_data_iterator`.
    """
    consensus = get_consensus(
        getattr(args, "dynamic_batch_rendezvous_timeout_seconds", DEFAULT_TIMEOUT_SECONDS)
    )
    dims, config, cost_model, batch, num_samples = _take_stock(
        args, model, read, consensus, schema, steps, cost_model
    )
    exchange = bool(getattr(args, "dynamic_batch_exchange", False))
    fill: Callable[[], tuple[MicroBatches, ...]]
    if exchange:
        batch, fill = plan_globally(
            batch, dims, config, cost_model, consensus, forward_only=forward_only
        )
    else:
        batch, fill = _plan_locally(
            args, batch, num_samples, dims, config, cost_model, consensus, forward_only
        )

    def says_filled(filled: tuple[MicroBatches, ...]) -> dict[str, Any]:
        return {
            "samples and plan (sha256)": _digest([batch.total_lengths, filled]),
            "shard": Shard(batch.total_lengths, filled) if consensus.speaks_for_replica else None,
        }

    filled, notes = consensus.guard(PlanningFailedError, fill, says_filled)
    digest = "samples and plan (sha256)"
    require_equal_within_replicas(notes, lambda note: {digest: note.value[digest]})
    shards = {n.data_parallel_rank: n.value["shard"] for n in notes if n.speaks_for_replica}
    schedule = MicroBatchSchedule(
        rollout_data=batch.data,
        schema=batch.schema,
        template=batch.template,
        steps=filled,
        dims=dims,
        config=config,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        pad_token_id=getattr(args, "pad_token_id", None) or 0,
        consensus=consensus,
        plan_digest=_digest([note.value[digest] for note in notes]),
        shards=tuple(shards[rank] for rank in sorted(shards)),
        scope="global" if exchange else "local",
        cost_model=cost_model,
    )
    counts = [len(step) for step in filled]
    return [DataIterator(schedule) for _ in range(dims.virtual_pipeline)], counts


def _plan_locally(
    args: Any,
    batch: RolloutBatch,
    num_samples: Mapping[int, int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    consensus: Consensus,
    forward_only: bool,
) -> tuple[RolloutBatch, Callable[[], tuple[MicroBatches, ...]]]:
    """What makes every step's micro-batches of this rank's own samples, as many as on all ranks."""

    def pack_all() -> tuple[RolloutBatch, _Packed]:
        final = batch if batch.template else batch.resolved()
        packed = []
        for indices in final.steps_of(num_samples):
            lengths = [final.total_lengths[i] for i in indices]
            packings = _packings(lengths, args, dims, config, cost_model, forward_only)
            packed.append((indices, packings))
        return final, packed

    def says_packed(result: tuple[RolloutBatch, _Packed]) -> dict[str, Any]:
        final, packed = result
        return {
            "counts": [[len(bins) for bins in packings] for _, packings in packed],
            "everywhere": {"number of steps": len(packed), **final.comparable()},
        }

    (final, packed), notes = consensus.guard(PlanningFailedError, pack_all, says_packed)
    require_equal(notes, lambda note: note.value["everywhere"])
    fewest = [note.value["counts"] for note in notes]

    def fill_all() -> _Filled:
        return [
            [
                _to_local(
                    indices,
                    final,
                    bins,
                    dims.round_up_num_microbatches(max(1, *(each[step][way] for each in fewest))),
                    dims,
                    config,
                    cost_model,
                    forward_only,
                )
                for way, bins in enumerate(packings)
            ]
            for step, (indices, packings) in enumerate(packed)
        ]

    def says_filled(filled: _Filled) -> list[list[ShardOutlook]]:
        return [
            [
                shard_outlook(
                    micro_batches,
                    final.total_lengths,
                    dims,
                    config,
                    cost_model,
                    forward_only=forward_only,
                )
                for micro_batches in ways
            ]
            for ways in filled
        ]

    filled, notes = consensus.guard(PlanningFailedError, fill_all, says_filled)

    def choose() -> tuple[MicroBatches, ...]:
        chosen = []
        for step, ways in enumerate(filled):
            outlooks = [[note.value[step][way] for note in notes] for way in range(len(ways))]
            chosen.append(ways[soonest_packing(outlooks, config)])
        return tuple(chosen)

    return final, choose


def add_fields(data_iterator: Sequence[DataIterator], fields: Mapping[str, Sequence[Any]]) -> None:
    """Give the samples further fields: what `forward_only` returned, advantages made of it.

    A collective over all ranks, so that a field that does not fit is an error on each. Ranks may
    add different fields, or none (``{}``): log-probs are made on the last pipeline stage and needed
    nowhere else. A field that is there already is replaced.

    Args:
        data_iterator: from `get_data_iterator`; the plan stays as it is.
        fields: field name to one value a sample of this rank, in the order of the rollout data.

    Raises:
        PlanningFailedError: on every rank, if a field does not fit on any (a `SchemaError`).
    """
    schedule = data_iterator[0].schedule
    consensus = schedule.consensus
    # What one rank's samples leave open (it may have none), another's may tell.
    own, notes = consensus.guard(
        PlanningFailedError, lambda: schedule.kinds_of(fields), lambda kinds: kinds
    )
    told = {name: field for note in notes for name, field in note.value.items()} | own
    extended, _ = consensus.guard(
        PlanningFailedError, lambda: schedule.with_fields(fields, told), lambda _: None
    )
    for iterator in data_iterator:
        iterator.schedule = extended
        iterator._forward_only = None


def _take_stock(
    args: Any,
    model: Any,
    read: Callable[[], dict[str, list[Any]] | None],
    consensus: Consensus,
    schema: Schema,
    steps: Sequence[Sequence[int]] | None,
    given_model: CostModel | None,
) -> tuple[ParallelDims, PlannerConfig, CostModel, RolloutBatch, dict[int, int]]:
    """Settings that all ranks share, this replica's data, and every replica's number of samples."""

    def take_stock() -> tuple[ParallelDims, PlannerConfig, CostModel, RolloutBatch | None]:
        chunks = model_chunks(model)
        dims, config = current_dims(chunks), planner_config(args)
        cost_model = given_model or planner_cost_model(args)
        prepare_model(chunks, dims, config)
        open_record(args)
        return dims, config, cost_model, RolloutBatch.read(read(), args, schema, steps)

    def says_stock(
        stock: tuple[ParallelDims, PlannerConfig, CostModel, RolloutBatch | None],
    ) -> dict[str, Any]:
        dims, config, cost_model, batch = stock
        settings = (dims, config, cost_model)
        return {
            "settings": {k: v for each in settings for k, v in dataclasses.asdict(each).items()},
            "batch": batch.summary() if batch is not None else None,
        }

    (dims, config, cost_model, given), notes = consensus.guard(
        PlanningFailedError, take_stock, says_stock
    )
    require_equal(notes, lambda note: note.value["settings"])
    batch: RolloutBatch = consensus.share_within_replica(
        given, [note.value["batch"] is not None for note in notes]
    )
    summaries = {
        note.data_parallel_rank: note.value["batch"]
        for note in notes
        if note.value["batch"] is not None
    }
    populated = [
        rank
        for rank, note in enumerate(notes)
        if note.value["batch"] is not None and note.value["batch"]["num_samples"]
    ]
    if populated and any(not summary["num_samples"] for summary in summaries.values()):
        # Ranks without samples learn from one with samples what a sample looks like.
        batch = batch.with_fields_of(consensus.share(batch.fields(), populated[0]))
    num_samples = {rank: summary["num_samples"] for rank, summary in summaries.items()}
    return dims, config, cost_model, batch, num_samples


def _packings(
    lengths: list[int],
    args: Any,
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    forward_only: bool,
) -> list[list[list[int]]]:
    """What one step's samples of this rank may be packed into, the same number of ways on every
    rank; without the flag ``micro_batch_size`` samples to each micro-batch."""
    if uses_dynamic_batch_size(args):
        return shard_packings(lengths, dims, config, cost_model, forward_only=forward_only)
    size = args.micro_batch_size
    return [
        [
            list(range(first, min(first + size, len(lengths))))
            for first in range(0, len(lengths), size)
        ]
    ]


def _to_local(
    indices: list[int],
    batch: RolloutBatch,
    bins: list[list[int]],
    count: int,
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    forward_only: bool,
) -> MicroBatches:
    """One step's micro-batches with indices into this rank's rollout data."""
    lengths = [batch.total_lengths[i] for i in indices]
    filled = fill_shard(bins, lengths, count, dims, config, cost_model, forward_only=forward_only)
    return tuple(tuple(indices[i] for i in micro_batch) for micro_batch in filled)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
