"""The micro-batches of this rank, step by step, and their collation.

A `MicroBatchSchedule` joins one rank's rollout data with its share of the plan. Its iterators, one a
virtual pipeline stage, walk through the same micro-batches; `prepare` collates a whole optimizer
step before the pipeline starts, so that whatever is wrong with the data shows while every rank
can still be told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from mcore_batching.batch import (
    Field,
    PackedMicroBatch,
    Schema,
    SchemaError,
    StepTotals,
    make_placeholder,
    owned_num_tokens,
    pack,
    step_totals,
)
from mcore_batching.megatron.consensus import Consensus, Note, require_equal
from mcore_batching.megatron.errors import CollationFailedError, PlanMismatchError
from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    row_multiple_tokens,
    sample_multiple_tokens,
)

MicroBatches = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one data-parallel rank runs: lengths alone, for statistics and records.

    Attributes:
        lengths: total length of each of its samples, in tokens.
        steps: as `RolloutSchedule.steps`.
    """

    lengths: list[int]
    steps: tuple[MicroBatches, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchSchedule:
    """One rank's rollout data and the micro-batches made of it.

    Attributes:
        rollout_data: field name to one value a sample of this rank.
        schema: the kind of every field.
        template: values of one sample, from whichever rank has any: what a placeholder looks like.
        steps: for every optimizer step, its micro-batches: tuples of local sample indices, ``()``
            for a placeholder. All ranks have the same number of micro-batches in a step.
        dims: the job's layout.
        config: the planner's settings.
        context_parallel_rank: which slice of every row this rank holds.
        pad_token_id: token that fills padding and placeholders.
        rendezvous: where ranks compare notes.
        plan_digest: of the plans of all data-parallel ranks together; the same on every rank.
        shards: of every data-parallel rank.
        scope: "local" if every sample stayed on its rank, "global" if they were exchanged.
        cost_model: what the plan was made by.
    """

    rollout_data: dict[str, list[Any]]
    schema: Schema
    template: dict[str, list[Any]]
    steps: tuple[MicroBatches, ...]
    dims: ParallelDims
    config: PlannerConfig
    context_parallel_rank: int
    pad_token_id: int
    consensus: Consensus
    plan_digest: str
    shards: tuple[Shard, ...]
    scope: Literal["global", "local"]
    cost_model: CostModel

    @property
    def num_samples(self) -> int:
        """Samples on this rank, over all steps."""
        return len(self.rollout_data["total_lengths"])

    @property
    def num_microbatches(self) -> list[int]:
        """Micro-batches of every step."""
        return [len(step) for step in self.steps]

    @functools.cached_property
    def micro_batches(self) -> MicroBatches:
        """Local sample indices of the micro-batches of all steps, one behind the other."""
        return tuple(indices for step in self.steps for indices in step)

    def step_plan(self, step: int) -> tuple[StepPlan, list[int]]:
        """One step's plan over all data-parallel ranks, and the lengths that it refers to.

        The same on every rank, without a collective.

        Args:
            step: which optimizer step.

        Returns:
            the plan; total length of each sample of the step [samples], in tokens, rank after
            rank.
        """
        lengths: list[int] = []
        ranks = []
        for shard in self.shards:
            held = sorted(i for micro_batch in shard.steps[step] for i in micro_batch)
            number = {local: len(lengths) + place for place, local in enumerate(held)}
            lengths += [shard.lengths[local] for local in held]
            ranks.append(tuple(tuple(number[i] for i in ids) for ids in shard.steps[step]))
        plan = StepPlan(
            micro_batches=tuple(ranks),
            num_microbatches=len(self.steps[step]),
            sample_indices=tuple(range(len(lengths))),
            dims=self.dims,
            config=self.config,
            scope=self.scope,
            cost_model=self.cost_model,
        )
        return plan, lengths

    def prepare(self, step: int, num_microbatches: int) -> PreparedStep:
        """Collate all micro-batches of a step, and hear from every rank that it could, too.

        A collective over all ranks.

        Args:
            step: which optimizer step.
            num_microbatches: how many the schedule is about to run.

        Raises:
            CollationFailedError: on every rank, if collating failed on any.
            PlanMismatchError: on every rank, if they are not about to run the same step.
        """

        def collate() -> list[PreparedRow]:
            planned = self.num_microbatches[step]
            if num_microbatches != planned:
                raise ValueError(
                    f"step {step} was planned with {planned} micro-batches, and num_microbatches "
                    f"says {num_microbatches}: pass on what get_data_iterator returned, with the "
                    "iterators that it returned"
                )
            rows = [self._collate(indices) for indices in self.steps[step]]
            return [PreparedRow(row, owned_num_tokens(row)) for row in rows]

        def says(rows: list[PreparedRow]) -> dict[str, Any]:
            return {
                "compared": {
                    "plan (sha256)": self.plan_digest,
                    "step": step,
                    "number of micro-batches": len(rows),
                },
                "totals": step_totals(prepared.row for prepared in rows),
            }

        rows, notes = self.consensus.guard(CollationFailedError, collate, says)
        require_equal(notes, lambda note: note.value["compared"])
        return PreparedStep(step=step, rows=rows, totals=_sum_over_replicas(notes))

    def kinds_of(self, fields: Mapping[str, Sequence[Any]]) -> dict[str, Field]:
        """Declarations of undeclared fields, as far as this rank's samples tell."""
        kinds = {}
        for name, values in fields.items():
            if name not in self.schema:
                with contextlib.suppress(SchemaError):
                    kinds[name] = self.schema.resolve(self.rollout_data | {name: values})[name]
        return kinds

    def with_fields(
        self, fields: Mapping[str, Sequence[Any]], kinds: Mapping[str, Field]
    ) -> MicroBatchSchedule:
        """Itself with further fields, or with other values of those it has.

        Args:
            fields: field name to one value a sample.
            kinds: declarations of fields that the schema does not declare.

        Raises:
            SchemaError: a field's kind is unknown, or its values do not fit the samples.
        """
        data = self.rollout_data | {name: list(values) for name, values in fields.items()}
        schema = self.schema
        for name in fields:
            if name in kinds and name not in schema:
                field = kinds[name]
                schema = schema.declare(name, field.kind, length_offset=field.length_offset)
        schema = schema.resolve(data)
        schema.validate(data)
        examples = {name: values or self.template.get(name) for name, values in data.items()}
        template = make_placeholder(schema, list(data), examples)
        return dataclasses.replace(self, rollout_data=data, schema=schema, template=template)

    def samples(self, indices: Sequence[int], keys: Sequence[str]) -> dict[str, list[Any]]:
        """The values of some samples, or of one fabricated sample where ``indices`` is empty."""
        if not indices:
            return make_placeholder(
                self.schema, keys, self.template, pad_token_id=self.pad_token_id
            )
        return {key: [self.rollout_data[key][i] for i in indices] for key in keys}

    def _collate(self, indices: tuple[int, ...]) -> PackedMicroBatch:
        return pack(
            self.samples(indices, list(self.template)),
            schema=self.schema,
            sample_alignment_tokens=sample_multiple_tokens(self.dims, self.config),
            row_alignment_tokens=row_multiple_tokens(self.dims, self.config),
            context_parallel_size=self.dims.context_parallel,
            context_parallel_rank=self.context_parallel_rank,
            pad_token_id=self.pad_token_id,
            sample_indices=indices,
            is_placeholder=not indices,
        )


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A packed micro-batch and what is known of it before it is on the device.

    Attributes:
        row: the micro-batch.
        owned_num_tokens: trainable tokens that this context-parallel rank predicts.
    """

    row: PackedMicroBatch
    owned_num_tokens: int


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The collated micro-batches of a step, and what the step's denominators add up to.

    Attributes:
        step: which optimizer step.
        rows: packed micro-batches of this rank, in slot order, on the host.
        totals: over all samples of the step on all ranks.
    """

    step: int
    rows: list[PreparedRow]
    totals: StepTotals

    def iterators(self, count: int) -> list[Iterator[PreparedRow]]:
        """One iterator a virtual pipeline stage over the rows, moved to the device as drawn.

        Each stage draws every row; the copy on the device is made once and dropped when the last
        stage has drawn it.
        """
        on_device: dict[int, tuple[PreparedRow, int]] = {}

        def draw() -> Iterator[PreparedRow]:
            for slot, prepared in enumerate(self.rows):
                moved, drawn = on_device.pop(slot, (None, 0))
                if moved is None:
                    device = torch.device(torch.cuda.current_device())
                    row = prepared.row.to(device, non_blocking=True)
                    moved = dataclasses.replace(prepared, row=row)
                if drawn + 1 < count:
                    on_device[slot] = (moved, drawn + 1)
                yield moved

        return [draw() for _ in range(count)]


def _sum_over_replicas(notes: Sequence[Note]) -> StepTotals:
    """Totals over the job from every rank's own, each sample counted once.

    Raises:
        PlanMismatchError: ranks of one replica hold different samples.
    """
    totals = StepTotals()
    spoken: dict[int, tuple[int, StepTotals]] = {}
    for rank, note in enumerate(notes):
        mine = note.value["totals"]
        first, said = spoken.setdefault(note.data_parallel_rank, (rank, mine))
        # The weight is a sum of floats, which another device adds up in another order.
        if dataclasses.replace(said, token_weight=0.0) != dataclasses.replace(
            mine, token_weight=0.0
        ):
            raise PlanMismatchError(
                {rank: f"its samples add up to {mine}, on rank {first} they are {said}"}
            )
        if note.speaks_for_replica:
            totals = totals + mine
    return totals
