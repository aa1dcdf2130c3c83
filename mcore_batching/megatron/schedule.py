"""This rank's samples and the micro-batches that are made of them, step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch import StepTotals, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.megatron.exchange import SampleMoves, digest_of
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.samples import Samples
from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    StepPlan,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.forest import Forest
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.worker import PlanTicket

MicroBatches = tuple[tuple[int, ...], ...]
_BLOCK_TOKENS = 65_536
"""Tokens of rows that are packed at once. Operations on fewer take less time than their
launches."""


@dataclasses.dataclass(kw_only=True, eq=False)
class MicroBatchSchedule:
    """This rank's samples and the micro-batches made of them, shared by the iterators of a call.

    Steps are added as they are planned; all else is fixed but for fields that are added.

    Attributes:
        samples: of all ranks, by number.
        moves: where samples came from and where they run, in the steps planned so far.
        parts: fields of the samples that run on this rank, one part for each time that samples
            came, or one of all.
        template: values of one sample, from a rank that has any: what a placeholder looks like.
        steps: for every optimizer step, its micro-batches: tuples of local sample indices, ``()``
            for a placeholder. All ranks have the same number of micro-batches in a step.
        plans: of every step, over all ranks; their samples are places in `Samples.steps`.
        plan_digest: of the plans of all data-parallel ranks together; the same on every rank.
        forest: nodes that samples of a micro-batch share; None: samples share none.
        tickets: on the planning rank, of the plans that were begun for steps.
        for_forward_passes: the same batch as planned for forward passes alone, once it has been.
    """

    samples: Samples
    moves: SampleMoves
    parts: list[Columns]
    template: dict[str, list[Any]]
    steps: tuple[MicroBatches, ...] = ()
    plans: tuple[StepPlan, ...] = ()
    plan_digest: str = ""
    forest: Forest | None = None
    tickets: dict[int, PlanTicket] = dataclasses.field(default_factory=dict)
    for_forward_passes: MicroBatchSchedule | None = None
    # For further epochs over the same samples, by step, depths and origin of the labels.
    made_totals: dict[Any, tuple[StepTotals, list[float]]] = dataclasses.field(default_factory=dict)
    made_rows: dict[Any, RowBlock] = dataclasses.field(default_factory=dict)
    _nodes: dict[Any, Nodes] = dataclasses.field(default_factory=dict)
    _multiples: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own_lengths = [length for part in self.parts for length in part.total_lengths]
        """Total length of each of this rank's samples, in tokens."""
        self._add_up_masks()

    def _add_up_masks(self) -> None:
        """Add up the loss masks that came last: steps need the sums while the device idles."""
        if self.parts[-1].total_lengths:
            self.parts[-1].weight_sums()

    @property
    def rollout_data(self) -> Columns:
        """Fields of all samples that run on this rank so far."""
        if len(self.parts) > 1:
            self.parts = [Columns.joined(self.parts)]
        return self.parts[0]

    def _part_of(self, samples: Sequence[int]) -> tuple[Columns, list[int]]:
        """The part that has samples of one step, and their places in it."""
        first, part = 0, self.parts[0]
        for part in self.parts:
            if not samples or samples[0] < first + len(part.total_lengths):
                break
            first += len(part.total_lengths)
        return part, [sample - first for sample in samples]

    @property
    def settings(self) -> PlanInputs:
        """The planner's arguments beside the lengths."""
        return self.samples.settings

    @property
    def dims(self) -> ParallelDims:
        """The parallel dims that the rows are padded for."""
        return self.settings.dims

    @property
    def config(self) -> PlannerConfig:
        """The planner's settings."""
        return self.settings.config

    @property
    def pad_token_id(self) -> Any:
        """The id of padding."""
        return self.samples.job.options.checked_pad_token_id()

    @property
    def num_steps(self) -> int:
        """All steps of the batch, whether planned or not."""
        return len(self.samples.steps)

    @property
    def is_planned(self) -> bool:
        """True if all steps are."""
        return len(self.steps) == self.num_steps

    @property
    def num_microbatches(self) -> list[int]:
        """Micro-batches of every step."""
        return [len(step) for step in self.steps]

    @property
    def micro_batches(self) -> MicroBatches:
        """Local sample indices of the micro-batches of all steps, one behind the other."""
        return tuple(indices for step in self.steps for indices in step)

    def names_of(self, indices: Sequence[int]) -> str:
        """Samples of a micro-batch, for messages: numbered as on the rank that brought them."""
        # Where they run they have other indices than in the data that they came in.
        brought = self.moves.origins(indices)
        named = (f"samples {given} of data-parallel rank {rank}" for rank, given in brought.items())
        return ", ".join(named) if indices else "a placeholder"

    def check_step(self, step: Any, num_microbatches: Sequence[int]) -> None:
        """Refuse a step that there is not (`IndexError`), or counts of another plan as the caller
        holds them (`ValueError`)."""
        number = as_integer(step)
        if number is None or number not in range(self.num_steps):
            raise IndexError(
                f"step must be 0 to {self.num_steps - 1}, got {step!r}; this batch has "
                f"{self.num_steps} steps"
            )
        # Counts of another batch: the caller has mixed up two rollouts.
        planned = self.num_microbatches[number]
        try:
            given: Any = num_microbatches[number]
        except (TypeError, LookupError):
            given = f"nothing of it, it is {num_microbatches!r}"
        if given != planned:
            raise ValueError(
                f"step {step} was planned with {planned} micro-batches, num_microbatches says "
                f"{given}; pass on what get_data_iterator returned"
            )

    def step_plan(self, step: int) -> tuple[StepPlan, list[int]]:
        """One step's plan over all data-parallel ranks, the same on every rank, and the lengths
        that it refers to.

        Returns:
            the plan; total length of each sample of the step [samples], in tokens, rank after
            rank.
        """
        return self.plans[step], self.samples.step_lengths(step)

    def add_plan(self, plan: StepPlan) -> None:
        """Go on with the next step, whose samples are here."""
        numbers, place = self.samples.steps[len(self.steps)], self.moves.places
        rows = plan.micro_batches[self.moves.own]
        self.steps += (tuple(tuple(place[numbers[i]] for i in row) for row in rows),)
        self.plans += (plan,)
        self.plan_digest = digest_of([self.plan_digest, plan.digest()])

    def add_samples(self, moves: SampleMoves, rollout_data: Columns, forest: Forest | None) -> None:
        """Go on with samples that moved here, and nodes that these share."""
        self.moves = self.moves.followed_by(moves)
        self.parts.append(rollout_data)
        self.own_lengths += rollout_data.total_lengths
        self._add_up_masks()
        if forest is not None:
            self.forest = forest if self.forest is None else self.forest.joined(forest)

    def replace_fields(self, rollout_data: Columns, template: dict[str, list[Any]]) -> None:
        """Go on with other fields of the same samples."""
        self.parts, self.template = [rollout_data], template
        self._add_up_masks()
        self.made_totals.clear()
        self.made_rows.clear()
        vars(self).pop("_placeholder", None)
        # It has the fields as they were.
        self.for_forward_passes = None

    def values(self, indices: Sequence[int], keys: Sequence[str]) -> dict[str, list[Any]]:
        """The values of some samples, or of one fabricated sample where ``indices`` is empty."""
        if not indices:
            return {key: self._placeholder[key] for key in keys}
        columns = {key: self.rollout_data[key] for key in keys}
        return {key: [values[i] for i in indices] for key, values in columns.items()}

    @functools.cached_property
    def _placeholder(self) -> Columns:
        names, pad_token_id = list(self.template), self.pad_token_id
        schema = self.parts[0].schema
        made = make_placeholder(schema, names, self.template, pad_token_id=pad_token_id)
        return Columns.read(made, schema)

    def totals(
        self, step: int, depths: int, *, has_labels: bool = False
    ) -> tuple[StepTotals, list[float]]:
        """Totals of this rank's rows of a step, of those that no other data-parallel rank counts;
        their loss weights at each depth of multi-token prediction."""
        key = step, depths, has_labels
        if key in self.made_totals:
            return self.made_totals[key]
        # All ranks of a shared row hold its samples; the first of them counts.
        own = self.moves.own if self.has_sizes_of_rows else 0
        counted = [
            sample
            for indices, size in zip(self.steps[step], self.row_sizes(step), strict=True)
            if own % size == 0
            for sample in indices
        ]
        # In the order of the columns nothing is copied where the step is all of them.
        part, places = self._part_of(sorted(counted))
        made = step_totals(part.taken(places), depths, has_labels=has_labels)
        self.made_totals[key] = made
        return made

    def slots_at_once(self, step: int) -> list[list[int]]:
        """Slots of a step's rows that are packed at once, of one context-parallel size each, and
        placeholders or none."""
        blocks: list[list[int]] = []
        kind, tokens = None, 0
        rows = zip(self.steps[step], self.row_sizes(step), strict=True)
        for slot, (samples, size) in enumerate(rows):
            of_row = sum([self.own_lengths[i] for i in samples])
            # The device waits for the first row.
            if slot < 2 or (size, bool(samples)) != kind or tokens + of_row > _BLOCK_TOKENS:
                blocks.append([])
                kind, tokens = (size, bool(samples)), 0
            blocks[-1].append(slot)
            tokens += of_row
        return blocks

    def row_tokens(self, step: int) -> list[int]:
        """Tokens of this rank's slice of each row of a step, padding included."""
        rows = zip(self.steps[step], self.row_sizes(step), strict=True)
        return [self.nodes(indices, size).segments[-1] // size for indices, size in rows]

    def nodes(self, indices: Sequence[int], size: int) -> Nodes:
        """Nodes of a row of some samples, or of one fabricated sample, on this many
        context-parallel ranks."""
        key = tuple(indices), size
        if key not in self._nodes:
            of_row = (self.own_lengths, indices, self.forest) if indices else ([1], [0], None)
            self._nodes[key] = Nodes.of(*of_row, *self._alignments(size))
        return self._nodes[key]

    def _alignments(self, size: int) -> tuple[int, int]:
        """Multiples to which samples and rows on this many context-parallel ranks are padded."""
        if size not in self._multiples:
            is_usual = size == self.dims.context_parallel
            given = self.dims if is_usual else self.dims.for_rows_on(size), self.config
            self._multiples[size] = sample_multiple_tokens(*given), row_multiple_tokens(*given)
        return self._multiples[size]

    @property
    def has_sizes_of_rows(self) -> bool:
        """True if every row has a context-parallel size of its own (dynamic CP)."""
        return self.config.max_context_parallel is not None

    def row_sizes(self, step: int) -> Sequence[int]:
        """Context-parallel size of each of a step's micro-batches on this rank."""
        if not self.has_sizes_of_rows:
            return [self.dims.context_parallel] * len(self.steps[step])
        planned = self.plans[step].context_parallel
        assert planned is not None
        return planned[self.moves.own]

    def rows_alone(self, step: int) -> list[tuple[int, ...]]:
        """Lengths of the sequences of each of this rank's rows; () where ranks share the row, or
        samples tokens: what such a row costs is not a matter of lengths."""
        found = list[tuple[int, ...]]()
        for indices, size in zip(self.steps[step], self.row_sizes(step), strict=True):
            is_cut = self.has_sizes_of_rows and size > 1
            has_more = is_cut or self.nodes(indices, size).is_shared
            found.append(() if has_more else tuple(self.own_lengths[i] for i in indices))
        return found

    def block(self, step: int, slots: Sequence[int], depths: int, *, has_labels: bool) -> RowBlock:
        """This rank's slices of some micro-batches, one of `slots_at_once`, with as many depths of
        multi-token prediction; kept for further epochs as long as the schedule is.

        On the last pipeline stage rows take some 30 bytes a token on the host, pinned where there
        is a GPU, on the others 16, beside the samples' own columns (14 bytes a token of samples
        that are half response, with loss masks, advantages and log-probs) and what a loss reads of
        these.
        """
        key = step, slots[0], depths, has_labels
        if key in self.made_rows:
            return self.made_rows[key]
        indices, size = [self.steps[step][slot] for slot in slots], self.row_sizes(step)[slots[0]]
        if indices[0]:
            columns, places = self._part_of([sample for row in indices for sample in row])
        else:
            columns, places = self._placeholder, [0] * len(slots)
        # Ranks that share a row are a block of consecutive ones: the place in it is the slice.
        has_own = self.has_sizes_of_rows
        rank = self.moves.own % size if has_own else parallel_state.get_context_parallel_rank()
        made = RowBlock(
            fields=columns.taken(places),
            nodes=[self.nodes(row, size) for row in indices],
            sample_indices=indices,
            context_parallel_size=size,
            context_parallel_rank=rank,
            pad_token_id=self.pad_token_id,
            depths=depths,
            has_labels=has_labels,
            device=torch.device(torch.cuda.current_device()),
        )
        self.made_rows[key] = made
        return made
