"""`Samples`: settings and samples of one call, read on every rank and known to all.

All ranks read, compare their settings and gather the lengths in one agreement. Others follow only
where they are needed: ranks of a replica without data receive it, and ranks without samples the
fields. Samples of all data-parallel ranks are numbered through, rank after rank:

    rank 0 brings samples 0 1 2, rank 1 brings 3 4        first [0, 3, 5]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core import parallel_state

from mcore_batching.batch import Schema, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.consensus import Agreement, Gathered
from mcore_batching.batch.fields import read_lengths, require_one_per_sample
from mcore_batching.batch.values import all_within, require_vocabulary
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.layers import check_shared_prefixes
from mcore_batching.megatron.checks.settings import prepare_model
from mcore_batching.megatron.errors import DynamicBatchArgumentError, PlanMismatchError
from mcore_batching.megatron.exchange import digest_of, handed
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.plan_inputs import (
    Beginnings,
    PlanInputs,
    find_beginnings,
    say_oversize,
)
from mcore_batching.megatron.timing import learner_of
from mcore_batching.megatron.topology import model_chunks, vocabulary_size
from mcore_batching.planning import ConfigError, CostModel, Problem, at_least
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.worker import PlanRequest

REQUIRED_FIELDS = ("tokens", "total_lengths", "response_lengths")
_BATCH_SIZE = "dynamic_global_batch_size"
"""A key of rollout data, as slime names it: one number for the batch, no field of samples."""


class Share(NamedTuple):
    """Samples of one data-parallel rank, as all ranks gather them."""

    lengths: list[int]  # in tokens
    steps: list[list[int]] | None = None  # the caller's own, of local sample indices
    # Samples of a step over all ranks, None for all; of the caller's own steps what each counts as.
    samples_per_step: int | None = None


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of all ranks by number, and the values of those that this rank brought."""

    job: Job  # of the call
    settings: PlanInputs  # the same on every rank
    share: Share  # this replica's part of what all ranks gathered
    data: Columns  # of this replica's samples; the lengths alone once all have moved
    template: dict[str, list[Any]]  # of one sample, from a rank that has any: a placeholder's
    vocabulary_size: int | None  # of the model; None: not known
    lengths: Sequence[int]  # of all samples, in tokens
    first: Sequence[int]  # of each data-parallel rank's samples, and the number of all samples
    steps: Sequence[Sequence[int]]  # numbers of each step's samples, ascending
    beginnings: Beginnings | None = None  # None: samples share no tokens

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
        given = self.share.steps
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        count = None if given is None else len(given)
        agree.same("number of steps (given too few, add [])", count)
        if given is None:
            agree.same("global_batch_size", self.share.samples_per_step)
        names = sorted(self.template)
        agree.same("field names", names)
        for name in names:
            agree.same(f"declaration of field {name!r}", self.data.schema[name].declaration)
        for name, value in self.digests.items():
            agree.same(name, value)

    def step_lengths(self, step: int) -> list[int]:
        """Total length of each sample of a step, in tokens."""
        return [self.lengths[number] for number in self.steps[step]]

    def request(self, step: int) -> PlanRequest:
        """A step's part of the planner's input."""
        made = self.settings.request(tuple(self.step_lengths(step)))
        if self.beginnings is None:
            return made
        forest = self.beginnings.forest(self.lengths, self.steps[step])
        return dataclasses.replace(made, forest=forest)


class Brought(NamedTuple):
    """Samples that this rank was given."""

    data: Columns  # without samples as they were given
    template: dict[str, list[Any]]  # empty without samples to copy it from
    share: Share


def read_samples(
    job: Job,
    model: Any,
    read: Callable[[], Brought | None],
    *,
    read_next: Callable[[], Sequence[int] | None] | None = None,
    cost_model: CostModel | None = None,
    is_evaluation: bool = False,
) -> tuple[Samples, list[int] | None]:
    """Read settings and samples of a batch. A collective.

    Args:
        read: gives this rank's samples, or None; what it raises is raised on every rank.
        read_next: gives the lengths of the next batch's samples, as far as they can be read.
        cost_model: costs; None: by the arguments.
        is_evaluation: the batch has no backward passes.

    Returns:
        the samples; lengths of all ranks' samples of the next batch, None if some rank has none.

    Raises:
        PlanningFailedError: on every rank, if reading failed on any.
        PlanMismatchError: on every rank, if they disagree, or a replica has no data.
    """
    options = job.options
    # Without a cap of its own an evaluation is planned as training is.
    forward_only = is_evaluation and options.has_own_forward_cap
    with job.agreement("reading settings and samples") as agree:
        chunks = model_chunks(model)
        settings = PlanInputs.of(job, chunks, cost_model, forward_only=forward_only)
        prepare_model(chunks, settings.dims, settings.config)
        if options.share_prefixes:
            check_shared_prefixes(chunks)
        brought = read()
        for name, value in settings.comparable().items():
            agree.same(name, value)
        # What decides which collectives come next: a rank that differed would wait alone.
        learns = cost_model is None and not is_evaluation and options.learns_cost_model
        agree.same("steps are recorded", job.recorder is not None)
        agree.same("costs are learnt", learns)
        agree.same("samples stay on their rank", not options.exchanges_samples)
        agree.same(FLAGS["share_prefixes"], bool(options.share_prefixes))
        evidence = None
        if learns:
            own = learner_of(job, chunks).evidence(settings.dims)
            evidence = agree.sum_over_ranks("pass times", own)
        gathered = _gather(agree, settings, brought)
        has_data = agree.every("has data", brought is not None, wanted=brought is None)
        following = agree.gather(
            "lengths of the next step", None if read_next is None else read_next()
        )
    if evidence is not None:
        learnt = learner_of(job, chunks).learn(evidence.value)
        # Where the next plan is begun ahead, it alone is by these costs.
        if read_next is None:
            settings = dataclasses.replace(settings, cost_model=learnt.cost_model, learnt=learnt)
    # By what all ranks have gathered, not by this one's data: the others are in the same
    # collectives.
    if not all(has_data.values):
        received = handed(job, brought, _sources(job, has_data))
        with job.agreement("reading shared samples") as agree:
            brought = received()
            gathered = _gather(agree, settings, brought)
    assert brought is not None
    shares = [each for each in gathered.values if each is not None]
    if not all(each.lengths for each in shares):
        brought = _with_fields(job, brought, shares)

    lengths = [length for each in shares for length in each.lengths]
    counts = [len(each.lengths) for each in shares]
    first = [0, *itertools.accumulate(counts)]
    given = [each.steps for each in shares if each.steps is not None]
    if given:
        # Ranks that gave other numbers of steps differ in what `Samples.compare` names.
        steps = [
            sorted(
                start + index
                for start, each in zip(first, shares, strict=False)
                for indices in (each.steps or [])[step : step + 1]
                for index in indices
            )
            for step in range(len(given[0]))
        ]
    else:
        steps = steps_by_size(counts, brought.share.samples_per_step)
    if options.exchange:
        job.say_once("exchange", f"{FLAGS['exchange']} is the default: leave it out")
    if not forward_only:
        say_oversize(job, settings, max(lengths, default=0))
    beginnings = None
    if options.share_prefixes:
        rank = parallel_state.get_data_parallel_rank()
        start, end = first[rank], first[rank + 1]
        own_steps = [[n - start for n in step if start <= n < end] for step in steps]
        beginnings = find_beginnings(job, chunks, brought.data, own_steps, sum(lengths))
    samples = Samples(
        job=job,
        settings=settings,
        share=brought.share,
        data=brought.data,
        template=brought.template,
        vocabulary_size=vocabulary_size(chunks),
        lengths=lengths,
        first=first,
        steps=steps,
        beginnings=beginnings,
    )
    if None in following.values:
        return samples, None
    return samples, [length for each in following.values for length in each or ()]


def read_rollout(
    job: Job,
    model: Any,
    schema: Schema,
    rollout_data: Mapping[str, Any] | None,
    steps: Iterable[Iterable[int]] | None = None,
) -> Brought | None:
    """This rank's samples of a rollout, given as to `get_data_iterator`; None if it was given
    nothing. Raises as `read_fields` and `read_share`, and a `DynamicBatchArgumentError` if forward
    passes have a cap of their own beside shared rows."""
    options = job.options
    if options.max_context_parallel is not None and options.has_own_forward_cap:
        raise DynamicBatchArgumentError(
            "forward_only has no plan of its own where ranks share rows; unset "
            f"{FLAGS['forward_only_max_tokens_per_gpu']} or {FLAGS['max_context_parallel']}"
        )
    data = read_fields(rollout_data, schema, vocabulary_size(model_chunks(model)))
    if rollout_data is None or data is None:
        return None
    size = options.global_batch_size
    return brought_by(data, read_share(rollout_data, data.total_lengths, steps, size))


def brought_by(data: Columns, share: Share | None = None) -> Brought:
    """Samples that this rank was given; None: all of them are one step."""
    share = Share(data.total_lengths) if share is None else share
    return Brought(data, template_of(data) if share.lengths else {}, share)


def _gather(
    agree: Agreement, settings: PlanInputs, brought: Brought | None
) -> Gathered[Share | None]:
    """Check this rank's samples against the cap, and gather those of all."""
    # Here, so that the error for a length or a sample over the cap names the rank that brings it.
    share = None if brought is None else brought.share
    lengths = share.lengths if share else []
    with settings.naming(range(len(lengths))):
        Problem.of(lengths, settings.dims, settings.config)
    return agree.gather("samples", share)


def _sources(job: Job, has_data: Gathered[bool]) -> dict[int, int]:
    """For each rank of a replica of which some lack data, the first rank that has it."""
    sources: dict[int, int] = {}
    lacking: dict[int, str] = {}
    for replica, ranks in enumerate(job.consensus.replicas):
        having = [rank for rank in ranks if has_data.by_rank[rank]]
        if not having:
            lacking[ranks[0]] = (
                f"no rank of data-parallel rank {replica} (global ranks {list(ranks)}) was given "
                "rollout_data: pass it on at least one, without samples an empty batch"
            )
        elif len(having) < len(ranks):
            sources |= dict.fromkeys(ranks, having[0])
    if lacking:
        raise PlanMismatchError(lacking)
    return sources


def _with_fields(job: Job, brought: Brought, shares: Sequence[Share]) -> Brought:
    """The samples; on ranks without any with the fields, and the batch size, of the first rank that
    has some. A collective over all ranks."""
    data, template, share = brought
    replicas = zip(job.consensus.replicas, shares, strict=True)
    first = next(((ranks[0], each) for ranks, each in replicas if each.lengths), None)
    if first is None:
        with job.agreement("reading fields"):
            data = Columns.read(data, data.schema.resolve(data))
            return brought._replace(data=data, template=template_of(data))
    source, usual = first
    sources = dict.fromkeys(job.consensus.ranks, source)
    received = handed(job, (data.taken([]), template), sources, to_all=True)
    with job.agreement("reading shared fields"):
        data, template = received()
    if share.lengths:
        return brought
    return Brought(data, template, share._replace(samples_per_step=usual.samples_per_step))


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


def read_fields(
    rollout_data: Mapping[str, Any] | None, schema: Schema, vocabulary: int | None
) -> Columns | None:
    """The samples' fields, copied and checked; None if this rank was given nothing.

    Fields without samples stay as they are: a rank that has some shows what they are.

    Raises:
        TypeError: it is no dict, or ``schema`` is no `Schema`.
        KeyError: a required field is missing.
        SchemaError: a field's kind is unknown, a value does not fit it, or a token id is beyond
            the vocabulary.
    """
    if not isinstance(schema, Schema):
        raise TypeError(
            "schema must be a Schema, such as DEFAULT_SCHEMA.declare(name, kind), got "
            f"{type(schema).__name__}"
        )
    if rollout_data is None:
        return None
    if not isinstance(rollout_data, Mapping):
        raise TypeError(
            f"rollout_data must be a dict of lists or None, got {type(rollout_data).__name__}; "
            "give one value per sample"
        )
    # None stands for a field that this rollout lacks.
    given = {k: v for k, v in rollout_data.items() if v is not None and k != _BATCH_SIZE}
    missing = [key for key in REQUIRED_FIELDS if key not in given]
    if missing:
        raise KeyError(
            f"rollout_data lacks {', '.join(missing)}; it needs {', '.join(REQUIRED_FIELDS)}, "
            "one value per sample (empty lists on a rank without samples)"
        )
    lengths = read_lengths(given)
    for name, values in given.items():
        require_one_per_sample(name, values, len(lengths[0]))
    # Of tuples, arrays and tensors, too: what is no list in columns is one flat tensor.
    data = Columns(schema, {name: [*values] for name, values in given.items()}, *lengths)
    if data.total_lengths:
        data = Columns.read(data, schema.resolve(data))
        require_known_tokens(data, vocabulary)
    return data


def template_of(
    data: Columns, template: Mapping[str, list[Any]] | None = None
) -> dict[str, list[Any]]:
    """A fabricated sample like those in ``data``; where there are none, like another template."""
    first = data.taken(range(min(1, len(data.total_lengths)))).compact()
    examples = {name: first[name] or (template or {}).get(name) for name in data}
    return make_placeholder(data.schema, list(data), examples)


def require_known_tokens(data: Columns, vocabulary_size: int | None) -> None:
    """Refuse tokens beyond the model's vocabulary (None: not known), by a `SchemaError`."""
    # An id beyond the embedding would show without the sample's name, or not at all.
    if vocabulary_size is None or not data.total_lengths:
        return
    if not all_within(data.flat("tokens"), vocabulary_size):  # one by one only to name one
        require_vocabulary("tokens", data["tokens"], vocabulary_size)


def read_share(
    rollout_data: Mapping[str, Any], lengths: list[int], steps: Any, job_size: Any
) -> Share:
    """The part of this rank's samples that all ranks gather.

    Raises:
        ConfigError: the global batch size is none, or ``steps`` are no lists of indices.
        ValueError: ``steps`` do not hold every sample once.
    """
    size = rollout_data.get(_BATCH_SIZE)
    if size is None and steps is None:  # steps of the caller's own need not be of the job's size
        size = job_size
    if size is not None:
        size = at_least("global_batch_size", size, 0, ConfigError) or None
    return Share(lengths, None if steps is None else _read_steps(steps, len(lengths)), size)


def _read_steps(steps: Any, num_samples: int) -> list[list[int]]:
    """The caller's steps as lists, which every sample is in once."""
    read: list[list[int | None]] = [[None]]
    # Lists, arrays, tensors, iterators: whatever cannot be walked through stays [[None]], refused
    # below.
    with contextlib.suppress(TypeError):
        read = [[as_integer(index) for index in step] for step in steps]
    given = [index for step in read for index in step if index is not None]
    if len(given) < sum(map(len, read)):
        raise ConfigError(
            "steps must be one list of sample indices for each step, such as [[0, 1], [2, 3]], "
            f"got {steps!r:.60}"
        )
    if sorted(given) != list(range(num_samples)):
        raise ValueError(
            f"steps must hold each of this rank's {num_samples} samples exactly once, got {given}; "
            "group_steps leaves out padding samples (give real_samples(batch) with its steps), "
            "with last='drop' also those left over (give the batch without them)"
        )
    return [[index for index in step if index is not None] for step in read]
