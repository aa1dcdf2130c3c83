"""`train_step`: one optimizer step over its micro-batches, exact whatever the packing.

The loss function returns shares (see `mcore_batching.batch.loss`), which add up to the step's loss
over all micro-batches of all ranks. Megatron's schedules and its data-parallel wrapper divide
losses in ways of their own; `train_step` multiplies by exactly what they divide by: with
``calculate_per_token_loss`` the step's tokens, counted as micro-batches report them, without it the
number of micro-batches and of ranks.

Megatron's scheduler counts an optimizer step as a global batch of samples, however many it held.
So does `train_step`: turns of a trajectory, samples of a short last step and padding samples change
neither the learning rate nor the consumed samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.megatron import compat
from mcore_batching.megatron.iterator import DataIterator, rollout_of
from mcore_batching.megatron.job import Job, job_of
from mcore_batching.megatron.logits import tensors_of
from mcore_batching.megatron.loss_shares import (
    CollectedShares,
    Gradients,
    WatchedTotals,
    agreed_shares,
    attached,
    check_trains,
    checked_shares,
    is_checked,
    summed_over_ranks,
    warn_of_unread_totals,
)
from mcore_batching.megatron.mtp import LaterLosses
from mcore_batching.megatron.plan import planned
from mcore_batching.megatron.prepare import PreparedStep, collated, collating
from mcore_batching.megatron.run_pipeline import run_for_losses, run_pipeline
from mcore_batching.megatron.topology import is_last_stage, model_chunks
from mcore_batching.planning import ConfigError, at_least

_OPERATION = "train_step"

LossFunction = Callable[[Any, PackedMicroBatch, StepTotals], tuple[Tensor, Mapping[str, Tensor]]]
"""``(logits, micro_batch, totals) -> (share of the loss, name to share of a metric)``; logits are
`FusedLogits` under ``--dynamic-batch-fuse-output-layer``."""


@dataclasses.dataclass(frozen=True)
class TrainStepResult:
    """The outcome of one optimizer step.

    Attributes:
        metrics: name to the mean over the step, ``loss`` (the step's own, whatever the loss
            function names so) among them; on ranks of the last pipeline stage, empty elsewhere.
        grad_norm: norm of all gradients before clipping; None where the optimizer gives none.
        update_successful: False if the step was skipped, which leaves weights, optimizer and
            scheduler alone: by the optimizer (overflow in mixed precision), on request for what is
            not finite, or because no rank has a sample, padding samples aside.
        totals: what the samples of the step add up to, over all ranks.
        num_microbatches: forward passes of this rank, placeholders included.
        consumed_samples: to be added to Megatron's ``args.consumed_train_samples``, skipped or not:
            0 without any sample, else the increment; None where it is not known.
    """

    metrics: dict[str, float]
    grad_norm: float | None
    update_successful: bool
    totals: StepTotals
    num_microbatches: int
    consumed_samples: int | None


def train_step(
    loss_function: LossFunction,
    args: Any,
    model: list[Any],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    optimizer: Any,
    opt_param_scheduler: Any = None,
    *,
    step: int = 0,
    increment: int | None = None,
) -> TrainStepResult:
    """Forward, backward and one update over the micro-batches of one optimizer step.

    A collective over all ranks; what fails on one is raised on all. A step of no samples but
    padding updates nothing, or momentum would move weights; one without trainable tokens does.

    Args:
        loss_function: called on the last stage with the logits
            ``[1, local tokens, local vocabulary]`` (float32 unless
            ``--dynamic-batch-logits-in-model-dtype``), the micro-batch and the step's totals;
            returns its share of the loss and of metrics by name, each a tensor of one value, the
            same names for every micro-batch on every rank, placeholders included.
        args: Megatron's arguments.
        model: this rank's model chunks in Megatron's data-parallel wrapper.
        data_iterator: from `get_data_iterator`, as ``num_microbatches`` is.
        optimizer: Megatron's optimizer.
        opt_param_scheduler: Megatron's scheduler, advanced by `increment` if weights were updated.
        step: which of the schedule's steps.
        increment: samples that the step counts as in the scheduler's ``lr_decay_steps``, over all
            ranks: where a trajectory has several, prompts per step times trajectories per prompt.
            None: the global batch size that cut the steps, or beside ``steps`` of your own
            ``rollout_data["dynamic_global_batch_size"]``.

    Raises:
        ConfigError: `increment` is not an integer of 1 or more, or a scheduler needs it; a
            `CollationFailedError` where not on all ranks.
        CollationFailedError: arguments could not be read, or samples not be collated.
        ForwardFailedError: the loss function raised, or returned no tensors of one value, a
            detached loss of trainable tokens, or other names than elsewhere; nothing is updated.
        NonFiniteError: a loss or gradient is NaN or infinite; nothing is updated.
        PipelineFailedError: the model, the schedule or the optimizer raised; on all ranks that can
            be reached.
    """
    job = job_of(args)
    # What these iterators are not is refused below, as an error of all ranks.
    with contextlib.suppress(TypeError):
        planned(rollout_of(data_iterator), step)
    with collating(job, _OPERATION) as agree:
        if not callable(loss_function):
            raise TypeError(f"loss_function must be a function, got {type(loss_function).__name__}")
        _require_megatrons(model_chunks(model), optimizer)
        schedule = rollout_of(data_iterator)
        schedule.check_step(step, num_microbatches)
        prepared = collated(agree, job, model, schedule, step)
        counted = schedule.samples.share.samples_per_step
        if increment is not None:
            counted = at_least("increment", increment, 1, ConfigError)
        elif counted is None and opt_param_scheduler is not None:
            raise ConfigError(
                "no global_batch_size (--global-batch-size) says how many samples a step is; set "
                "increment to what lr_decay_steps counts a step as: prompts times trajectories of "
                "each, or 1 where it counts steps"
            )
        agree.same("increment", counted)
    # Only now: what is no model has been refused above, on every rank.
    chunks = model_chunks(model)
    gradients = Gradients(chunks) if is_checked(job.options, optimizer) else None
    # Hooks first: measuring wraps the one that adds up gradients over ranks.
    inside = [_hooks_set(chunks, optimizer)]
    if gradients is not None:
        inside.append(gradients.measured())
    made = _forward_backward(loss_function, job, chunks, prepared, inside)
    # Where warnings are errors it raises, and the other ranks wait for this one below.
    with job.watch.reporting(_OPERATION):
        warn_of_unread_totals(made, prepared)

    # Before the update, which no rank may do if another one's loss or gradient is at fault.
    names, are_finite = agreed_shares(job, made, prepared, gradients)
    with job.watch.reporting(f"{_OPERATION}, after the pipeline"):
        sums = summed_over_ranks(made.shares, names) if is_last_stage() else {}
        values = torch.stack([*sums.values()]).tolist() if sums else []
        # Without a sample there is no gradient, but weight decay and momentum would move weights,
        # and a step of padding alone is no step of the scheduler's.
        if not prepared.totals.num_samples:
            counted = 0
        update_successful, grad_norm = False, None
        if prepared.totals.num_samples and are_finite:
            update_successful, grad_norm, _ = optimizer.step()
            if update_successful and opt_param_scheduler is not None:
                opt_param_scheduler.step(increment=counted)
        else:  # not left behind: a later step must not use them by mistake
            _zero_gradients(chunks, optimizer)
        grad_norm = None if grad_norm is None else float(grad_norm)
    return TrainStepResult(
        metrics=dict(zip(sums, values, strict=True)),
        grad_norm=grad_norm,
        update_successful=bool(update_successful),
        totals=prepared.totals,
        num_microbatches=prepared.num_rows,
        consumed_samples=counted,
    )


def _require_megatrons(model: list[Any], optimizer: Any) -> None:
    """Refuse a model or optimizer over which Megatron would fail in the middle of a step."""
    if not all(hasattr(chunk, "zero_grad_buffer") for chunk in model):
        kinds = ", ".join(type(chunk).__name__ for chunk in model)
        raise TypeError(f"model must be wrapped in Megatron's DistributedDataParallel, got {kinds}")
    # By what a step calls: Megatron has several optimizers without a base of their own.
    if not all(hasattr(optimizer, name) for name in ("zero_grad", "scale_loss", "step")):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be Megatron's, from get_megatron_optimizer, got {kind}")


@contextlib.contextmanager
def _hooks_set(model: list[Any], optimizer: Any) -> Iterator[None]:
    """Gradients zeroed and, inside the block, the hooks of ``megatron.training`` set where they are
    not set."""
    _zero_gradients(model, optimizer)
    config = get_model_config(model[0])
    hooks = {
        "grad_scale_func": optimizer.scale_loss,
        # Without it no gradient is added up over ranks: the schedule leaves that to this hook.
        "finalize_model_grads_func": finalize_model_grads,
    }
    # Else the overlapping reduction starts after the first micro-batch, without the others'.
    if getattr(getattr(model[0], "ddp_config", None), "overlap_grad_reduce", False):
        no_sync = [chunk.no_sync for chunk in model]
        hooks["no_sync_func"] = no_sync if len(no_sync) > 1 else no_sync[0]
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            # For the step alone: the next may be another optimizer's, with another scale.
            if getattr(config, name) is None:
                stack.enter_context(compat.replaced(config, name, hook))
        yield


def _zero_gradients(model: list[Any], optimizer: Any) -> None:
    # Two places: the wrapper's buffers, in which gradients are made, and the optimizer's.
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def _forward_backward(
    loss_function: LossFunction,
    job: Job,
    model: list[Any],
    prepared: PreparedStep,
    inside: Sequence[AbstractContextManager[None]],
) -> CollectedShares:
    """Gradients of the step in the model's buffers, and what the loss function did meanwhile."""
    failed: list[Exception] = []
    # Made anew for each step, so that reading them is noticed once a step.
    totals = WatchedTotals(**vars(prepared.totals))
    # Megatron's divisors of losses and of those of later tokens; multiplied in, they cancel.
    per_token = bool(get_model_config(model[0]).calculate_per_token_loss)
    # A step without trainable tokens has shares of 0, whatever they are multiplied by.
    undo = undo_later = max(prepared.totals.num_tokens, 1)
    if not per_token:
        # The wrapper averages over context-parallel ranks, too, but the schedule has already
        # multiplied losses, and losses alone, by their number.
        undo = prepared.num_rows * parallel_state.get_data_parallel_world_size()
        undo_later = undo * parallel_state.get_context_parallel_world_size()
    is_fused = job.options.fuse_output_layer

    def forward_step(
        rows: Iterator[PackedMicroBatch], chunk: Any, *unused: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
        row = next(rows)
        later = LaterLosses(row, prepared.token_weights, undo_later, is_fused=is_fused)
        made, logits_of = run_for_losses(job, chunk, row, later, fused=is_fused)

        def loss(output: Tensor) -> tuple[Any, ...]:
            reported: dict[str, Tensor] = {}
            logits = logits_of(output)
            try:
                made = loss_function(logits, row, totals)
                share, metrics = checked_shares(made, output.device)
                check_trains(share, row.owned_num_tokens, *tensors_of(logits))
                # The step's own last: what is not finite is found in it.
                reported = {**metrics, "loss": share, **later.named_shares()}
                # Copies: a view would keep the logits in memory until the step ends.
                reported = {name: value.detach().clone() for name, value in reported.items()}
                scaled = attached(share, *tensors_of(logits)) * undo
            except Exception as exception:
                # The pipeline has to run dry before all ranks can raise it.
                job.defer(failed, exception, row)
                # Attached like any other: the stages before this one wait for its gradient.
                nothing = output.new_zeros((), dtype=torch.float32)
                scaled = attached(nothing, *tensors_of(logits))
            if per_token:
                # Given three values, Megatron's schedule does not divide by the micro-batches. It
                # adds the counts up over data- and context-parallel ranks, so each gives its own.
                owned = row.owned_num_tokens
                count = torch.full((), owned, dtype=torch.int, device=output.device)
                return scaled, count, reported
            return scaled, reported

        return made, loss

    collected, temperatures = run_pipeline(
        job, model, prepared, _OPERATION, forward_step, forward_only=False, inside=inside
    )
    return CollectedShares(collected, failed, temperatures, totals.were_read)
