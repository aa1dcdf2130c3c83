"""A script's forward step on packed rows: its errors are deferred, and its loss must be a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.fields.value_shapes import describe
from mcore_batching.integrations.megatron_lm.packed_batches import PackedRows
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.job.row_groups import row_group
from mcore_batching.megatron.step.model_inputs import changed_inputs, padding_mask
from mcore_batching.megatron.step.multi_token import LaterLosses, predict_later_tokens


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
            except Exception as exception:
                # Raised in the middle of the pipeline, it would leave the other ranks waiting.
                job.defer(failed, exception, data_iterator.current)
                # Attached to the graph: the stages before wait for a gradient of this output.
                zero = output_tensor.float().sum() * 0.0
                return zero, torch.zeros((), dtype=torch.int, device=zero.device), {}
            return result

        return output, loss

    return forward_step


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


@contextlib.contextmanager
def row_given(
    data_iterator: PackedRows,
    chunk: Any,
    later_of: Callable[[PackedMicroBatch], LaterLosses | None] = lambda row: None,
) -> Iterator[None]:
    """Pass the model what stock scripts do not: host offsets, the row's group, a padding mask, and
    what multi-token prediction reads."""
    is_routed = bool(get_model_config(chunk).num_moe_experts)

    def with_row(inputs: dict[str, Any]) -> dict[str, Any]:
        row, params = data_iterator.current, inputs.get("packed_seq_params")
        if row is not None and params is not None:
            # Mamba layers end their state at them; attention without Transformer Engine would have
            # to wait for the device to read them there.
            compat.packed_rows.give_offsets(params, row.host_cu_seqlens_padded)
            compat.packed_rows.set_row_group(params, row_group(row.context_parallel_size))
            predict_later_tokens(params, chunk, row, later_of(row))
        if not is_routed:
            return inputs
        compat.packed_rows.forget_padded_length(params)
        # By it routers neither route nor count padding. Newer scripts pass a mask of their own.
        if row is None or inputs.get("padding_mask") is not None:
            return inputs
        return inputs | {"padding_mask": padding_mask(chunk, row)}

    with changed_inputs([unwrap_model(chunk)], with_row):
        yield
