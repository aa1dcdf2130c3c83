"""Megatron's forward-backward function over packed rows, for stock training loops.

`wrap_forward_backward` wraps what ``get_forward_backward_func`` returned: it draws the ordinary
micro-batches from the stock iterators, plans their unpadded samples together with all other ranks,
and runs Megatron's own function over the packed rows:

    8 ordinary micro-batches -> 8 samples -> 3 packed rows -> 3 reports of (loss sum, tokens)

The training loop is unchanged: ``num_microbatches_calculator``, consumed samples, learning rate and
checkpoints count as before, and the rerun state machine replays the same draws. The reports have
the same sums as those of the ordinary micro-batches; a placeholder's are 0 and 0. Statistics of the
step's plan, which the README explains, are kept until stock code logs; times, balance and learnt
costs are in what ``--dynamic-batch-record`` writes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.values import describe
from mcore_batching.integrations.megatron_lm.arguments import NO_NON_LOSS_DATA, is_on
from mcore_batching.integrations.megatron_lm.script_batches import (
    FLAG,
    PackedRows,
    use_packed_batches,
)
from mcore_batching.integrations.megatron_lm.stock_steps import StockSteps, num_truncated
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError, refuse
from mcore_batching.megatron.job import Job, job_of
from mcore_batching.megatron.loss_shares import attached, check_trains, summed_over_ranks
from mcore_batching.megatron.mtp import LaterLosses, LossesOfRows
from mcore_batching.megatron.run_pipeline import row_params, run_pipeline
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import step_statistics

PREFIX = "batching/"

# Values of the training step that ran last, for Megatron's log line, TensorBoard and W&B.
_last_step: dict[str, float] = {}


def wrap_forward_backward(forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``get_forward_backward_func`` returned, over packed rows.

    A function of the same keywords; the argument itself without ``--use-dynamic-batch-size``.
    """
    from megatron.training import get_args

    args = get_args()
    if not is_on(args):
        return forward_backward_func
    return functools.partial(run_packed, forward_backward_func, args, StockSteps(args))


def run_packed(
    run: Callable[..., Any],
    args: Any,
    steps: StockSteps,
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

    ``run`` is Megatron's forward-backward function, with the further parameters of this one.

    Returns, on the last stage, the loss function's report of every packed micro-batch.
    """
    del micro_batch_size
    problems = [NO_NON_LOSS_DATA] if collect_non_loss_data else []
    if adjust_tensor_shapes_fn is not None:
        problems.append("adjust_tensor_shapes_fn expects rows of seq_length: unset it")
    refuse(FLAG, problems)
    use_packed_batches(forward_step_func)  # evaluation may have a forward step of its own
    chunks = model_chunks(model)
    started, job = time.monotonic(), job_of(args)
    prepared = steps.made(job, chunks, data_iterator, num_microbatches, forward_only=forward_only)
    # All chunks run every row, so the first alone counts FLOPs; and none in evaluation, after
    # which stock code does not reset its count.
    rows = [
        PackedRows(of_chunk, counts_flops=not forward_only and number == 0)
        for number, of_chunk in enumerate(prepared.iterators(len(chunks)))
    ]
    is_sft = bool(getattr(args, "sft", False))
    operation = "evaluation" if forward_only else "training"
    failed: list[Exception] = []
    later = LossesOfRows(prepared.token_weights, undo=prepared.token_weights[0])
    ready = time.monotonic()
    losses, _ = run_pipeline(
        job,
        chunks,
        prepared,
        operation,
        with_deferred_errors(forward_step_func, failed, job, later.of),
        forward_only=forward_only,
        rows=rows,
        schedule=run,
        **others,
    )
    # Context-parallel ranks read the same rows, and may each be a replica here.
    counts = is_sft and not forward_only and parallel_state.get_context_parallel_rank() == 0
    with job.agreement_after_pipeline(operation, failed) as agree:
        drawn = steps.drawn or ()
        truncated = agree.sum("truncated rows", num_truncated(drawn) if counts else 0)
    if forward_only:
        return _one_report(losses) if is_sft and losses else losses
    record_step(
        prepared.schedule,
        plan_seconds=ready - started,
        truncated=truncated.value if is_sft else None,
    )
    # Megatron divides by the micro-batches that it was called with; other rows were run.
    compat.scale_moe_metrics(
        num_microbatches,
        rows=_rows_of_replica(prepared.schedule),
        passes=prepared.num_rows,
    )
    later.log(num_microbatches)
    return losses


def with_deferred_errors(
    forward_step_func: Callable[..., Any],
    failed: list[Exception],
    job: Job,
    later_of: Callable[[PackedMicroBatch], LaterLosses | None],
) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """The forward step, with errors of its loss function in ``failed`` instead of raised.

    The micro-batch counts as 0, and all ranks raise together at the end. ``later_of`` gives a row's
    losses of multi-token prediction; None leaves its layers out.
    """

    def forward_step(data_iterator: PackedRows, chunk: Any, *rest: Any, **options: Any) -> Any:
        with row_given(data_iterator, chunk, later_of):
            output, loss_function = forward_step_func(data_iterator, chunk, *rest, **options)

        def loss(output_tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            try:
                result = loss_function(output_tensor, *arguments, **keywords)
                check_loss(result)
                share, count, report = result
                if output_tensor.requires_grad and not share.requires_grad:
                    check_trains(share, int(count), output_tensor)
                    # Of a constant 0 the stages before wait for a gradient, too.
                    result = attached(share, output_tensor), count, report
            except Exception as exception:
                # Raised in the middle of the pipeline, it would leave the other ranks waiting.
                job.defer(failed, exception, data_iterator.current)
                # Attached to the graph: the stages before wait for a gradient of this output.
                zero = output_tensor.float().sum() * 0.0
                return zero, torch.zeros((), dtype=torch.int, device=zero.device), {}
            return result

        return output, loss

    return forward_step


def _one_report(reports: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """One report in place of all ranks' and rows', for evaluation under ``--sft``.

    Stock code takes a mean over reports there, in which a placeholder would count, and each token
    by what shares its row. A collective over the last stage's data- and context-parallel ranks.
    """
    sums = summed_over_ranks(reports, [*reports[0]])
    return [{name: each.float() for name, each in sums.items()}] if sums else []


def _rows_of_replica(schedule: MicroBatchSchedule) -> float:
    """The step's rows, placeholders included, over the replicas of the model."""
    if schedule.config.max_context_parallel is None:
        return len(schedule.steps[0])
    plan, _ = schedule.step_plan(0)
    # Each rank of a row has a part of it.
    rows: float = sum(1 / size for of_rank in plan.context_parallel or () for size in of_rank)
    return rows / plan.dims.data_parallel


def check_loss(result: Any) -> None:
    """Refuse a loss that depends on how samples are packed, such as a micro-batch's mean."""
    problem = _problem_of(result)
    if problem:
        raise DynamicBatchArgumentError(f"the loss function must {problem}")


def _problem_of(result: Any) -> str | None:
    if not isinstance(result, tuple) or len(result) != 3:
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        return f"return (sum over tokens, number of tokens, report), got {found}"
    loss, _, report = result
    if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.is_floating_point():
        # An integer has no backward pass: the stages before would wait for its gradient.
        return f"return a sum over tokens, a float tensor of one value, got {describe(loss)}"
    if not isinstance(report, Mapping):
        kind = type(report).__name__
        return f"return its report as a dict of [sum, number of tokens], got {kind}"
    single = [key for key, value in report.items() if torch.is_tensor(value) and value.numel() != 2]
    if single:
        return f"report {', '.join(single)} as [sum, number of tokens], got a single value"
    return None


def row_given(
    data_iterator: PackedRows,
    chunk: Any,
    later_of: Callable[[PackedMicroBatch], LaterLosses | None],
) -> RemovableHandle:
    """Pass the model the row's own parameters in place of the script's, in a ``with`` block.

    These lack the offsets on the host and the row's group, and name the padded length of a sample
    from 0.19 on, at which layers of experts cut a row.
    """
    config = get_model_config(chunk)

    def with_row(_: Any, arguments: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        row = data_iterator.current
        own = {} if row is None else {"packed_seq_params": row_params(config, row, later_of(row))}
        return arguments, inputs | own

    handle: RemovableHandle = unwrap_model(chunk).register_forward_pre_hook(
        with_row, with_kwargs=True
    )
    return handle  # which removes the hook at the block's end


def record_step(
    schedule: MicroBatchSchedule, *, plan_seconds: float, truncated: int | None = None
) -> None:
    """Keep the figures of the training step that has just run: the schedule's only one.

    ``truncated`` counts rows of ``--sft`` that were; None: other data.
    """
    made = step_statistics(*schedule.step_plan(0))
    _last_step.clear()
    _last_step.update(
        {
            "fill": made.fill,
            "padding": made.padding,
            "micro-batches a rank": made.num_microbatches,
            "time over floor": made.time_over_floor,
            "plan seconds": plan_seconds,
        }
    )
    if truncated is not None:
        _last_step["truncated"] = truncated


def with_batching_statistics(loss_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that ``train_step`` returned, with ``batching/...`` entries for stock code to log.

    A copy; without them if it is empty, as but on the last stage, or no step was packed.
    """
    if not loss_dict:
        return {}
    device = next(iter(loss_dict.values())).device
    return dict(loss_dict) | {
        f"{PREFIX}{name}": torch.tensor([float(value)], device=device)
        for name, value in _last_step.items()
    }
