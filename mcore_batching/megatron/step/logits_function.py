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


class LogitsFunction:
    """A function of the logits, called with what it takes; what it returns is checked.

    Args:
        f: the function; nothing is asked of it before `open`.
        args: Megatron's arguments, which it may take.
    """

    def __init__(self, f: Callable[..., Any], args: Any) -> None:
        self._f, self._args = f, args

    def open(self, schedule: MicroBatchSchedule, *, fused: bool) -> None:
        """See what the function takes, and whether it finds tokens in rows of a schedule.

        One that does not take ``micro_batch`` expects the samples' tokens one behind the other,
        padded to twice the context-parallel size at most: slime's layout.

        Args:
            schedule: of the rows.
            fused: the output layer is fused with log-probs.

        Raises:
            TypeError: it is no function.
            ValueError: that layout cannot be had.
        """
        if not callable(self._f):
            raise TypeError(f"f must be a function of the logits, got {type(self._f).__name__}")
        self._takes = inspect.signature(self._f).parameters
        size = schedule.dims.context_parallel
        padded_to = sample_multiple_tokens(schedule.dims, schedule.config)
        # A row that is not cut can have its padding taken out.
        self._drops_padding = "micro_batch" not in self._takes and size == 1 and padded_to > 1
        if "micro_batch" in self._takes:
            return
        if schedule.has_sizes_of_rows:
            fault, mend = "rows are cut in other ways", "unset --dynamic-batch-context-parallel"
        elif schedule.hosts is not None:
            fault, mend = "samples share segments", "unset --dynamic-batch-share-prefixes"
        elif size > 1 and padded_to != 2 * size:
            fault = f"samples are padded to {padded_to}, not {2 * size}"
            mend = "turn off sequence parallelism and --dynamic-batch-pad-each-to"
        elif fused:
            fault, mend = "no logits are made", "unset --dynamic-batch-fuse-output-layer"
        else:
            return
        raise ValueError(
            f"{getattr(self._f, '__name__', self._f)} does not take micro_batch, but {fault}; let "
            f"it take micro_batch (gather_response and response_log_probs do), or {mend}"
        )

    def __call__(self, logits: Logits, row: PackedMicroBatch) -> dict[str, list[Tensor]]:
        """The outputs for the real samples of a row, tensors copied.

        Raises:
            OrderError: no dict of lists, or not one output per sample.
        """
        # By slime's names, whose functions run here unchanged.
        offered = {
            "args": self._args,
            "unconcat_tokens": row.fields["tokens"],
            "total_lengths": row.total_lengths,
            "response_lengths": row.response_lengths,
            "with_entropy": getattr(self._args, "use_rollout_entropy", False),
            "micro_batch": row,
        }
        # slime's functions take `**kwargs` or a choice of these names.
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._takes.values()):
            offered = {name: value for name, value in offered.items() if name in self._takes}
        if self._drops_padding:
            logits = _without_padding(logits, row)
        outputs = checked_outputs(self._f(logits, **offered), len(row.total_lengths))
        return {
            key: [
                # A slice of the logits would keep them all in memory, and so would a gradient.
                value.detach().clone() if isinstance(value, Tensor) else value
                # None of a placeholder's, whose one sample is fabricated.
                for value in values[: row.num_samples]
            ]
            for key, values in outputs.items()
        }


def _without_padding(logits: Any, row: PackedMicroBatch) -> Tensor:
    """Logits of the samples' tokens alone, of a row that is not cut."""
    starts = row.host_cu_seqlens_padded
    held = zip(starts, row.total_lengths, strict=False)
    # Not by a mask: the host would wait for the device to count.
    return torch.cat([logits[:, start : start + length] for start, length in held], dim=1)


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
