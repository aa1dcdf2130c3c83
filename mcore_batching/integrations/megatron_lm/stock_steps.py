"""The packed rows of a stock script's steps.

stock iterators -> ordinary micro-batches -> unpadded samples -> plan of all ranks -> rows

step n      its samples, and the next ones' lengths, gathered; its plan awaited; it runs
a worker                                                       plans step n + 1 meanwhile

The next step's batches are read with this one's:

    draws of the step    b0 b1 b2 b3 | b4 b5 b6 b7 | ...      as without reading ahead
    reads    b0 b1 b2 b3 b4 b5 b6 b7 ...                  before the step's pipeline

Batches that no step has drawn (another number is wanted, or the job ends) are only read, not lost.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.values import require_vocabulary
from mcore_batching.integrations.megatron_lm.unpadding import (
    STOCK_SCHEMA,
    draw_batches,
    unpadded_samples,
)
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.plan import begin_plan, plan_rollout
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.prepare import PreparedStep, collated, collating
from mcore_batching.megatron.samples import read_fields, read_step
from mcore_batching.megatron.topology import vocabulary_size
from mcore_batching.planning import CostModel
from mcore_batching.planning.worker import PlanTicket

Batches = Sequence[Mapping[str, Any]]


class StockSteps:
    """Makes the rows of one training loop's steps.

    Attributes:
        drawn: batches of the step made last; None where this rank reads none.
    """

    def __init__(self, args: Any) -> None:
        self.drawn: Batches | None = None
        self._args = args
        self._last_planned: tuple[int | None, CostModel | None] = None, None
        # The next step's batches, and its samples: as read with the step before, and with this one.
        self._ahead: tuple[Batches, Columns] | None = None
        self._following: tuple[Batches, Columns] | None = None
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
        self._following = None
        samples, lengths = read_step(
            job,
            chunks,
            functools.partial(self._draw, *of_step),
            functools.partial(self._read_following, *of_step, reads=reads_next),
            cost_model=cost_model,
            is_evaluation=forward_only,
        )
        ticket = None if forward_only else self._ticket
        if reads_next:
            self._ahead, self._ticket = self._following, None
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

    def _draw(self, chunks: list[Any], data_iterator: Any, num_batches: int) -> Columns | None:
        """The step's samples, drawn now."""
        self.drawn = draw_batches(data_iterator, num_batches)
        if self._ahead is not None and are_same(self.drawn, self._ahead[0]):
            return self._ahead[1]
        return self._read(chunks, self.drawn)

    def _read_following(
        self, chunks: list[Any], data_iterator: Any, num_batches: int, *, reads: bool
    ) -> Sequence[int] | None:
        """Lengths of the next step's samples; None if they are not read."""
        # What is wrong with the next samples is raised when they are drawn.
        with contextlib.suppress(Exception, SystemExit):
            batches = batches_ahead(data_iterator, num_batches) if reads else None
            # None where another rank of the replica reads them.
            samples = None if batches is None else self._read(chunks, batches)
            if batches is not None and samples is not None:
                self._following = batches, samples
                return samples.total_lengths
        return None

    def _cost_model_of_rerun(self, iteration: int | None) -> CostModel | None:
        """The cost model of this step's first run, where Megatron reruns the step; else None."""
        # Costs learnt since would give another plan, so other rounding than the rerun compares.
        last, cost_model = self._last_planned
        return cost_model if last is not None and last == iteration else None

    def _read(self, chunks: list[Any], batches: Batches | None) -> Columns | None:
        vocabulary = vocabulary_size(chunks)
        data = None if batches is None else self._unpadded(batches, vocabulary)
        return read_fields(data, STOCK_SCHEMA, vocabulary)

    def _unpadded(self, batches: Batches, vocabulary: int | None) -> dict[str, Any]:
        split = getattr(self._args, "reset_attention_mask", False)
        data = unpadded_samples(batches, split_documents=split)
        if vocabulary is not None:
            # Untrained labels are not checked: they may be -100.
            require_vocabulary("labels", data["labels"], vocabulary, data["loss_mask"])
        return data


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


def are_same(drawn: Batches | None, ahead: Batches | None) -> bool:
    """True if the batches that were read ahead are those that have been drawn."""
    return [*map(id, drawn or ())] == [*map(id, ahead or ())]
