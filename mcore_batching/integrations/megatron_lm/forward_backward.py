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

import time
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.integrations.megatron_lm.arguments import FLAG, NO_NON_LOSS_DATA, is_on
from mcore_batching.integrations.megatron_lm.learnt_costs import keep_learnt_costs
from mcore_batching.integrations.megatron_lm.packed_batches import packed_rows
from mcore_batching.integrations.megatron_lm.reading_ahead import outcome_of
from mcore_batching.integrations.megatron_lm.script_batches import use_packed_batches
from mcore_batching.integrations.megatron_lm.script_forward_step import with_deferred_errors
from mcore_batching.integrations.megatron_lm.step_log import (
    LEFT_BYTES,
    PREDICTED_SECONDS,
    own_figures,
    record_step,
    statistics_of,
)
from mcore_batching.integrations.megatron_lm.stock_steps import StockSteps
from mcore_batching.integrations.megatron_lm.unpadding import draw_batches
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import refuse
from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.learning.pass_times import mark
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.split_backward.plan import most_left_bytes
from mcore_batching.megatron.step.multi_token import LossesOfRows
from mcore_batching.megatron.step.run_pipeline import run_pipeline
from mcore_batching.megatron.topology import model_chunks, model_shape
from mcore_batching.planning.plans.memory import predicted_memory

ForwardBackward = Callable[..., Any]


def wrap_forward_backward(forward_backward_func: ForwardBackward) -> ForwardBackward:
    """What ``get_forward_backward_func`` returned, over packed rows.

    A function of the same keywords; the argument itself without ``--use-dynamic-batch-size``.
    """
    from megatron.training import get_args

    args = get_args()
    if not is_on(args):
        return forward_backward_func
    return PackedForwardBackward(forward_backward_func, args)


class PackedForwardBackward:
    """A forward-backward function that draws ordinary micro-batches and runs packed ones."""

    def __init__(self, forward_backward_func: ForwardBackward, args: Any) -> None:
        self._run = forward_backward_func
        self._args = args
        self._steps = StockSteps(args)

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

        Returns, on the last stage, the loss function's report of every packed micro-batch.

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
        drawn = outcome_of(lambda: draw_batches(data_iterator, num_microbatches))
        prepared = self._steps.made(job, chunks, drawn, forward_only=forward_only)
        next_step = None
        if not forward_only:
            next_step = self._steps.making_next(job, chunks, data_iterator, num_microbatches)
        rows = packed_rows(prepared.iterators(len(chunks)), counts_flops=not forward_only)
        operation = "evaluation" if forward_only else "training"
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
            inside=next_step,
            **others,
        )
        if forward_only:
            job.agree_after_pipeline(operation, failed)
            return losses
        self._log(job, chunks, prepared.schedule, failed, (begun, mark()), ready - started)
        # Megatron divides by the micro-batches that it was asked for; other rows were run.
        compat.experts.scale_moe_metrics(num_microbatches / len(prepared.rows))
        later.log(num_microbatches)
        return losses

    def _log(
        self,
        job: Job,
        chunks: list[Any],
        schedule: MicroBatchSchedule,
        failed: list[Exception],
        run: tuple[Any, Any],
        plan_seconds: float,
    ) -> None:
        """End a training step on all ranks, or raise on all what failed on any, and log it."""
        left_bytes = most_left_bytes(job)
        agreed = job.agree_after_pipeline(
            "training",
            failed,
            lambda: own_figures(schedule, left_bytes),
            lambda own: Statement(figures=own[1]),
        )
        made, figures = statistics_of(schedule, agreed), agreed.figures
        shape = model_shape(self._args.padded_vocab_size, get_model_config(chunks[0]))
        record_step(
            made,
            plan_seconds=plan_seconds,
            run=run,
            memory=predicted_memory(made, agreed.result[0], shape),
            left_bytes=int(figures[LEFT_BYTES]) if job.options.splits_backward else None,
            learnt=keep_learnt_costs(self._args, job, float(figures[PREDICTED_SECONDS])),
            log_all=getattr(self._args, "dynamic_batch_log_all", False),
        )


def _check_options(collect_non_loss_data: bool, adjust_tensor_shapes_fn: Any) -> None:
    problems = [NO_NON_LOSS_DATA] if collect_non_loss_data else []
    if adjust_tensor_shapes_fn is not None:
        problems.append(f"adjust_tensor_shapes_fn expects rows of seq_length: unset it, or {FLAG}")
    refuse(FLAG, problems)
