"""Megatron's forward-backward function over packed rows, for stock training loops.

`wrap_forward_backward` wraps what ``get_forward_backward_func`` returned: it draws the ordinary
micro-batches from the stock iterators, plans their unpadded samples together with all other ranks,
and runs Megatron's own function over the packed rows:

    8 ordinary micro-batches -> 8 samples -> 3 packed rows -> 3 reports of (loss sum, tokens)

The training loop is unchanged: ``num_microbatches_calculator``, consumed samples, learning rate and
checkpoints count as before, and the rerun state machine replays the same draws. The reports have
the same sums as those of the ordinary micro-batches; a placeholder's are 0 and 0.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.batch.agreement.consensus import Agreement
from mcore_batching.batch.fields.value_checks import require_vocabulary
from mcore_batching.integrations.megatron_lm.arguments import is_on
from mcore_batching.integrations.megatron_lm.learnt_costs import keep_learnt_costs
from mcore_batching.integrations.megatron_lm.packed_batches import PackedRows, stock_row
from mcore_batching.integrations.megatron_lm.reading_ahead import (
    Batches,
    after_first_pass,
    are_same,
    batches_ahead,
    outcome_of,
)
from mcore_batching.integrations.megatron_lm.script_batches import use_packed_batches
from mcore_batching.integrations.megatron_lm.script_forward_step import (
    with_deferred_errors,
)
from mcore_batching.integrations.megatron_lm.step_figures import StepFigures
from mcore_batching.integrations.megatron_lm.step_log import record_step
from mcore_batching.integrations.megatron_lm.unpadding import (
    STOCK_SCHEMA,
    draw_batches,
    unpadded_samples,
)
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.learning.pass_times import mark
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.megatron.rollout.planning_protocol import begin_step
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.split_backward.plan import most_left_bytes
from mcore_batching.megatron.step.multi_token import LossesOfRows
from mcore_batching.megatron.step.prepare import prepare
from mcore_batching.megatron.step.run_pipeline import run_pipeline
from mcore_batching.megatron.topology import model_chunks, model_shape, vocabulary_size
from mcore_batching.planning import CostModel, StepPlan
from mcore_batching.planning.learning.learnt_costs import LearntCosts
from mcore_batching.planning.planning_process import PlanRequest
from mcore_batching.planning.plans.memory import predicted_memory

ForwardBackward = Callable[..., Any]


def wrap_forward_backward(forward_backward_func: ForwardBackward) -> ForwardBackward:
    """Megatron's forward-backward function over packed micro-batches.

    Args:
        forward_backward_func: from ``get_forward_backward_func``.

    Returns:
        a function of the same keywords; the argument itself without ``--use-dynamic-batch-size``.
    """
    from megatron.training import get_args

    args = get_args()
    return (
        PackedForwardBackward(forward_backward_func, args) if is_on(args) else forward_backward_func
    )


class PackedForwardBackward:
    """A forward-backward function that draws ordinary micro-batches and runs packed ones.

    Args:
        forward_backward_func: Megatron's own.
        args: Megatron's arguments.
    """

    def __init__(self, forward_backward_func: ForwardBackward, args: Any) -> None:
        self._run = forward_backward_func
        self._args = args
        self._last_planned: tuple[int | None, CostModel | None] = None, None
        self._ahead: Callable[[], Batches | None] = lambda: None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        adjust_tensor_shapes_fn: Any = None,
        **others: Any,
    ) -> Any:
        """Draw ``num_microbatches`` ordinary micro-batches, pack their samples and run the rows.

        Args: those of Megatron's function. ``collect_non_loss_data`` must be False,
        ``adjust_tensor_shapes_fn`` None; ``micro_batch_size`` is not used. Returns, on the last
        stage, the loss function's report of every packed micro-batch.

        Raises:
            DynamicBatchArgumentError: an argument that packed rows do not support.
            CollectiveError: on every rank, if data, planning or the loss function failed on any.
            PipelineFailedError: on every rank that can be reached, if the model raised on any.
        """
        del micro_batch_size
        _check_options(collect_non_loss_data, adjust_tensor_shapes_fn)
        use_packed_batches(forward_step_func)  # evaluation may have a forward step of its own
        chunks = model_chunks(model)
        started, job = time.monotonic(), job_of(self._args)
        operation = "evaluation" if forward_only else "training"
        drawn = outcome_of(lambda: draw_batches(data_iterator, num_microbatches))
        prepared = learnt = None
        ahead = None if forward_only else self._plans_ahead(job)
        cost_model = None if forward_only else self._cost_model_of_rerun()
        # The first step is planned in line, where ranks compare that all plan ahead.
        if ahead is not None and ahead.has_begun:
            is_of_these = are_same(drawn, self._ahead)
            prepared, learnt = ahead.take(job, chunks, cost_model, is_of_these=is_of_these)
        if prepared is None:
            prepared = self._prepared(
                job,
                operation,
                None if ahead is None else ahead.plan,
                chunks=chunks,
                drawn=drawn,
                cost_model=cost_model,
                learnt=learnt,
                forward_only=forward_only,
            )
        if not forward_only:
            self._last_planned = self._iteration, prepared.schedule.cost_model
        # Every model chunk of a rank runs every row: only the first counts its tokens.
        rows = [
            PackedRows(stage, counts_flops=not forward_only and number == 0)
            for number, stage in enumerate(prepared.iterators(len(chunks)))
        ]
        between = None
        # In a rerun the step after has begun already.
        if ahead is not None and cost_model is None and not self._is_last:
            ahead.connect(job)
            between = after_first_pass(
                functools.partial(
                    self._begin_next, ahead, job, chunks, data_iterator, num_microbatches
                )
            )
        failed: list[Exception] = []
        later = LossesOfRows(prepared.token_weights, undo=prepared.token_weights[0])
        ready, begun = time.monotonic(), mark()
        losses, _ = run_pipeline(
            job,
            chunks,
            prepared,
            operation,
            with_deferred_errors(forward_step_func, failed, job, later.of),
            forward_only=forward_only,
            rows=rows,
            schedule=self._run,
            inside=between,
            **others,
        )
        if forward_only:
            job.agree_after_pipeline(operation, failed)
            return losses
        figures = StepFigures(prepared.schedule, most_left_bytes(job))
        agreed = job.agree_after_pipeline(operation, failed, figures.own, figures.says)
        # Megatron divides by the micro-batches that it was asked for; other rows were run.
        compat.scale_moe_metrics(num_microbatches / len(prepared.rows))
        later.log(num_microbatches)
        self._log(job, figures, agreed, chunks, ready - started, (begun, mark()))
        return losses

    def _log(
        self,
        job: Job,
        figures: StepFigures,
        agreed: Agreement[Any],
        chunks: list[Any],
        plan_seconds: float,
        run: tuple[Any, Any],
    ) -> None:
        made = figures.statistics(agreed)
        shape = model_shape(self._args.padded_vocab_size, get_model_config(chunks[0]))
        record_step(
            made,
            plan_seconds=plan_seconds,
            run=run,
            memory=predicted_memory(made, figures.problem, shape),
            left_bytes=figures.left_bytes(agreed) if job.options.splits_backward else None,
            learnt=keep_learnt_costs(self._args, job, figures.predicted_seconds(agreed)),
            log_all=getattr(self._args, "dynamic_batch_log_all", False),
        )

    def _prepared(
        self,
        job: Job,
        operation: str,
        plan: Callable[[PlanRequest], StepPlan] | None,
        *,
        chunks: list[Any],
        drawn: Callable[[], Batches | None],
        cost_model: CostModel | None = None,
        learnt: LearntCosts | None = None,
        checked: Settings | None = None,
        forward_only: bool = False,
    ) -> PreparedStep:
        """Plan and collate the step; a collective over all ranks."""
        # One step needs fewer agreements: prepare() compares what is left to compare.
        request = RolloutRequest(
            job,
            chunks,
            STOCK_SCHEMA,
            lambda drawn: self._read(drawn(), vocabulary_size(chunks)),
            cost_model=cost_model,
            forward_only=forward_only and job.options.has_own_forward_plan,
            one_step=True,
            learnt=learnt,
            checked=checked,
            plan=plan,
        )
        schedule = begin_step(request, drawn)
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
    def _is_last(self) -> bool:
        iteration = self._iteration
        return iteration is not None and iteration + 1 >= (self._args.train_iters or 0)

    def _begin_next(
        self,
        ahead: PlansAhead,
        job: Job,
        chunks: list[Any],
        data_iterator: Any,
        num_microbatches: int,
    ) -> None:
        """Read the next step's samples, should it have as many micro-batches, and have it made.

        What reading raises is raised when they are drawn.
        """
        drawn = self._ahead = outcome_of(lambda: batches_ahead(data_iterator, num_microbatches))
        # What is known of costs now; more is learnt before the step.
        settings = Settings.of(job, chunks, None, None, forward_only=False)
        make = functools.partial(self._prepared, chunks=chunks, drawn=drawn, checked=settings)
        ahead.begin(job, make)

    @property
    def _iteration(self) -> int | None:
        iteration: int | None = getattr(self._args, "curr_iteration", None)
        return iteration

    def _cost_model_of_rerun(self) -> CostModel | None:
        """The cost model of this step's first run, where Megatron reruns the step; else None.

        Costs learnt since would give another plan, so other rounding than the rerun compares.
        """
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
        # All samples are one step, even where batch-size ramp-up draws fewer than
        # --global-batch-size.
        return data | {"dynamic_global_batch_size": None}


def _check_options(collect_non_loss_data: bool, adjust_tensor_shapes_fn: Any) -> None:
    if collect_non_loss_data:
        raise DynamicBatchArgumentError(
            "process_non_loss_data_func runs the model on one rank, planning needs all: unset it, "
            "or --use-dynamic-batch-size"
        )
    if adjust_tensor_shapes_fn is not None:
        raise DynamicBatchArgumentError(
            "adjust_tensor_shapes_fn expects rows of seq_length: unset it, or "
            "--use-dynamic-batch-size"
        )
