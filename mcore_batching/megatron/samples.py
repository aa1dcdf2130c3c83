"""`Samples`: settings and samples of one call, read on every rank and known to all.

All ranks read, compare their settings and gather the lengths in one agreement. Two more follow only
where they are needed: ranks of a replica without data receive it, and ranks without samples receive
the fields. Samples of all data-parallel ranks are numbered through, rank after rank:

    rank 0 brings samples 0 1 2, rank 1 brings 3 4        first [0, 3, 5]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megatron.core import parallel_state

from mcore_batching.batch import Schema
from mcore_batching.batch.consensus import Agreement, Gathered, Reduction
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.beginnings import Beginnings, find_beginnings
from mcore_batching.megatron.checks.layers import check_shared_prefixes
from mcore_batching.megatron.checks.settings import prepare_model
from mcore_batching.megatron.consensus import JobConsensus
from mcore_batching.megatron.exchange import SampleMoves
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.plan_inputs import PlanInputs, check_forward_cap, say_oversize
from mcore_batching.megatron.rollout_batch import RolloutBatch
from mcore_batching.megatron.serialize import digest_of
from mcore_batching.megatron.timing import learners_of
from mcore_batching.megatron.topology import model_chunks, vocabulary_size
from mcore_batching.planning import CostModel, Problem
from mcore_batching.planning.worker import PlanRequest


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of all ranks by number, and the values of those that this rank brought.

    Attributes:
        job: of the call.
        settings: the same on every rank.
        batch: this replica's samples, of which all fields are known.
        lengths: of all samples, in tokens.
        first: number of each data-parallel rank's first sample, and the number of all samples.
        steps: numbers of each step's samples, ascending.
        beginnings: what samples have in common; None: they share no tokens.
        forward_only: they are planned for forward passes alone.
        before: the exchange by which they came to the ranks that bring them here, if one did.
        fields_were_compared: the fields of a batch that was planned before; stages may have been
            given different ones since.
    """

    job: Job
    settings: PlanInputs
    batch: RolloutBatch
    lengths: Sequence[int]
    first: Sequence[int]
    steps: Sequence[Sequence[int]]
    beginnings: Beginnings | None = None
    forward_only: bool = False
    before: SampleMoves | None = None
    fields_were_compared: bool = False

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Digests of what the plan is made of beside the settings, by name. The ranks of a replica
        each gathered their own counterparts' lengths."""
        return {
            "lengths of all samples (sha256)": digest_of([*self.lengths, *self.first]),
            "beginnings of all samples (sha256)": self.beginnings.digest if self.beginnings else "",
        }

    def compare(self, agree: Agreement) -> None:
        """Name what ranks must have alike of their samples, now that each has some or the fields
        of others."""
        batch = self.batch
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        given = None if batch.steps is None else len(batch.steps)
        agree.same("number of steps (given too few, add [])", given)
        if batch.steps is None:
            agree.same("global_batch_size", batch.global_batch_size)
        fields = {} if self.fields_were_compared else batch.comparable()
        for name, value in (fields | self.digests).items():
            agree.same(name, value)

    @property
    def own(self) -> range:
        """Numbers of the samples that this rank brought."""
        rank = parallel_state.get_data_parallel_rank()
        return range(self.first[rank], self.first[rank + 1])

    @property
    def own_steps(self) -> list[list[int]]:
        """Local indices of this rank's samples of each step."""
        own = self.own
        return [[number - own.start for number in step if number in own] for step in self.steps]

    def request(self, step: int, *, plans: bool = True) -> PlanRequest:
        """A step's part of the planner's input; without ``plans`` as far as its plan is read."""
        samples = self.steps[step]
        lengths = tuple(self.lengths[number] for number in samples)
        made = self.settings.request(lengths, forward_only=self.forward_only)
        if self.beginnings is None or not plans:
            return made
        return dataclasses.replace(made, forest=self.beginnings.forest(self.lengths, samples))

    def naming(self, samples: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Let the planner's errors name samples by these numbers."""
        return self.job.options.naming_the_cap(forward_only=self.forward_only, samples=samples)


def read_samples(
    job: Job,
    model: Any,
    schema: Schema,
    read: Callable[[], dict[str, list[Any]] | None],
    *,
    steps: Iterable[Iterable[int]] | None = None,
    cost_model: CostModel | None = None,
) -> Samples:
    """Read settings and samples of a batch. A collective.

    Args:
        job: the present one.
        model: this rank's model chunks.
        schema: declared fields.
        read: gives rollout data, or None; what it raises is raised on every rank.
        steps: local sample indices of each step; None: by the global batch size.
        cost_model: costs; None: by the arguments.

    Raises:
        PlanningFailedError: on every rank, if reading failed on any.
        PlanMismatchError: on every rank, if they disagree, or a replica has no data.
    """
    with job.agreement("reading settings and samples") as agree:
        chunks = model_chunks(model)
        settings = PlanInputs.of(job, chunks, cost_model)
        check_forward_cap(job.options, settings.config)
        prepare_model(chunks, settings.dims, settings.config)
        if job.options.share_prefixes:
            check_shared_prefixes(chunks)
        batch = RolloutBatch.read(
            read(), job.options.global_batch_size, schema, steps, vocabulary_size(chunks)
        )
        evidence = _compare_settings(agree, job, chunks, settings, learns=cost_model is None)
        found = _Found.in_block(agree, job, settings, batch)
    if evidence is not None:
        learnt = learners_of(job).of(model).learn(evidence.value)
        settings = dataclasses.replace(settings, cost_model=learnt.cost_model, learnt=learnt)
    samples = numbered(job, settings, *shared(job, settings, batch, found))
    return with_beginnings(samples, model) if job.options.share_prefixes else samples


def read_step(
    job: Job,
    model: Any,
    read: Callable[[], RolloutBatch | None],
    read_next: Callable[[], Sequence[int] | None],
    *,
    cost_model: CostModel | None,
    is_evaluation: bool,
) -> tuple[Samples, list[int] | None]:
    """Read a stock script's step. A collective; raises as `read_samples`.

    Args:
        job: the present one.
        model: this rank's model chunks.
        read: gives the step's samples, or None.
        read_next: gives the lengths of the next step's samples, as far as they can be read.
        cost_model: costs; None: by the arguments.
        is_evaluation: the step has no backward passes.

    Returns:
        the samples; lengths of all ranks' samples of the next step, None if some rank has none.
    """
    # Without a cap of its own an evaluation is planned as training is.
    forward_only = is_evaluation and job.options.has_own_forward_cap
    with job.agreement("reading settings and samples") as agree:
        chunks = model_chunks(model)
        settings = PlanInputs.of(job, chunks, cost_model, forward_only=forward_only)
        prepare_model(chunks, settings.dims, settings.config)
        batch = read()
        learns = cost_model is None and not is_evaluation
        evidence = _compare_settings(agree, job, chunks, settings, learns=learns)
        found = _Found.in_block(agree, job, settings, batch, forward_only=forward_only)
        following = agree.gather("lengths of the next step", read_next())
    if evidence is not None:
        # The next step's plan, begun below, is by these costs; this step's was by those before.
        learners_of(job).of(model).learn(evidence.value)
    batch, shares = shared(job, settings, batch, found)
    samples = numbered(job, settings, batch, shares, forward_only=forward_only, is_one_step=True)
    lengths: list[int] | None = None
    if None not in following.values:
        lengths = [length for each in following.values for length in each or ()]
    return samples, lengths


def _compare_settings(
    agree: Agreement, job: Job, chunks: list[Any], settings: PlanInputs, *, learns: bool
) -> Reduction[list[float]] | None:
    """Name the settings that ranks must have alike, and give this rank's part of learnt costs."""
    options = job.options
    for name, value in settings.comparable().items():
        agree.same(name, value)
    # What decides which collectives come next: a rank that differed would wait alone.
    learns = learns and options.learns_cost_model
    agree.same("steps are recorded", job.recorder is not None)
    agree.same("costs are learnt", learns)
    agree.same("samples stay on their rank", not options.exchanges_samples)
    agree.same(FLAGS["share_prefixes"], bool(options.share_prefixes))
    if not learns:
        return None
    evidence = learners_of(job).of(chunks).evidence(settings.dims)
    return agree.sum_over_ranks("pass times", evidence)


class Share(NamedTuple):
    """Samples of one data-parallel rank."""

    lengths: list[int]
    steps: list[list[int]] | None  # of the caller's own
    global_batch_size: int | None


@dataclasses.dataclass(frozen=True)
class _Found:
    """Samples of all ranks, gathered in an agreement."""

    shares: Gathered[Share]
    has_data: Reduction[int]  # 0 if some rank has none
    has_samples: Reduction[int]
    populated: Reduction[int]  # the first rank with samples; the number of ranks if there is none

    @classmethod
    def in_block(
        cls,
        agree: Agreement,
        job: Job,
        settings: PlanInputs,
        batch: RolloutBatch | None,
        *,
        forward_only: bool = False,
    ) -> _Found:
        """Check this rank's samples against the cap, and gather those of all."""
        consensus = job.consensus
        lengths = [] if batch is None else batch.total_lengths
        # Now, by the rank that brings it: a sample over the cap, or a length that is none.
        with job.options.naming_the_cap(forward_only=forward_only, samples=range(len(lengths))):
            Problem.of(lengths, settings.dims, settings.config)
        share = Share(lengths, None, None)
        if batch is not None:
            share = Share(lengths, batch.steps, batch.global_batch_size)
        return cls(
            agree.gather("samples", share),
            agree.min("has data", int(batch is not None)),
            agree.min("has samples", int(bool(lengths))),
            agree.min("first populated", consensus.rank if lengths else len(consensus.ranks)),
        )


def shared(
    job: Job, settings: PlanInputs, batch: RolloutBatch | None, found: _Found
) -> tuple[RolloutBatch, list[Share]]:
    """The samples, once ranks without data have them, and ranks without samples the fields. A
    collective where any lacks them."""
    # By what all ranks have learnt, not by this one's data: the others are in the same collectives.
    consensus = job.consensus
    if not found.has_data.value:
        batch = consensus.share_within_replica(batch)
        with job.agreement("reading shared samples") as agree:
            found = _Found.in_block(agree, job, settings, batch)
    assert batch is not None
    if not found.has_samples.value:
        batch = _with_fields(job, consensus, batch, found.populated.value)
    return batch, found.shares.values


def _with_fields(
    job: Job, consensus: JobConsensus, batch: RolloutBatch, populated: int
) -> RolloutBatch:
    """The batch, on a rank without samples with the fields of the first rank that has any."""
    source = populated if populated < len(consensus.ranks) else None
    own = batch
    read = consensus.handed(own.without_samples, source)
    with job.agreement("sharing fields"):
        if source is None:
            return own.resolved()
        fields = read()
        return own if own.total_lengths else dataclasses.replace(own, **fields)


def numbered(
    job: Job,
    settings: PlanInputs,
    batch: RolloutBatch,
    shares: Sequence[Share],
    *,
    forward_only: bool = False,
    is_one_step: bool = False,
) -> Samples:
    """The samples of all ranks, cut into steps. Not a collective."""
    lengths = [length for share in shares for length in share.lengths]
    first = list(itertools.accumulate((len(share.lengths) for share in shares), initial=0))
    if job.options.exchange:
        job.say_once("exchange", f"{FLAGS['exchange']} is the default: leave it out")
    if not forward_only:
        say_oversize(job, settings, max(lengths, default=0))
    size = next((share.global_batch_size for share in shares if share.lengths), None)
    given = [share.steps for share in shares if share.steps is not None]
    if is_one_step:
        steps = [list(range(len(lengths)))]
    elif given:
        # Ranks that gave other numbers of steps differ in what `Samples.compare` names.
        steps = [
            sorted(
                start + index
                for start, share in zip(first, shares, strict=False)
                for indices in (share.steps or [])[step : step + 1]
                for index in indices
            )
            for step in range(len(given[0]))
        ]
    else:
        steps = steps_by_size([len(share.lengths) for share in shares], size)
    return Samples(job, settings, batch, lengths, first, steps, forward_only=forward_only)


def steps_by_size(shares: Sequence[int], size: int | None) -> list[list[int]]:
    """Numbers of the samples of each step of `size` samples over all ranks; None: all are one.

        shares 4 2, size 3    0 1 4, 2 3 5

    The middle of a rank's sample i is (2i + 1) / 2n of the way through its n. Samples are taken in
    the order of their middles, so that any number of the first are spread over the ranks like all.
    """
    middles = [
        ((2 * index + 1) / (2 * share), rank) for rank, share in enumerate(shares)
        for index in range(share)
    ]  # fmt: skip
    order = sorted(range(len(middles)), key=middles.__getitem__)
    size = size or max(len(order), 1)
    # A batch without samples is a step of placeholders alone.
    starts = range(0, max(len(order), 1), size)
    return [sorted(order[start : start + size]) for start in starts]


def with_beginnings(samples: Samples, model: Any) -> Samples:
    """The samples with what they have in common. A collective."""
    given = samples.batch.data, samples.own_steps, sum(samples.lengths)
    found = find_beginnings(samples.job, model_chunks(model), *given)
    return dataclasses.replace(samples, beginnings=found)
