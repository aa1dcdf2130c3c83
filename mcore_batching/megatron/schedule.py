"""This rank's rollout data and the micro-batches that are made of it, step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state

from mcore_batching.batch import StepTotals, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import SampleWeights
from mcore_batching.batch.row_block import Layout, RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.megatron.consensus import JobConsensus
from mcore_batching.megatron.exchange import SampleMoves
from mcore_batching.megatron.serialize import digest_of
from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.prefix_trees import Forest, PrefixTree

MicroBatches = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Lengths in tokens, and fields of `MicroBatchSchedule`, of one data-parallel rank."""

    lengths: list[int]
    steps: tuple[MicroBatches, ...]
    trees: tuple[PrefixTree, ...] = ()


def joined_step(
    shards: Sequence[Shard], step: int
) -> tuple[tuple[MicroBatches, ...], list[int], tuple[PrefixTree, ...]]:
    """One step of all ranks as one plan counts it, samples rank after rank.

    Returns:
        micro-batches of each rank; total length of each sample; the trees that samples are in.
    """
    lengths: list[int] = []
    trees: list[PrefixTree] = []
    ranks = []
    for shard in shards:
        rows = shard.steps[step]
        # In the order of the rollout data, so that a plan of the same samples reads the same.
        held = sorted(i for micro_batch in rows for i in micro_batch)
        number = {local: len(lengths) + place for place, local in enumerate(held)}
        lengths += [shard.lengths[local] for local in held]
        ranks.append(tuple(tuple(number[i] for i in ids) for ids in rows))
        of_step = (tree for tree in shard.trees if tree.samples[0] in number)
        trees += [tree.renumbered(number) for tree in of_step]
    return tuple(ranks), lengths, tuple(trees)


@dataclasses.dataclass(frozen=True)
class GlobalPlan:
    """One step's plan of the samples of all data-parallel ranks."""

    plan: StepPlan  # its samples are places in `numbers`
    numbers: list[int]  # of each sample of the step, over all ranks and steps
    lengths: list[int]  # total length of each of them, in tokens

    def trees_among(self, place: Mapping[int, int]) -> list[PrefixTree]:
        """The trees that run on a rank, given the local index of each number there."""
        named = (tree.renumbered(self.numbers) for tree in self.plan.trees)
        return [tree.renumbered(place) for tree in named if tree.samples[0] in place]

    def rows_on(self, rank: int) -> MicroBatches:
        """A rank's micro-batches, as numbers of samples."""
        return tuple(tuple(self.numbers[i] for i in row) for row in self.plan.micro_batches[rank])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchSchedule:
    """This rank's rollout data and the micro-batches made of it.

    Attributes:
        rollout_data: fields of the samples of this rank.
        template: values of one sample, from a rank that has any: what a placeholder looks like.
        steps: for every optimizer step, its micro-batches: tuples of local sample indices, ``()``
            for a placeholder. All ranks have the same number of micro-batches in a step.
        forest: nodes that samples of a micro-batch share; None: samples share none.
        spare: further tokens that shared nodes end short, as of `find_forest`.
        trees: samples that were planned together; without an exchange.
        vocabulary_size: entries of the model's vocabulary; None: not known.
        plan_digest: of the plans of all data-parallel ranks together; the same on every rank.
        learnt: of which the cost model is a part, where costs are learnt; else None.
        samples_per_step: what a step counts as: the global batch size that cut the steps, or that
            came with steps of the caller's own; None: neither.
        moves: where exchanged samples came from and where they run.
        plans: of every step, of exchanged samples.
    """

    rollout_data: Columns
    template: dict[str, list[Any]]
    steps: tuple[MicroBatches, ...]
    dims: ParallelDims
    config: PlannerConfig
    pad_token_id: int
    vocabulary_size: int | None
    plan_digest: str
    consensus: JobConsensus
    cost_model: CostModel
    learnt: LearntCosts | None = None
    samples_per_step: int | None = None
    forest: Forest | None = None
    spare: int = 0
    trees: tuple[PrefixTree, ...] = ()
    moves: SampleMoves | None = None
    plans: tuple[GlobalPlan, ...] = ()

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shard of every data-parallel rank. A collective over all ranks the first time."""
        # For statistics and records: in training no rank waits for the others' plans.
        own = Shard(self.own_lengths, self.steps, self.trees)
        what = "gathering the plans of all ranks"
        with self.consensus.agreement(what) as agree:
            gathered = agree.gather("plans", own)
        return tuple(gathered.values)

    @property
    def own_lengths(self) -> list[int]:
        """Total length of each of this rank's samples, in tokens."""
        return self.rollout_data.total_lengths

    @property
    def num_samples(self) -> int:
        """Samples on this rank, over all steps."""
        return len(self.own_lengths)

    @property
    def num_microbatches(self) -> list[int]:
        """Micro-batches of every step."""
        return [len(step) for step in self.steps]

    @functools.cached_property
    def micro_batches(self) -> MicroBatches:
        """Local sample indices of the micro-batches of all steps, one behind the other."""
        return tuple(indices for step in self.steps for indices in step)

    def names_of(self, indices: Sequence[int]) -> str:
        """Samples of a micro-batch as whoever brought them counts them, for messages."""
        if self.moves is None:
            brought = {parallel_state.get_data_parallel_rank(): list(indices)}
        else:
            # Where they run they have other indices than in the data that they came in.
            brought = self.moves.origins(indices)
        named = (f"samples {given} of data-parallel rank {rank}" for rank, given in brought.items())
        return ", ".join(named) if indices else "a placeholder"

    def check_count(self, step: int, num_microbatches: Sequence[int]) -> None:
        """Refuse counts of another plan as the caller holds them (`ValueError`)."""
        # Counts of another batch: the caller has mixed up two rollouts.
        planned = self.num_microbatches
        try:
            given: Any = num_microbatches[step]
        except (TypeError, LookupError):
            given = f"nothing of it, it is {num_microbatches!r}"
        if given != planned[step]:
            raise ValueError(
                f"step {step} was planned with {planned[step]} micro-batches, num_microbatches "
                f"says {given}; pass on what get_data_iterator returned"
            )

    def step_plan(self, step: int) -> tuple[StepPlan, list[int]]:
        """One step's plan over all data-parallel ranks, and the lengths that it refers to.

        The same on every rank. A collective over all ranks the first time, whatever the step.

        Returns:
            the plan; total length of each sample of the step [samples], in tokens, rank after
            rank.
        """
        # Under an exchange every rank has planned all samples, and there is nothing to gather.
        if self.plans:
            return self.plans[step].plan, self.plans[step].lengths
        micro_batches, lengths, trees = joined_step(self.shards, step)
        plan = StepPlan(
            micro_batches=micro_batches,
            num_microbatches=len(self.steps[step]),
            sample_indices=tuple(range(len(lengths))),
            dims=self.dims,
            config=self.config,
            scope="local",
            cost_model=self.cost_model,
            trees=trees,
        )
        return plan, lengths

    def followed_by(self, later: MicroBatchSchedule) -> MicroBatchSchedule:
        """The steps of both, of exchanged samples, of which each holds its own."""
        assert self.moves is not None
        assert later.moves is not None
        held = self.num_samples
        steps = self.steps + tuple(
            tuple(tuple(held + i for i in indices) for indices in step) for step in later.steps
        )
        forest = None
        if self.forest is not None and later.forest is not None:
            forest = self.forest.joined(later.forest)
        plans = self.plans + later.plans
        return dataclasses.replace(
            self,
            rollout_data=Columns.joined([self.rollout_data, later.rollout_data]),
            steps=steps,
            forest=forest,
            plan_digest=digest_of([self.plan_digest, later.plan_digest]),
            moves=self.moves.followed_by(later.moves),
            plans=plans,
        )

    def samples(self, indices: Sequence[int], keys: Sequence[str]) -> dict[str, list[Any]]:
        """The values of some samples, or of one fabricated sample where ``indices`` is empty."""
        if not indices:
            return {key: self._placeholder[key] for key in keys}
        columns = {key: self.rollout_data[key] for key in keys}
        return {key: [values[i] for i in indices] for key, values in columns.items()}

    @functools.cached_property
    def _placeholder(self) -> Columns:
        names, pad_token_id = list(self.template), self.pad_token_id
        schema = self.rollout_data.schema
        made = make_placeholder(schema, names, self.template, pad_token_id=pad_token_id)
        return Columns.read(made, schema)

    def totals(
        self, step: int, depths: int, *, has_labels: bool = False
    ) -> tuple[StepTotals, list[float]]:
        """Totals of this rank's rows of a step, of those that no other data-parallel rank counts;
        their loss weights at each depth of multi-token prediction."""
        key = depths, has_labels
        if key not in self._sample_weights:
            made = SampleWeights(self.rollout_data, depths, has_labels=has_labels)
            self._sample_weights[key] = made
        counted = [
            sample
            for indices, size in zip(self.steps[step], self.row_sizes(step), strict=True)
            # All ranks of a shared row hold its samples; the first of them counts.
            if not self.has_sizes_of_rows or self._rank_in_row(size) == 0
            for sample in indices
        ]
        return self._sample_weights[key].totals(counted)

    @functools.cached_property
    def _sample_weights(self) -> dict[tuple[int, bool], SampleWeights]:
        return {}

    @functools.cached_property
    def made_rows(self) -> dict[Any, Any]:
        """Rows that are ready for the device, for another epoch over the same samples."""
        return {}

    def row_tokens(self, step: int) -> list[int]:
        """Tokens of this rank's slice of each row of a step, padding included."""
        rows = zip(self.steps[step], self.row_sizes(step), strict=True)
        return [self.nodes(indices, size).segments[-1] // size for indices, size in rows]

    def nodes(self, indices: Sequence[int], size: int) -> Nodes:
        """What a row of some samples, or of one fabricated sample, is made of on this many
        context-parallel ranks."""
        key = tuple(indices), size
        if key not in self._nodes:
            # Paddings depend on the context-parallel size, which here is the row's.
            dims = self.dims.for_rows_on(size)
            alignments = (
                sample_multiple_tokens(dims, self.config),
                row_multiple_tokens(dims, self.config),
            )
            of_row = (self.own_lengths, indices, self.forest) if indices else ([1], [0], None)
            self._nodes[key] = Nodes.of(*of_row, *alignments)
        return self._nodes[key]

    @functools.cached_property
    def _nodes(self) -> dict[tuple[tuple[int, ...], int], Nodes]:
        return {}

    @property
    def has_sizes_of_rows(self) -> bool:
        """True if every row has a context-parallel size of its own (dynamic CP)."""
        return self.config.max_context_parallel is not None

    def row_sizes(self, step: int) -> Sequence[int]:
        """Context-parallel size of each of a step's micro-batches on this rank."""
        if not self.has_sizes_of_rows:
            return [self.dims.context_parallel] * len(self.steps[step])
        planned = self.plans[step].plan.context_parallel
        assert planned is not None
        assert self.moves is not None
        return planned[self.moves.own]

    def _rank_in_row(self, size: int) -> int:
        if self.has_sizes_of_rows and self.moves is not None:
            # Ranks that share a row are a block of consecutive ones: the place in it is the slice.
            return self.moves.own % size
        rank: int = parallel_state.get_context_parallel_rank()
        return rank

    def rows(self, step: int, slots: Sequence[int], depths: int, *, has_labels: bool) -> RowBlock:
        """This rank's slices of some micro-batches, packed on the host, with as many depths of
        multi-token prediction; all of one context-parallel size, and placeholders or none."""
        indices, size = [self.steps[step][slot] for slot in slots], self.row_sizes(step)[slots[0]]
        is_placeholder = not indices[0]
        layout = Layout(
            context_parallel_size=size,
            context_parallel_rank=self._rank_in_row(size),
            pad_token_id=self.pad_token_id,
            depths=depths,
            has_labels=has_labels,
        )
        return RowBlock(
            self._placeholder if is_placeholder else self.rollout_data,
            [[0]] * len(slots) if is_placeholder else indices,
            [self.nodes(row, size) for row in indices],
            layout,
            sample_indices=indices,
            is_placeholder=is_placeholder,
        )
