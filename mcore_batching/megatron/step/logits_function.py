"""The function that `forward_only` is given: how it is called, and what it must return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import OrderError, PackedMicroBatch
from mcore_batching.batch.fields.value_shapes import count_of, describe
from mcore_batching.megatron.logits.fused_output import Logits
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import sample_multiple_tokens

Outputs = dict[str, list[Tensor]]
"""By name one value for each of a row's real samples."""
OutputsOf = Callable[[Logits, PackedMicroBatch], Outputs]


def logits_function(
    f: Callable[..., Any], args: Any, schedule: MicroBatchSchedule, *, fused: bool
) -> OutputsOf:
    """A user's function of the logits, called with what it takes; what it returns is checked.

    Raises:
        TypeError: it is no function.
        ValueError: it takes no ``micro_batch``, and so expects the samples' tokens one behind the
            other, padded to twice the context-parallel size at most (slime's layout), which rows of
            this schedule, or a ``fused`` output layer, do not have.
    """
    if not callable(f):
        raise TypeError(f"f must be a function of the logits, got {type(f).__name__}")
    takes = inspect.signature(f).parameters
    # slime's functions take `**kwargs` or a choice of these names.
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    drops_padding = False
    if "micro_batch" not in takes:
        size = schedule.dims.context_parallel
        padded_to = sample_multiple_tokens(schedule.dims, schedule.config)
        # A row that is not cut can have its padding taken out.
        drops_padding = size == 1 and padded_to > 1
        fault, mend = _why_no_plain_layout(schedule, size, padded_to, fused)
        if fault:
            raise ValueError(
                f"{getattr(f, '__name__', f)} does not take micro_batch, but {fault}; let it take "
                f"micro_batch (gather_response and response_log_probs do), or {mend}"
            )

    def outputs_of(logits: Logits, row: PackedMicroBatch) -> Outputs:
        # By slime's names, whose functions run here unchanged.
        offered = {
            "args": args,
            "unconcat_tokens": row.fields["tokens"],
            "total_lengths": row.total_lengths,
            "response_lengths": row.response_lengths,
            "with_entropy": getattr(args, "use_rollout_entropy", False),
            "micro_batch": row,
        }
        given = {name: value for name, value in offered.items() if takes_all or name in takes}
        outputs = f(_without_padding(logits, row) if drops_padding else logits, **given)
        return {
            # None of a placeholder's, whose one sample is fabricated.
            key: [_copied(key, value) for value in values[: row.num_samples]]
            for key, values in checked_outputs(outputs, len(row.total_lengths)).items()
        }

    return outputs_of


def _copied(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise OrderError(
            f"f returned a {type(value).__name__} for a sample's {name!r}; return a tensor for "
            "each sample, as torch.tensor(...)"
        )
    # A slice of the logits would keep them all in memory, and so would a gradient.
    return value.detach().clone()


def _why_no_plain_layout(
    schedule: MicroBatchSchedule, size: int, padded_to: int, fused: bool
) -> tuple[str, str]:
    """Why rows do not hold sample behind sample as slime's do, and the mend; empty if they do."""
    if schedule.has_sizes_of_rows:
        return "rows are cut in other ways", "unset --dynamic-batch-context-parallel"
    if schedule.hosts is not None:
        return "samples share segments", "unset --dynamic-batch-share-prefixes"
    if size > 1 and padded_to != 2 * size:
        mend = "turn off sequence parallelism and --dynamic-batch-pad-each-to"
        return f"samples are padded to {padded_to}, not {2 * size}", mend
    return ("no logits are made", "unset --dynamic-batch-fuse-output-layer") if fused else ("", "")


def _without_padding(logits: Any, row: PackedMicroBatch) -> Tensor:
    """Logits of the samples' tokens alone, of a row that is not cut."""
    starts = row.host_cu_seqlens_padded
    held = zip(starts, row.total_lengths, strict=False)
    # Not by a mask: the host would wait for the device to count.
    return torch.cat([logits[:, start : start + length] for start, length in held], dim=1)


def checked_outputs(made: Any, num_samples: int) -> dict[str, list[Tensor]]:
    """The outputs of ``f``: one per sample of a micro-batch, a placeholder's included."""
    # slime's functions return a pair: a placeholder for a loss, then the outputs.
    outputs = made[1] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(outputs, Mapping):
        kind = type(outputs).__name__
        raise OrderError(f"f must return a dict of lists, or a pair that ends in one, got {kind}")
    for key, values in outputs.items():
        if not isinstance(key, str):
            raise OrderError(f"f returned the key {key!r}; name outputs by texts")
        count = count_of(values)
        if count != num_samples or any(value is None for value in values):
            found = describe(values) if count is None else f"{count} values"
            if count == num_samples:
                found += ", some of them None,"
            raise OrderError(
                f"f returned {found} for {key!r} in a micro-batch of {num_samples} samples; return "
                "one tensor for each, a placeholder's included"
            )
    return {key: list(values) for key, values in outputs.items()}
