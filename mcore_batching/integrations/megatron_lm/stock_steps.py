"""The packed rows of a stock script's steps, made in line or while the step before runs.

    stock iterators -> ordinary micro-batches -> unpadded samples -> plan of all ranks -> rows

The first step is planned in line; during a step, after its first pass, the next one is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mcore_batching.batch.fields.value_checks import require_vocabulary
from mcore_batching.integrations.megatron_lm.packed_batches import stock_row
from mcore_batching.integrations.megatron_lm.reading_ahead import (
    Batches,
    after_first_pass,
    are_same,
    batches_ahead,
    outcome_of,
)
from mcore_batching.integrations.megatron_lm.unpadding import STOCK_SCHEMA, unpadded_samples
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.maker import IN_LINE, Plan
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.megatron.rollout.planning_protocol import begin_step
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.step.prepare import prepare
from mcore_batching.megatron.topology import vocabulary_size
from mcore_batching.planning import CostModel


class StockSteps:
    """Makes the rows of one training loop's steps."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._last_planned: tuple[int | None, CostModel | None] = None, None
        self._is_rerun = False
        self._ahead: Callable[[], Batches | None] = lambda: None

    def made(
        self,
        job: Job,
        chunks: list[Any],
        drawn: Callable[[], Batches | None],
        *,
        forward_only: bool,
    ) -> PreparedStep:
        """A step's rows, of what ``drawn`` gives. A collective over all ranks."""
        if forward_only:  # evaluation is not planned ahead
            return self._planned(
                job, "evaluation", IN_LINE, chunks=chunks, drawn=drawn, forward_only=True
            )
        ahead, cost_model = self._plans_ahead(job), self._cost_model_of_rerun()
        self._is_rerun = cost_model is not None
        prepared = settings = None
        # Not in the first step, which is planned in line: there ranks compare that all plan ahead.
        if ahead is not None:
            # Of other batches than are now drawn, say as the batch size has grown, it is not taken.
            is_of_these = are_same(drawn, self._ahead)
            prepared, settings = ahead.take(job, chunks, cost_model, is_of_these=is_of_these)
        if prepared is None:
            prepared = self._planned(
                job,
                "training",
                IN_LINE if ahead is None else ahead.plan,
                chunks=chunks,
                drawn=drawn,
                cost_model=cost_model,
                settings=settings,
            )
        self._last_planned = self._iteration, prepared.schedule.cost_model
        return prepared

    def making_next(
        self, job: Job, chunks: list[Any], data_iterator: Any, num_microbatches: int
    ) -> AbstractContextManager[None]:
        """To run a training step's pipeline in, where the next step is made, if it is."""
        ahead, iteration = self._plans_ahead(job), self._iteration
        is_last = iteration is not None and iteration + 1 >= (self._args.train_iters or 0)
        # In a rerun the step after has begun already.
        if ahead is None or self._is_rerun or is_last:
            return nullcontext()
        ahead.connect(job)

        def begin_next() -> None:
            # What reading raises is raised when they are drawn.
            drawn = self._ahead = outcome_of(lambda: batches_ahead(data_iterator, num_microbatches))
            # What is known of costs now; more is learnt before the step.
            settings = Settings.of(job, chunks)
            make = functools.partial(self._planned, chunks=chunks, drawn=drawn, settings=settings)
            ahead.begin(job, make)

        return after_first_pass(begin_next)

    def _planned(
        self,
        job: Job,
        operation: str,
        plan: Plan,
        *,
        chunks: list[Any],
        drawn: Callable[[], Batches | None],
        cost_model: CostModel | None = None,
        settings: Settings | None = None,
        forward_only: bool = False,
    ) -> PreparedStep:
        """Plan and collate a step; a collective over all ranks."""
        # One step needs fewer agreements: prepare() compares what is left to compare.
        request = RolloutRequest(
            job,
            chunks,
            STOCK_SCHEMA,
            lambda: self._read(drawn(), vocabulary_size(chunks)),
            cost_model=cost_model,
            forward_only=forward_only and job.options.has_own_forward_plan,
            one_step=True,
            settings=settings,
            plan=plan,
        )
        schedule = begin_step(request)
        return prepare(
            job, chunks, operation, 0, schedule, forward_only=forward_only, change=stock_row
        )

    def _plans_ahead(self, job: Job) -> PlansAhead | None:
        """The job's steps that are made ahead; None where none are."""
        # Other loaders draw random numbers of the main process where an epoch ends, or save how
        # far they have been read.
        is_on = (
            job.options.exchanges_samples
            and not job.options.no_plan_ahead
            and getattr(self._args, "dataloader_type", None) == "single"
        )
        return job.memory.only(PlansAhead) if is_on else None

    @property
    def _iteration(self) -> int | None:
        iteration: int | None = getattr(self._args, "curr_iteration", None)
        return iteration

    def _cost_model_of_rerun(self) -> CostModel | None:
        """The cost model of this step's first run, where Megatron reruns the step; else None."""
        # Costs learnt since would give another plan, so other rounding than the rerun compares.
        iteration, cost_model = self._last_planned
        return cost_model if iteration is not None and iteration == self._iteration else None

    def _read(self, batches: Batches | None, vocabulary: int | None) -> dict[str, Any] | None:
        if batches is None:
            return None
        split = getattr(self._args, "reset_attention_mask", False)
        data = unpadded_samples(batches, split_documents=split)
        if vocabulary is not None:
            # Untrained labels are not checked: they may be -100.
            require_vocabulary("labels", data["labels"], vocabulary, data["loss_mask"])
        return data
