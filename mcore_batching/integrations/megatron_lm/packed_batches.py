"""Packed rows as the batches of a stock script: the values that its ``get_batch`` returns.

A script unpacks its batch into local names, which identify the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.columns import sent
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.topology import row_group

# Three orders are common: up to Megatron-LM 0.17, alphabetical from 0.18 on, and its dev branch's.
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


class PackedRows(Iterator[PackedMicroBatch]):
    """The data iterator that a forward step gets: one packed micro-batch per call.

    Attributes:
        current: the row drawn last, None before the first.
    """

    def __init__(self, rows: Iterator[PackedMicroBatch], *, counts_flops: bool) -> None:
        self._rows = rows
        self._counts_flops = counts_flops
        self.current: PackedMicroBatch | None = None

    def __next__(self) -> PackedMicroBatch:
        self.current = next(self._rows)
        return self.current

    def next_fields(self, names: Sequence[str]) -> list[Any]:
        """The next row's values, in the order of the names; None for those it does not have."""
        row = next(self)
        made: dict[str, Callable[[], Any]] = {
            "tokens": lambda: row.tokens,
            "labels": lambda: row.labels,
            "loss_mask": lambda: row.loss_mask,
            "position_ids": lambda: row.position_ids,
            "packed_seq_params": lambda: compat.packed_seq_params(
                row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
            ),
            "cu_seqlens": lambda: self._counted_cu_seqlens(row),
            # Scripts squeeze a batch dimension off, as stock data loaders put one in front.
            "cu_seqlens_padded": lambda: row.cu_seqlens_padded[None],
            "max_seqlen": lambda: torch.tensor(row.max_seqlen, dtype=torch.int32),
        }
        return [made[name]() if name in made else None for name in names]

    def _counted_cu_seqlens(self, row: PackedMicroBatch) -> torch.Tensor:
        """int32 ``[1, samples + 1]``, from which stock code counts FLOPs."""
        # Stock code reads lengths off as differences: a sample that counts twice is listed twice.
        lengths = row.total_lengths
        offsets = [0]  # no sample: stock code counts nothing
        if self._counts_flops:
            times = 0 if row.is_placeholder else _times_counted(row)
            # Samples of 0 tokens: stock code sums over the ranks that counted, so all must.
            listed = lengths * times or [0] * len(lengths)
            offsets += itertools.accumulate(listed)
        return sent(torch.tensor([offsets], dtype=torch.int32, device="cpu"), row.tokens.device)


def _times_counted(row: PackedMicroBatch) -> int:
    """Times that this rank counts a row's samples."""
    if row_group(row.context_parallel_size) is None:  # the row has the model's own size
        return 1
    size, rank = row.context_parallel_size, row.context_parallel_rank
    # Stock code divides the sum over ranks by the model's CP size M, so the c ranks of a row must
    # count it M times together. M / c need not be whole: rank r has ⌈M(r+1)/c⌉ − ⌈Mr/c⌉ of them.
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
                f"known scripts unpack 6, 7 or 10 values, got {fields}: give their names, as "
                "next_batch(data_iterator, ('tokens', ...))"
            )
        fields = _BY_NUMBER[fields]
    return data_iterator.next_fields(fields)


def check_fields(names: Sequence[str], where: str) -> None:
    """Refuse a batch of ``where`` with unknown names, or without those that packed rows need."""
    problems = problems_of_fields(names)
    if problems:
        raise DynamicBatchArgumentError(
            f"the batch of {where} {' and '.join(problems)}; known are "
            f"({', '.join(SIX_FIELDS)}) up to 0.17 and ({', '.join(TEN_FIELDS)}) from 0.18 on"
        )


def problems_of_fields(names: Sequence[str]) -> list[str]:
    """The faults of a batch of these values: unknown to packed rows, or lacking for them."""
    # Those of six are among the seven.
    unknown = [name for name in names if name not in {*SEVEN_FIELDS, *TEN_FIELDS}]
    lacking = [name for name in _NEEDED if name not in names]
    if "packed_seq_params" not in names and not {"cu_seqlens", "cu_seqlens_padded"} <= {*names}:
        lacking.append("packed_seq_params (or cu_seqlens and cu_seqlens_padded)")
    found = {"has": unknown, "lacks": lacking}
    return [f"{verb} {', '.join(which)}" for verb, which in found.items() if which]
