"""The packed rows of a stock script's steps.

    stock iterators -> ordinary micro-batches -> unpadded samples -> plan of all ranks -> rows

A stock batch is a dict of tensors ``[micro_batch_size, seq_length]`` (or of lists of tensors of
any length): ``tokens``, ``labels`` (already shifted by one), ``loss_mask`` and ``position_ids``.
``--sft`` adds ``cu_seqlens``, where a row's conversations begin and the last one ends, at which the
row is cut first. A sample is cut after its last trained position: attention is causal, so nothing
after it can reach the loss:

    tokens     [[5, 6, 7, 8, 0, 0],      samples  [5, 6, 7]   # 8 is not trained
                [9, 4, 0, 0, 0, 0]]               [9]         # no position is trained
    loss_mask  [[0, 1, 1, 0, 0, 0],
                [0, 0, 0, 0, 0, 0]]

``--use-varlen-dataset`` gives a list of such dicts, one a sample, of tensors ``[length]``. A row
without a trained position keeps one token, so that the number of samples stays what the training
loop counts as consumed.

The next step's batches are read with this one's, and a worker plans them while this one runs:

    draws of the step    b0 b1 b2 b3 | b4 b5 b6 b7 | ...      as without reading ahead
    reads    b0 b1 b2 b3 b4 b5 b6 b7 ...                  before the step's pipeline

Batches that no step has drawn (another number is wanted, or the job ends) are only read, not lost.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.values import require_vocabulary
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.plan import begin_plan, plan_rollout
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.prepare import PreparedStep, collated, collating
from mcore_batching.megatron.samples import Brought, brought_by, read_fields, read_samples
from mcore_batching.megatron.topology import vocabulary_size
from mcore_batching.planning import CostModel
from mcore_batching.planning.errors import MCoreBatchingError
from mcore_batching.planning.worker import PlanTicket

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")

# Response lengths are 0: labels and masks come ready-made.
STOCK_SCHEMA = DEFAULT_SCHEMA.declare("labels", Kind.PER_TOKEN).declare("loss_mask", Kind.PER_TOKEN)

Batches = Sequence[Mapping[str, Any]]


class StockDataError(MCoreBatchingError, RuntimeError):
    """A script's data iterator ended too soon, or its batches lack a field."""


class StockSteps:
    """Makes the rows of one training loop's steps.

    Attributes:
        drawn: batches of the step made last; None where this rank reads none.
    """

    def __init__(self, args: Any) -> None:
        self.drawn: Batches | None = None
        self._args = args
        self._last_planned: tuple[int | None, CostModel | None] = None, None
        # The next step's batches, and its samples.
        self._ahead: tuple[Batches, Columns] | None = None
        # The next step's plan, on the planning rank.
        self._ticket: PlanTicket | None = None

    def made(
        self,
        job: Job,
        chunks: list[Any],
        data_iterator: Any,
        num_microbatches: int,
        *,
        forward_only: bool,
    ) -> PreparedStep:
        """A step's rows, of ordinary micro-batches that it draws. A collective over all ranks."""
        iteration: int | None = getattr(self._args, "curr_iteration", None)
        cost_model = None if forward_only else self._cost_model_of_rerun(iteration)
        is_last = iteration is not None and iteration + 1 >= (self._args.train_iters or 0)
        # In a rerun the next step has been read already. Other loaders draw random numbers of the
        # main process where an epoch ends, or save how far they have been read.
        reads_next = not (forward_only or cost_model is not None or is_last)
        is_single = getattr(self._args, "dataloader_type", None) == "single"
        reads_next &= job.options.exchanges_samples and is_single
        of_step = chunks, data_iterator, num_microbatches
        samples, lengths = read_samples(
            job,
            chunks,
            functools.partial(self._draw, *of_step),
            read_next=functools.partial(self._read_following, *of_step, reads=reads_next),
            cost_model=cost_model,
            is_evaluation=forward_only,
        )
        ticket = None if forward_only else self._ticket
        if reads_next:
            self._ticket = None
            if lengths is not None:
                request = PlanInputs.of(job, chunks).request(tuple(lengths))
                self._ticket = begin_plan(job, request)
        schedule = plan_rollout(samples, ticket)
        if not forward_only:
            self._last_planned = iteration, schedule.settings.cost_model
        operation = "evaluation" if forward_only else "training"
        with collating(job, operation) as agree:
            return collated(
                agree, job, chunks, schedule, 0, forward_only=forward_only, has_labels=True
            )

    def _draw(self, chunks: list[Any], data_iterator: Any, num_batches: int) -> Brought | None:
        """The step's samples, drawn now."""
        self.drawn = draw_batches(data_iterator, num_batches)
        # The very batches that were read ahead: their samples are there.
        if self._ahead and list(map(id, self._ahead[0])) == list(map(id, self.drawn or ())):
            return brought_by(self._ahead[1])
        data = self._read(chunks, self.drawn)
        return None if data is None else brought_by(data)

    def _read_following(
        self, chunks: list[Any], data_iterator: Any, num_batches: int, *, reads: bool
    ) -> Sequence[int] | None:
        """Lengths of the next step's samples, read behind this step's; None: they are not."""
        if not reads:
            return None
        self._ahead = None
        # What is wrong with the next samples is raised when they are drawn.
        with contextlib.suppress(Exception, SystemExit):
            # None where another rank of the replica reads them.
            batches = batches_ahead(data_iterator, num_batches)
            samples = None if batches is None else self._read(chunks, batches)
            if batches is not None and samples is not None:
                self._ahead = batches, samples
                return samples.total_lengths
        return None

    def _cost_model_of_rerun(self, iteration: int | None) -> CostModel | None:
        """The cost model of this step's first run, where Megatron reruns the step; else None."""
        # Costs learnt since would give another plan, so other rounding than the rerun compares.
        last, cost_model = self._last_planned
        return cost_model if last is not None and last == iteration else None

    def _read(self, chunks: list[Any], batches: Batches | None) -> Columns | None:
        vocabulary, data = vocabulary_size(chunks), None
        if batches is not None:
            split = getattr(self._args, "reset_attention_mask", False)
            data = unpadded_samples(batches, split_documents=split)
            if vocabulary is not None:
                # Untrained labels are not checked: they may be -100.
                require_vocabulary("labels", data["labels"], vocabulary, data["loss_mask"])
        return read_fields(data, STOCK_SCHEMA, vocabulary)


class Buffered:
    """An iterator, of which some values have been read before they are drawn."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: collections.deque[tuple[Any, Exception | None]] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._read:
            return next(self._iterator)
        value, error = self._read.popleft()
        if error is not None:  # in the place where it would have been raised
            raise error
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def next_values(self, count: int) -> list[Any]:
        """The values that are drawn next; raises what reading one did, as drawing it will again."""
        while len(self._read) < count and not (self._read and self._read[-1][1]):
            try:
                self._read.append((next(self._iterator), None))
            except Exception as error:
                self._read.append((None, error))
        ahead = [*self._read][:count]
        for _, raised in ahead:
            if raised is not None:
                raise raised
        return [value for value, _ in ahead]


def batches_ahead(data_iterator: Any, num_batches: int) -> Batches | None:
    """Batches that `draw_batches` would draw next; None if there are none, or not Megatron's.

    Raises what reading a batch did, as drawing it will again.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    read = []
    for iterator in iterators:
        if isinstance(iterator, RerunDataIterator):
            # Megatron's iterators stay in front: they record and replay the same batches, and
            # consumed samples are counted as they are drawn.
            if not isinstance(iterator.iterable, Buffered):
                iterator.iterable = Buffered(iterator.iterable)
            read.append(iterator.iterable.next_values(num_batches))
    return read[0] if read else None


def draw_batches(data_iterator: Any, num_batches: int) -> list[Mapping[str, Any]] | None:
    """Take ordinary micro-batches from this rank's stock iterators; None if it has none.

    ``data_iterator`` is one, or one per model chunk, None where stock code reads nothing. A
    `StockDataError` if one ends.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    present = [iterator for iterator in iterators if iterator is not None]
    if not present:
        return None
    # All are drawn from, though one is read: those of further model chunks yield the same batches,
    # and must go on with the same ones in the next step.
    drawn: list[list[Mapping[str, Any]]] = [[] for _ in present]
    for iterator, batches in zip(present, drawn, strict=True):
        for number in range(num_batches):
            try:
                batches.append(next(iterator))
            except StopIteration:
                raise StockDataError(
                    f"the data iterator ended after {number} of {num_batches} micro-batches: "
                    "lower --train-iters or --eval-iters"
                ) from None
    return drawn[0]


def unpadded_samples(
    batches: Iterable[Mapping[str, Any]], *, split_documents: bool
) -> dict[str, Any]:
    """The four fields ``[length]`` of the batches' samples, their lengths, and responses of 0.

    Where ``split_documents``, position 0 inside a row begins a sample of its own, as documents are
    separate under ``--reset-attention-mask``. A `StockDataError` if a batch lacks a field.
    """
    data: dict[str, Any] = {name: [] for name in FIELDS}
    for batch in batches:
        for row in _rows(batch):
            for start, end in _extents(row, split_documents):
                for name in FIELDS:
                    data[name].append(row[name][start:end])
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    data["response_lengths"] = [0] * len(data["tokens"])
    return data


def num_truncated(batches: Iterable[Mapping[str, Any]]) -> int:
    """Rows of ``--sft`` that end inside a conversation, or just behind it: Megatron gives nothing
    that distinguishes these two."""
    rows = [row for batch in batches for row in _rows(batch) if "cu_seqlens" in row]
    # The last label is padding in every row, the last token only where the row was not full.
    return sum(int(row["tokens"][-1] != row["labels"][-1]) for row in rows)


def _rows(batch: Any) -> Iterator[dict[str, Tensor]]:
    if isinstance(batch, list):
        for sample in batch:
            yield from _rows({name: [values] for name, values in sample.items()})
        return
    missing = [name for name in FIELDS if batch.get(name) is None]
    if missing:
        raise StockDataError(
            f"the data iterator's batch lacks {', '.join(missing)}, it has "
            f"{', '.join(sorted(batch))}: yield {', '.join(FIELDS)}"
        )
    names = [*FIELDS, *(["cu_seqlens"] if batch.get("cu_seqlens") is not None else [])]
    for values in zip(*(batch[name] for name in names), strict=True):
        yield dict(zip(names, map(torch.as_tensor, values), strict=True))


def _extents(row: Mapping[str, Tensor], split_documents: bool) -> Iterator[tuple[int, int]]:
    """Start and end of each sample of a row."""
    cuts = {0, len(row["tokens"])}
    if split_documents:
        cuts |= {int(at) for at in (row["position_ids"] == 0).nonzero()}
    if "cu_seqlens" in row:
        cuts |= {int(at) for at in row["cu_seqlens"]}  # often many times the row's length
    for start, end in itertools.pairwise(sorted(cuts)):
        trained = row["loss_mask"][start:end].nonzero()
        if len(trained):
            yield start, start + int(trained[-1]) + 1
        elif start == 0:  # the row counts as consumed; documents within it do not
            yield 0, min(1, end)
