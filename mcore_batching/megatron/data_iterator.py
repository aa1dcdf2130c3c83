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
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from mcore_batching.batch import DEFAULT_SCHEMA, Schema, make_placeholder
from mcore_batching.megatron import compat
from mcore_batching.megatron.arguments import (
    DynamicBatchArgumentError,
    check_model_config,
    planner_config,
)
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.rendezvous import (
    DEFAULT_TIMEOUT_SECONDS,
    get_rendezvous,
    require_equal,
    require_equal_within_replicas,
)
from mcore_batching.megatron.schedule import MicroBatches, RolloutSchedule
from mcore_batching.megatron.topology import current_layout
from mcore_batching.planning import (
    CostModel,
    Layout,
    PlannerConfig,
    fill_shard,
    pack_shard,
)

_Packed = list[tuple[list[int], list[list[int]]]]
"""For every step, its local sample indices and the bins they were packed into."""

REQUIRED_FIELDS = ("tokens", "total_lengths", "response_lengths")


class DataIterator:
    """Walks through the micro-batches of a `RolloutSchedule`, one virtual pipeline stage's view.

    The names that frameworks read are kept: ``rollout_data``, ``micro_batch_indices``, ``offset``,
    ``get_next`` and ``reset``.
    """

    def __init__(self, schedule: RolloutSchedule) -> None:
        self.schedule = schedule
        self.offset = 0

    @property
    def rollout_data(self) -> dict[str, list[Any]]:
        """Field name to one value a sample of this rank."""
        return self.schedule.rollout_data

    @property
    def micro_batch_indices(self) -> list[list[int]]:
        """Local sample indices of every micro-batch of every step; ``[]`` for a placeholder."""
        return [list(indices) for step in self.schedule.steps for indices in step]

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
        micro_batches = self.micro_batch_indices
        if self.offset >= len(micro_batches):
            raise IndexError(
                f"all {len(micro_batches)} micro-batches have been drawn; call reset() first"
            )
        present = [key for key in keys if key in self.schedule.template]
        values = self.schedule.samples(micro_batches[self.offset], present)
        self.offset += 1
        return {key: values.get(key) for key in keys}

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
            ``dynamic_batch_*`` options.
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
        cost_model: what a sample costs, for splitting and ordering.

    Returns:
        one iterator a virtual pipeline stage, and the number of micro-batches of each step, the
        same on every rank.

    Raises:
        DynamicBatchArgumentError: settings under which training would hang or be wrong.
        PlanningFailedError: on every rank, if any could not plan (a `SchemaError`, an
            `OversizeSampleError`, …).
        PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
    """
    layout = current_layout(model)
    rendezvous = get_rendezvous(
        getattr(args, "dynamic_batch_rendezvous_timeout_seconds", DEFAULT_TIMEOUT_SECONDS)
    )
    cost_model = cost_model or CostModel()

    def take_stock() -> tuple[PlannerConfig, _Batch | None]:
        config = planner_config(args)
        prepare_model(model, layout, config)
        return config, _Batch.read(rollout_data, args, schema, steps)

    def says_stock(stock: tuple[PlannerConfig, _Batch | None]) -> dict[str, Any]:
        config, batch = stock
        return {
            "settings": dataclasses.asdict(config) | dataclasses.asdict(cost_model),
            "batch": batch.summary() if batch is not None else None,
        }

    (config, batch), notes = rendezvous.guard(PlanningFailedError, take_stock, says_stock)
    require_equal(notes, lambda note: note.value["settings"])
    batch = rendezvous.share_within_replica(
        batch, [note.value["batch"] is not None for note in notes]
    )
    assert batch is not None  # share_within_replica raises where nobody has it
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
        batch = batch.with_fields_of(rendezvous.share(batch.fields(), populated[0]))
    num_samples = {rank: summary["num_samples"] for rank, summary in summaries.items()}

    def pack_all() -> tuple[_Batch, _Packed]:
        final = batch if batch.template else batch.resolved()
        packed = []
        for indices in final.steps_of(num_samples):
            lengths = [final.total_lengths[i] for i in indices]
            packed.append((indices, pack_shard(lengths, layout, config)))
        return final, packed

    def says_packed(result: tuple[_Batch, _Packed]) -> dict[str, Any]:
        final, packed = result
        return {
            "counts": [len(bins) for _, bins in packed],
            "everywhere": {"number of steps": len(packed), "field names": sorted(final.template)},
            "replica": {"samples and plan (sha256)": _digest([final.total_lengths, packed])},
        }

    (batch, packed), notes = rendezvous.guard(PlanningFailedError, pack_all, says_packed)
    require_equal(notes, lambda note: note.value["everywhere"])
    require_equal_within_replicas(notes, lambda note: note.value["replica"])
    counts = [
        layout.round_up_num_microbatches(max(1, *(note.value["counts"][step] for note in notes)))
        for step in range(len(packed))
    ]
    schedule = RolloutSchedule(
        rollout_data=batch.data,
        schema=batch.schema,
        template=batch.template,
        steps=tuple(
            _to_local(indices, batch, bins, count, layout, config, cost_model)
            for (indices, bins), count in zip(packed, counts, strict=True)
        ),
        layout=layout,
        config=config,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        pad_token_id=getattr(args, "pad_token_id", None) or 0,
        rendezvous=rendezvous,
        plan_digest=_digest([[note.value["replica"] for note in notes], counts]),
    )
    return [DataIterator(schedule) for _ in range(layout.virtual_pipeline)], counts


def prepare_model(model: list[Any], layout: Layout, config: PlannerConfig) -> None:
    """Check that the model can run packed rows of varying length, and let its schedule do so.

    Sets ``variable_seq_lengths`` on the model's configuration: ``megatron.training`` forces it
    off, and with pipeline stages the schedule would otherwise wait for rows of ``seq_length``.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    model_config = get_model_config(model[0])
    check_model_config(model_config, layout, config)
    for chunk in model:
        for name, module in chunk.named_modules():
            if type(module) is DotProductAttention:
                raise DynamicBatchArgumentError(
                    f"{name} is Megatron's local DotProductAttention, which cannot keep packed "
                    "samples apart: build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config), or with Transformer "
                    "Engine's layer spec"
                )
    if getattr(model_config, "moe_router_enable_expert_bias", False):
        compat.mend_expert_bias_mask()
    model_config.variable_seq_lengths = True


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The rollout data of one replica, read and checked.

    Attributes:
        data: field name to one value a sample.
        schema: the kind of every field.
        template: one fabricated sample, empty if this rank has no samples to copy it from.
        total_lengths: tokens of every sample.
        global_batch_size: samples of a step over all ranks, None for all.
        steps: the caller's own local sample indices of every step, if given.
    """

    data: dict[str, list[Any]]
    schema: Schema
    template: dict[str, list[Any]]
    total_lengths: list[int]
    global_batch_size: int | None
    steps: Sequence[Sequence[int]] | None

    @classmethod
    def read(
        cls,
        rollout_data: dict[str, list[Any]] | None,
        args: Any,
        schema: Schema,
        steps: Sequence[Sequence[int]] | None,
    ) -> _Batch | None:
        if rollout_data is None:
            return None
        global_batch_size = rollout_data.get(
            "dynamic_global_batch_size", getattr(args, "global_batch_size", None)
        )
        data = {
            key: value
            for key, value in rollout_data.items()
            if value is not None and key != "dynamic_global_batch_size"
        }
        missing = [key for key in REQUIRED_FIELDS if key not in data]
        if missing:
            raise KeyError(
                f"rollout_data lacks {', '.join(missing)}; it needs {', '.join(REQUIRED_FIELDS)}, "
                "one value a sample (empty lists on a rank without samples)"
            )
        lengths = [int(length) for length in data["total_lengths"]]
        if steps is not None:
            _require_cover(steps, len(lengths))
        batch = cls(data, schema, {}, lengths, global_batch_size, steps)
        return batch.resolved() if lengths else batch

    def resolved(self) -> _Batch:
        """Itself with the kind of every field known, its values checked, and a template."""
        schema = self.schema.resolve(self.data)
        schema.validate(self.data)
        template = make_placeholder(schema, list(self.data), self.data)
        return dataclasses.replace(self, schema=schema, template=template)

    def summary(self) -> dict[str, Any]:
        return {"num_samples": len(self.total_lengths)}

    def fields(self) -> tuple[Schema, dict[str, list[Any]]]:
        return self.schema, self.template

    def with_fields_of(self, fields: tuple[Schema, dict[str, list[Any]]]) -> _Batch:
        """Itself if it has samples, else with the fields of a rank that has."""
        if self.total_lengths:
            return self
        schema, template = fields
        return dataclasses.replace(
            self, schema=schema, template=template, data={key: [] for key in template}
        )

    def steps_of(self, num_samples: dict[int, int]) -> list[list[int]]:
        """Local sample indices of every step.

        Args:
            num_samples: of every data-parallel rank.
        """
        if self.steps is not None:
            return [list(step) for step in self.steps]
        mine, total = len(self.total_lengths), sum(num_samples.values())
        size = self.global_batch_size or max(total, 1)
        # The first k samples of the whole batch are the first k/total of every rank's.
        ends = [mine * min(end, total) // total for end in range(size, total + size, size) if total]
        ends = ends or [0]  # a step of placeholders alone
        starts = [0, *ends[:-1]]
        return [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]


def _require_cover(steps: Iterable[Iterable[int]], num_samples: int) -> None:
    given = sorted(index for step in steps for index in step)
    if given != list(range(num_samples)):
        raise ValueError(
            f"steps must hold each of this rank's {num_samples} samples exactly once, got indices "
            f"{given}"
        )


def _to_local(
    indices: list[int],
    batch: _Batch,
    bins: list[list[int]],
    count: int,
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel,
) -> MicroBatches:
    """One step's micro-batches with indices into this rank's rollout data."""
    lengths = [batch.total_lengths[i] for i in indices]
    filled = fill_shard(bins, lengths, count, layout, config, cost_model)
    return tuple(tuple(indices[i] for i in micro_batch) for micro_batch in filled)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
