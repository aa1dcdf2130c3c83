"""`Rollout`: settings and samples of one call, read on every rank and known to all.

The first two steps of the planning protocol: taking stock, and sharing data with ranks that lack
it. From here on all ranks know that they have the same settings, and each what it packs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mcore_batching.batch import Schema
from mcore_batching.batch.agreement.consensus import Agreement, Statement
from mcore_batching.batch.agreement.figures import Figure, largest, least, rank_total, total
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.shared_prefixes import check_shared_prefixes
from mcore_batching.megatron.checks.validation import prepare_model
from mcore_batching.megatron.job.flat_values import digest_of
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.maker import IN_LINE, Plan
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.settings import Settings, check_forward_plan, say_oversize
from mcore_batching.megatron.rollout.step_shard import PackedShard, StepShard
from mcore_batching.megatron.timing import CostLearner, learners_of
from mcore_batching.megatron.topology import model_chunks, vocabulary_size
from mcore_batching.planning import CostModel


@dataclasses.dataclass(frozen=True)
class RolloutRequest:
    """Request of one call to have its samples planned."""

    job: Job
    model: Any
    schema: Schema
    # Gives rollout data, or None; what it raises is raised on every rank.
    read: Callable[[], dict[str, list[Any]] | None]
    steps: Iterable[Iterable[int]] | None = None  # sample indices; None: by `global_batch_size`
    cost_model: CostModel | None = None  # None: by the arguments
    forward_only: bool = False  # under a cap of their own if they have one
    # All samples are one, on every rank: packing need not wait for the number of all samples.
    one_step: bool = False
    settings: Settings | None = None  # in place of all these, and of what this step would learn
    plan: Plan = IN_LINE  # makes the plans, or gets them made

    @property
    def packs_at_once(self) -> bool:
        """True if packing follows from this rank's settings and samples alone."""
        return self.one_step and not self.job.options.exchanges_samples

    @property
    def may_plan_ahead(self) -> bool:
        """True if later steps than the first may be planned while that one runs."""
        return not (self.one_step or self.job.options.no_plan_ahead)

    @property
    def learns(self) -> bool:
        """True if costs are learnt from the training steps before this one."""
        # A model of the caller's own is not corrected, and forward passes alone are not timed.
        is_given = self.cost_model is not None or self.settings is not None
        return not is_given and not self.forward_only and self.job.options.learns_cost_model

    @property
    def learner(self) -> CostLearner:
        """Of the model's costs."""
        return learners_of(self.job).of(self.model)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Settings and samples of a request, once they are read."""

    request: RolloutRequest
    settings: Settings  # the same on every rank
    batch: RolloutBatch  # of this replica
    shares: list[int]  # samples of every data-parallel rank; under `one_step` of all together
    packed: PackedShard | None  # the only step, where packing at once was right on all ranks
    latest: list[float]  # the largest of its `ends` over all ranks


class _Own(NamedTuple):
    """This rank's part: its samples, None if it was given none; packed, where that is at once."""

    batch: RolloutBatch | None
    packed: PackedShard | None


def read_rollout(request: RolloutRequest) -> Rollout:
    """Read settings and samples, and share them. A collective.

    Raises:
        PlanningFailedError: on every rank, if reading failed on any.
        PlanMismatchError: on every rank, if they disagree on settings, or a replica has no data.
    """

    def work() -> tuple[Settings, _Own]:
        chunks = model_chunks(request.model)
        settings = _checked_settings(request, chunks)
        batch = RolloutBatch.read(
            request.read(),
            request.job.options.global_batch_size,
            request.schema,
            request.steps,
            vocabulary_size(chunks),
            request.job.memory.told_fields,
        )
        return settings, _Own(batch, _packed_at_once(request, settings, batch))

    agreed = request.job.consensus.agree(
        "taking stock", work, lambda read: _statement(request, *read)
    )
    settings, own = agreed.result
    if request.learns:
        learnt = request.learner.learn(agreed.figures["pass times"])
        # What packs at once has packed before these figures were heard: the plan is of the costs
        # before, and the next batch's of these.
        if not request.packs_at_once:
            settings = dataclasses.replace(settings, cost_model=learnt.cost_model, learnt=learnt)
    if not request.forward_only:  # of forward passes alone training has said it already
        say_oversize(request.job, settings, agreed.figures["longest sample"])
    batch, packed, figures = _shared(request, own, agreed)
    latest = figures.get("ends", [])
    return Rollout(request, settings, batch, figures["samples"], packed, latest)


def _shared(
    request: RolloutRequest, own: _Own, agreed: Agreement[Any]
) -> tuple[RolloutBatch, PackedShard | None, Mapping[str, Any]]:
    """The samples, once ranks without data have it, and ranks without samples the fields; packed,
    where that was right on all ranks; figures of all that hold them. A collective where any lacks
    them."""
    # By what all ranks know, not by this one's data: the other ranks are in the same collectives.
    consensus, figures = request.job.consensus, agreed.figures
    if figures["ranks without data"]:
        own, shared = consensus.share_within_replica(
            own if own.batch is not None else None,
            lambda theirs: Statement(figures=_counted(request, theirs or own)),
        )
        figures = shared.figures
    batch, packed = own
    assert batch is not None
    heard = [each for each in agreed.told.values() if each is not None]
    somebody_asks = any(is_open for _, is_open in heard)
    if somebody_asks:  # then all have heard what each tells
        batch = batch.hearing(told for told, _ in heard)
    somebody_is_empty, populated = figures["ranks without samples"], figures["first populated"]
    is_alike = packed is not None and figures["fields"] == figures["fields, least"]
    if somebody_is_empty or somebody_asks or not is_alike:
        packed = None  # packing anew tells all of the fields, or which differ
    # One past the last rank: nobody has samples, so there is nobody to hear of fields from.
    if somebody_is_empty and populated < len(consensus.ranks):
        populated_batch = batch
        handed = consensus.handed(lambda: populated_batch.resolved().without_samples(), populated)
        fields = consensus.agree("sharing data", handed).result
        if not batch.total_lengths:
            batch = dataclasses.replace(batch, **fields)
    return batch, packed, figures


def _checked_settings(request: RolloutRequest, chunks: list[Any]) -> Settings:
    options = request.job.options
    settings = request.settings or Settings.of(
        request.job, chunks, request.cost_model, forward_only=request.forward_only
    )
    # A model that may be running in another thread, with hooks, is not looked at.
    if request.job.of_thread is not None:
        return settings
    if not request.one_step:  # a stock script's evaluation is planned anew in any case
        check_forward_plan(options, settings.config)
    prepare_model(chunks, settings.dims, settings.config)
    if options.share_prefixes and not request.forward_only:  # in an evaluation none share segments
        check_shared_prefixes(chunks)
    return settings


def _packed_at_once(
    request: RolloutRequest, settings: Settings, batch: RolloutBatch | None
) -> PackedShard | None:
    if not request.packs_at_once:
        return None
    lengths = [] if batch is None else batch.total_lengths
    places, options = range(len(lengths)), request.job.options
    shard = StepShard.of(options, settings, places, lengths, request.forward_only)
    return shard.packed(request.plan)


def _statement(request: RolloutRequest, settings: Settings, own: _Own) -> Statement:
    """Settings to compare with other ranks; numbers and open fields of samples to tell them."""
    options, batch = request.job.options, own.batch
    equal = settings.comparable()
    # What decides which collectives come next: a rank that differed would wait alone.
    # Whoever records gathers the plans of all ranks; the others take other agreements.
    equal["steps are recorded"] = request.job.recorder is not None
    equal["costs are learnt"] = request.learns
    equal["samples stay on their rank"] = not options.exchanges_samples
    equal[FLAGS["no_plan_ahead"]] = options.no_plan_ahead
    equal[FLAGS["share_prefixes"]] = bool(options.share_prefixes)
    figures = _counted(request, own) | {"ranks without data": largest(int(batch is None))}
    if request.learns:
        figures["pass times"] = rank_total(request.learner.evidence(settings.dims))
    return Statement(
        equal=equal,
        figures=figures,
        # What these samples leave open, other ranks' may tell.
        tell=(batch.told, batch.is_open) if batch is not None else None,
        asks=batch is not None and batch.is_open,
    )


def _counted(request: RolloutRequest, own: _Own) -> dict[str, Figure]:
    """How many samples this rank has and how long the longest is; if packed, when it would end."""
    consensus, batch, packed = request.job.consensus, own.batch, own.packed
    lengths = [] if batch is None else batch.total_lengths
    shares = [len(lengths)]
    if not request.one_step:
        # Each rank knows its own, and the sum over ranks has them all. Beside them there is room
        # for some 90 ranks in a message; those of more take another one.
        place = consensus.data_parallel_rank
        shares = [0] * place + shares + [0] * (len(consensus.replicas) - 1 - place)
    figures: dict[str, Figure] = {
        "ranks without samples": largest(int(not lengths)),
        # One past the last rank stands for none: the least of all ranks is one with samples.
        "first populated": least(consensus.rank if lengths else len(consensus.ranks)),
        "longest sample": largest(max(lengths, default=0)),
        "samples": total(shares),
    }
    if packed is not None:
        figures["ends"] = largest(packed.ends)
        # Largest and least tell whether all ranks have the same fields; where not, packing anew
        # says by name which differ.
        # 48 bits: a figure has room for 63 and a sign.
        fields = 0 if batch is None else int(digest_of(batch.comparable())[:12], 16)
        figures |= {"fields": largest(fields), "fields, least": least(fields)}
    return figures
