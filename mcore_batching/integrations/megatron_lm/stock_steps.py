"""The packed rows of a stock script's steps.

stock iterators -> ordinary micro-batches -> unpadded samples -> plan of all ranks -> rows

step n      its samples, and the next ones' lengths, gathered; its plan awaited; it runs
a worker                                                       plans step n + 1 meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.values import require_vocabulary
from mcore_batching.integrations.megatron_lm.reading_ahead import Batches, are_same, batches_ahead
from mcore_batching.integrations.megatron_lm.unpadding import STOCK_SCHEMA, unpadded_samples
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.plan import begin_plan, plan_rollout
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.prepare import PreparedStep, collated, collating
from mcore_batching.megatron.samples import read_fields, read_step
from mcore_batching.megatron.topology import vocabulary_size
from mcore_batching.planning import CostModel
from mcore_batching.planning.worker import PlanTicket


class StockSteps:
    """Makes the rows of one training loop's steps."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._last_planned: tuple[int | None, CostModel | None] = None, None
        # The next step's batches, and its samples; its plan, on the planning rank.
        self._ahead: tuple[Batches, Columns] | None = None
        self._ticket: PlanTicket | None = None

    def made(
        self,
        job: Job,
        chunks: list[Any],
        drawn: Callable[[], Batches | None],
        data_iterator: Any,
        num_microbatches: int,
        *,
        forward_only: bool,
    ) -> PreparedStep:
        """A step's rows, of what ``drawn`` gives. A collective over all ranks."""
        iteration: int | None = getattr(self._args, "curr_iteration", None)
        cost_model = None if forward_only else self._cost_model_of_rerun(iteration)
        is_last = iteration is not None and iteration + 1 >= (self._args.train_iters or 0)
        # In a rerun the next step has been read already.
        reads_next = not (forward_only or cost_model is not None or is_last)
        ahead: tuple[Batches, Columns] | None = None

        def read() -> Columns | None:
            batches = drawn()
            if self._ahead is not None and are_same(batches, self._ahead[0]):
                return self._ahead[1]
            return self._read(chunks, batches)

        def read_next() -> Sequence[int] | None:
            nonlocal ahead
            if not (reads_next and self._may_read_ahead(job)):
                return None
            # What is wrong with the next samples is raised when they are drawn.
            try:
                batches = batches_ahead(data_iterator, num_microbatches)
                samples = self._read(chunks, batches)
            except (Exception, SystemExit):
                return None
            if batches is None or samples is None:
                # No data are read on this rank, but another rank of the replica reads them.
                return None
            ahead = batches, samples
            return samples.total_lengths

        samples, lengths = read_step(
            job, chunks, read, read_next, cost_model=cost_model, is_evaluation=forward_only
        )
        ticket = None if forward_only else self._ticket
        if reads_next:
            self._ahead, self._ticket = ahead, None
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

    def _may_read_ahead(self, job: Job) -> bool:
        # Other loaders draw random numbers of the main process where an epoch ends, or save how
        # far they have been read.
        loader = getattr(self._args, "dataloader_type", None)
        return job.options.exchanges_samples and loader == "single"

    def _cost_model_of_rerun(self, iteration: int | None) -> CostModel | None:
        """The cost model of this step's first run, where Megatron reruns the step; else None."""
        # Costs learnt since would give another plan, so other rounding than the rerun compares.
        last, cost_model = self._last_planned
        return cost_model if last is not None and last == iteration else None

    def _read(self, chunks: list[Any], batches: Batches | None) -> Columns | None:
        vocabulary = vocabulary_size(chunks)
        return read_fields(self._unpadded(batches, vocabulary), STOCK_SCHEMA, vocabulary)

    def _unpadded(self, batches: Batches | None, vocabulary: int | None) -> dict[str, Any] | None:
        if batches is None:
            return None
        split = getattr(self._args, "reset_attention_mask", False)
        data = unpadded_samples(batches, split_documents=split)
        if vocabulary is not None:
            # Untrained labels are not checked: they may be -100.
            require_vocabulary("labels", data["labels"], vocabulary, data["loss_mask"])
        return data
