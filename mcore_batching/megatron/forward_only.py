"""`forward_only`: log-probs and the like for all samples, in the order they came in.

Guarantees
- Every real sample of the rank has exactly one output, at its own index; a placeholder's output
  is dropped. A function that returns too few or too many is an error, never a `None`.
- A rank without samples returns empty lists, and hangs nobody.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import OrderError, PackedMicroBatch, restore_order
from mcore_batching.megatron.data_iterator import DataIterator
from mcore_batching.megatron.forward import raise_together, run_chunk
from mcore_batching.megatron.schedule import MicroBatchSchedule, PreparedRow
from mcore_batching.megatron.topology import is_last_stage, model_chunks
from mcore_batching.planning import sample_multiple_tokens


@torch.no_grad()
def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: list[Any],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """Run all micro-batches forward and collect what ``f`` makes of the logits.

    A collective over all ranks. The model is in evaluation mode meanwhile.

    Args:
        f: called on the last stage as ``f(logits, args=, unconcat_tokens=, total_lengths=,
            response_lengths=, with_entropy=)``, and with ``micro_batch=`` (the
            `PackedMicroBatch`) if it takes that; keywords that it does not take are left out.
            Returns a dict of lists with one tensor a sample of the micro-batch (one for a
            placeholder), or a pair whose second element is such a dict.
        args: Megatron's arguments.
        model: this rank's model chunks.
        data_iterator: from `get_data_iterator`.
        num_microbatches: from `get_data_iterator`; not read under
            ``--dynamic-batch-forward-only-plan own``, where forward passes have a plan of their
            own.
        store_prefix: put before every key of the result.

    Returns:
        on the last stage, for each key of ``f`` one tensor a sample of this rank, in the order of
        the rollout data; ``{}`` on other stages.

    Raises:
        CollationFailedError: on every rank, if any could not collate.
        ForwardFailedError: on every rank, if ``f`` raised on any, or did not return one output a
            sample (an `OrderError`).
        ValueError: ``f`` finds the samples' tokens in the logits by their lengths, as slime's
            functions do, and this layout pads samples.
    """
    model = model_chunks(model)
    schedule = data_iterator[0].for_forward_passes(args, model)
    if schedule is not data_iterator[0].schedule:
        num_microbatches = schedule.num_microbatches
    f = _with_keywords_it_takes(f, schedule)
    failed: list[Exception] = []
    config = get_model_config(model[0])

    def forward_step(
        rows: Iterator[PreparedRow], chunk: Any, *unused: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        del unused
        row = next(rows).row

        def collect(output: Tensor, non_loss_data: bool = True) -> dict[str, list[Tensor]]:
            del non_loss_data
            offered = {
                "args": args,
                "unconcat_tokens": row.fields["tokens"],
                "total_lengths": row.total_lengths,
                "response_lengths": row.response_lengths,
                "with_entropy": getattr(args, "use_rollout_entropy", False),
                "micro_batch": row,
            }
            try:
                return _real_outputs(f(output, **offered), row)
            except Exception as exception:
                failed.append(exception)
                return {}

        return run_chunk(chunk, row), collect

    was_training = [chunk.training for chunk in model]
    timers, config.timers = config.timers, None
    for chunk in model:
        chunk.eval()
    collected: list[dict[str, list[Tensor]]] = []
    try:
        for step, count in enumerate(num_microbatches):
            prepared = schedule.prepare(step, count)
            rows = prepared.iterators(len(model))
            collected += get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=rows if len(rows) > 1 else rows[0],
                model=model if len(model) > 1 else model[0],
                num_microbatches=count,
                seq_length=getattr(args, "seq_length", 1),  # not read: lengths vary
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
            raise_together(schedule.consensus, failed)
    finally:
        config.timers = timers
        for chunk, training in zip(model, was_training, strict=True):
            chunk.train(training)
    if not is_last_stage():
        return {}
    indices = [i for micro_batch in schedule.micro_batches for i in micro_batch]
    return {
        f"{store_prefix}{key}": restore_order(
            [value for outputs in collected for value in outputs[key]],
            indices,
            schedule.num_samples,
        )
        for key in collected[0]
    }


def _with_keywords_it_takes(
    f: Callable[..., Any], schedule: MicroBatchSchedule
) -> Callable[..., Any]:
    """``f`` for all keywords that are offered, with logits in the layout that it expects.

    A function that does not take ``micro_batch`` expects the samples' tokens one behind the other,
    padded to twice the context-parallel size at most: slime's layout.

    Raises:
        ValueError: that layout cannot be had.
    """
    takes = inspect.signature(f).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    size = schedule.dims.context_parallel
    padded_to = sample_multiple_tokens(schedule.dims, schedule.config)
    by_lengths = "micro_batch" not in takes
    if by_lengths and size > 1 and padded_to != 2 * size:
        raise ValueError(
            f"{getattr(f, '__name__', f)} does not take micro_batch, so it finds tokens by lengths "
            f"padded to {2 * size}, and this layout pads samples to {padded_to}: let it take "
            "micro_batch (gather_response and response_log_probs do), or turn off sequence "
            "parallelism and --dynamic-batch-pad-each-to"
        )

    def with_offered(logits: Tensor, **offered: Any) -> Any:
        if by_lengths and size == 1 and padded_to > 1:
            logits = logits[:, ~offered["micro_batch"].padding_mask[0]]
        return f(logits, **{k: v for k, v in offered.items() if takes_all or k in takes})

    return with_offered


def _real_outputs(made: Any, row: PackedMicroBatch) -> dict[str, list[Tensor]]:
    """What ``f`` returned for the real samples of a row.

    Raises:
        OrderError: not one output a sample.
    """
    outputs: dict[str, list[Tensor]] = made[1] if isinstance(made, tuple) else made
    expected = len(row.total_lengths)
    for key, values in outputs.items():
        if len(values) != expected or any(value is None for value in values):
            raise OrderError(
                f"the function given to forward_only returned {len(values)} values for "
                f"{key!r} in a micro-batch of {expected} samples; it must return one tensor for "
                "each, a placeholder's included"
            )
    return {key: list(values)[: row.num_samples] for key, values in outputs.items()}
