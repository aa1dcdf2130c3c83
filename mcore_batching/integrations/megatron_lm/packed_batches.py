"""Packed rows as the batches of a stock script: the values that its ``get_batch`` returns.

A script unpacks its batch into local names, which say what each value is. Three orders are common:
`SIX_FIELDS` up to Megatron-LM 0.17, `TEN_FIELDS` (alphabetical) from 0.18 on, and `SEVEN_FIELDS` on
its dev branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.row_groups import row_group
from mcore_batching.megatron.rows.prepared_step import PreparedRow

SIX_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "packed_seq_params",
)
TEN_FIELDS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)
SEVEN_FIELDS = (*SIX_FIELDS, "padding_mask")
_BY_NUMBER = {len(fields): fields for fields in (SIX_FIELDS, SEVEN_FIELDS, TEN_FIELDS)}
_NEEDED = ("tokens", "labels", "loss_mask", "position_ids")


def stock_row(row: PackedMicroBatch) -> PackedMicroBatch:
    """The row with the labels and the loss mask that stock batches bring, and without fields."""
    return dataclasses.replace(
        row, labels=row.packed("labels"), loss_mask=row.packed("loss_mask"), fields={}
    )


class PackedRows(Iterator[PreparedRow]):
    """The data iterator that a forward step gets: one packed micro-batch per call.

    Args:
        rows: the prepared rows, moved to the device as they are drawn.
        counts_flops: True lets stock code add the row's tokens to its statistics of sequence
            lengths, which it empties after training steps alone.

    Attributes:
        current: the row drawn last, None before the first.
    """

    def __init__(self, rows: Iterator[PreparedRow], *, counts_flops: bool) -> None:
        self._rows = rows
        self._counts_flops = counts_flops
        self.current: PackedMicroBatch | None = None

    def __next__(self) -> PreparedRow:
        prepared = next(self._rows)
        self.current = prepared.row
        return prepared

    def next_fields(self, names: Sequence[str]) -> list[Any]:
        """The next row's values of these names, in their order; None for those it does not have."""
        row = next(self).row
        made: dict[str, Callable[[], Any]] = {
            "tokens": lambda: row.tokens,
            "labels": lambda: row.labels,
            "loss_mask": lambda: row.loss_mask,
            "position_ids": lambda: row.position_ids,
            "packed_seq_params": lambda: compat.packed_seq_params(
                row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
            ),
            "cu_seqlens": lambda: self._counted_cu_seqlens(row),
            "cu_seqlens_padded": lambda: row.cu_seqlens_padded[None],
            "max_seqlen": lambda: torch.tensor(row.max_seqlen, dtype=torch.int32),
        }
        return [made[name]() if name in made else None for name in names]

    def _counted_cu_seqlens(self, row: PackedMicroBatch) -> torch.Tensor:
        """int32 ``[1, samples + 1]``, from which stock code counts operations.

        ``[1, 1]`` where it is to count nothing at all; of length 0 where the row is a placeholder,
        or counted by others that share it: each rank has to count something, since what they count
        is added up over all that did.
        """
        if not self._counts_flops:
            return row.cu_seqlens.new_zeros(1, 1)
        times = 0 if row.is_placeholder else _times_counted(row)
        if times == 0:
            return torch.zeros_like(row.cu_seqlens)[None]
        last = row.cu_seqlens[-1]
        again = [row.cu_seqlens[1:] + last * number for number in range(1, times)]
        return torch.cat([row.cu_seqlens, *again])[None]


def _times_counted(row: PackedMicroBatch) -> int:
    """How often this rank counts a row's samples, whose ranks count them all together as often as
    the model's own context-parallel size: by that stock code divides the sum over all ranks."""
    if row_group(row.context_parallel_size) is None:
        return 1
    size, rank = row.context_parallel_size, row.context_parallel_rank
    model: int = parallel_state.get_context_parallel_world_size()
    before, after = (-(-model * ranks // size) for ranks in (rank, rank + 1))
    return after - before


def next_batch(data_iterator: Any, fields: int | Sequence[str]) -> list[Any] | None:
    """The next packed micro-batch's values, for the first lines of a script's ``get_batch``.

        packed = next_batch(data_iterator, 10)
        if packed is not None:
            return packed

    Args:
        data_iterator: the forward step's.
        fields: the number of values that the script unpacks, 6, 7 or 10, or their names in order.

    Returns:
        the values, or None if ``data_iterator`` is an ordinary one.

    Raises:
        DynamicBatchArgumentError: another number of values.
    """
    if not isinstance(data_iterator, PackedRows):
        return None
    if isinstance(fields, int):
        if fields not in _BY_NUMBER:
            raise DynamicBatchArgumentError(
                "get_batch returns 6 fields up to Megatron-LM 0.17, 10 from 0.18 on and 7 on its "
                f"dev branch, got {fields}: give their names, next_batch(data_iterator, "
                "('tokens', ...))"
            )
        fields = _BY_NUMBER[fields]
    return data_iterator.next_fields(fields)


def check_fields(names: Sequence[str], where: str) -> None:
    """Refuse a batch into which a packed row does not fit.

    Args:
        names: of the batch's values.
        where: the forward step, or the argument that named them, for the message.

    Raises:
        DynamicBatchArgumentError: naming what is unknown or missing.
    """
    unknown, lacking = _unfit(names)
    if unknown or lacking:
        problems = [f"has {', '.join(unknown)}"] if unknown else []
        problems += [f"lacks {', '.join(lacking)}"] if lacking else []
        raise DynamicBatchArgumentError(
            f"the batch that {where} unpacks {' and '.join(problems)}; dynamic micro-batches know "
            f"({', '.join(SIX_FIELDS)}), as in pretrain_gpt.py up to 0.17, and "
            f"({', '.join(TEN_FIELDS)}) from 0.18 on"
        )


def fits(names: Sequence[str]) -> bool:
    """True if a packed row fits into a batch of these values."""
    return _unfit(names) == ([], [])


def _unfit(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that are not known, and names of what packed rows need that are not there."""
    known = {*SEVEN_FIELDS, *TEN_FIELDS}
    lacking = [name for name in _NEEDED if name not in names]
    if "packed_seq_params" not in names and not {"cu_seqlens", "cu_seqlens_padded"} <= {*names}:
        lacking.append("packed_seq_params (or cu_seqlens and cu_seqlens_padded)")
    return [name for name in names if name not in known], lacking
