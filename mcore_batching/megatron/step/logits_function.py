"""The function that `forward_only` is given: how it is called, and what it must return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import OrderError, PackedMicroBatch
from mcore_batching.batch.fields.value_shapes import count_of, describe
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import sample_multiple_tokens


def adapted(
    f: Callable[..., Any], schedule: MicroBatchSchedule, *, fused: bool = False
) -> Callable[..., Any]:
    """``f`` for all keywords that are offered, with logits in the layout that it expects.

    A function that does not take ``micro_batch`` expects the samples' tokens one behind the other,
    padded to twice the context-parallel size at most: slime's layout.

    Raises:
        TypeError: ``f`` is no function.
        ValueError: that layout cannot be had.
    """
    if not callable(f):
        raise TypeError(f"f must be a function of the logits, got {type(f).__name__}")
    takes = inspect.signature(f).parameters
    # slime's functions take `**kwargs` or a choice of these names; both run unchanged.
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    size = schedule.dims.context_parallel
    padded_to = sample_multiple_tokens(schedule.dims, schedule.config)
    by_lengths = "micro_batch" not in takes
    # Without `micro_batch` it can only find tokens by adding up lengths, each padded to 2 cp.
    fault = f"{getattr(f, '__name__', f)} does not take micro_batch, but"
    mend = "let it take micro_batch (gather_response and response_log_probs do)"
    if by_lengths and schedule.has_sizes_of_rows:
        raise ValueError(
            f"{fault} rows are cut in ways of their own; {mend}, or unset "
            "--dynamic-batch-context-parallel"
        )
    if by_lengths and schedule.hosts is not None:
        raise ValueError(
            f"{fault} samples share segments; {mend}, or unset --dynamic-batch-share-prefixes"
        )
    if by_lengths and size > 1 and padded_to != 2 * size:
        raise ValueError(
            f"{fault} samples are padded to {padded_to}, not {2 * size}; {mend}, or turn off "
            "sequence parallelism and --dynamic-batch-pad-each-to"
        )
    if by_lengths and fused:
        raise ValueError(
            f"{fault} fused output layers make no logits; {mend}, or unset "
            "--dynamic-batch-fuse-output-layer"
        )

    def with_offered(logits: Tensor, **offered: Any) -> Any:
        # A row that is not cut can have its padding taken out; a cut one is refused above.
        if by_lengths and size == 1 and padded_to > 1:
            logits = _without_padding(logits, offered["micro_batch"])
        return f(logits, **{k: v for k, v in offered.items() if takes_all or k in takes})

    return with_offered


def _without_padding(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    """Logits of the samples' tokens alone, of a row that is not cut."""
    starts = row.host_cu_seqlens_padded
    held = zip(starts, row.total_lengths, strict=False)
    # Not by a mask: the host would wait for the device to count.
    return torch.cat([logits[:, start : start + length] for start, length in held], dim=1)


def real_outputs(made: Any, row: PackedMicroBatch) -> dict[str, list[Tensor]]:
    """The outputs of ``f`` for the real samples of a row, tensors copied.

    Raises:
        OrderError: no dict of lists, or not one output per sample.
    """
    outputs = checked_outputs(made, len(row.total_lengths))
    return {
        key: [
            # A slice of the logits would keep them all in memory, and so would a gradient.
            value.detach().clone() if isinstance(value, Tensor) else value
            # None of a placeholder's, whose one sample is fabricated.
            for value in values[: row.num_samples]
        ]
        for key, values in outputs.items()
    }


def checked_outputs(made: Any, num_samples: int) -> dict[str, list[Tensor]]:
    """The outputs of ``f`` for the samples of a micro-batch, a placeholder's included.

    Raises:
        OrderError: no dict of lists, or not one output per sample.
    """
    # slime's functions return a pair: a placeholder for a loss, then the outputs.
    outputs = made[1] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(outputs, Mapping):
        raise OrderError(
            "f must return a dict of lists, or a pair that ends in one, got "
            f"{type(outputs).__name__}"
        )
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
