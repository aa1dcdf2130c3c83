"""What a stock script's ``get_batch`` returns, made of a packed row.

Scripts unpack their batch into local names, and these names say what each value is. Two orders are
common: six values up to Megatron-LM 0.17, ten in alphabetical order from 0.18 on.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.prepared_step import PreparedRow

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
_BY_NUMBER = {len(SIX_FIELDS): SIX_FIELDS, len(TEN_FIELDS): TEN_FIELDS}
_NEEDED = ("tokens", "labels", "loss_mask", "position_ids")


class PackedRows(Iterator[PreparedRow]):
    """The data iterator that a forward step gets: packed micro-batches, one a call.

    Args:
        rows: the prepared rows, on the device as they are drawn.
        counts_flops: whether stock code is to count the row's tokens into its statistics of
            sequence lengths. Those are emptied after training steps alone.
    """

    def __init__(self, rows: Iterator[PreparedRow], *, counts_flops: bool) -> None:
        self._rows = rows
        self._counts_flops = counts_flops
        self.current: PackedMicroBatch | None = None

    def __next__(self) -> PreparedRow:
        prepared = next(self._rows)
        self.current = prepared.row
        return prepared

    def fields(self, names: Sequence[str]) -> list[Any]:
        """Draw the next row, and give these of its fields in this order."""
        row = next(self).row
        made: dict[str, Callable[[], Any]] = {
            "tokens": lambda: row.tokens,
            "labels": lambda: row.packed("labels"),
            "loss_mask": lambda: row.packed("loss_mask"),
            "position_ids": lambda: row.position_ids,
            "packed_seq_params": lambda: compat.packed_seq_params(
                row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
            ),
            "cu_seqlens": lambda: self._cu_seqlens(row),
            "cu_seqlens_padded": lambda: row.cu_seqlens_padded[None],
            "max_seqlen": lambda: torch.tensor(row.max_seqlen, dtype=torch.int32),
        }
        return [made[name]() if name in made else None for name in names]

    def _cu_seqlens(self, row: PackedMicroBatch) -> torch.Tensor:
        """int32 ``[1, samples + 1]``; of no token where nothing is to be counted."""
        if not self._counts_flops:
            return row.cu_seqlens.new_zeros(1, 1)
        real = torch.zeros_like(row.cu_seqlens) if row.is_placeholder else row.cu_seqlens
        return real[None]


def next_batch(data_iterator: Any, fields: int | Sequence[str]) -> list[Any] | None:
    """For the first lines of a script's ``get_batch``: the next packed micro-batch's fields.

    Args:
        data_iterator: what the forward step was given.
        fields: how many values the script unpacks, 6 or 10, or their names in order.

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
                f"get_batch returns 6 fields up to Megatron-LM 0.17 and 10 from 0.18 on, got "
                f"{fields}: give their names, next_batch(data_iterator, ('tokens', ...))"
            )
        fields = _BY_NUMBER[fields]
    return data_iterator.fields(fields)


def fields_unpacked_by(forward_step: Callable[..., Any]) -> tuple[str, ...]:
    """The names into which a forward step unpacks what its ``get_batch`` returns.

    Raises:
        DynamicBatchArgumentError: it does not unpack it, its source is not to be had, or the
            fields leave out what packed rows need.
    """
    where = f"{getattr(forward_step, '__module__', '')}.{forward_step.__name__}"
    advice = "mcore_batching.install(batch_fields=(...)) with the names of what get_batch returns"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward_step)))
    except (OSError, SyntaxError) as error:
        raise DynamicBatchArgumentError(
            f"cannot read the source of {where} ({error}) to see what its get_batch returns: call "
            f"{advice}"
        ) from None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "get_batch"
            and isinstance(node.targets[0], ast.Tuple)
        ):
            names = tuple(getattr(name, "id", "?") for name in node.targets[0].elts)
            check_fields(names, where)
            return names
    raise DynamicBatchArgumentError(
        f"{where} does not unpack get_batch(...) into names, so it is not known what its batch "
        f"consists of: call {advice}"
    )


def check_fields(names: Sequence[str], where: str) -> None:
    """Refuse a batch that packed rows cannot be handed over in.

    Raises:
        DynamicBatchArgumentError: naming what is unknown or lacking.
    """
    known = {*SIX_FIELDS, *TEN_FIELDS}
    unknown = [name for name in names if name not in known]
    lacking = [name for name in _NEEDED if name not in names]
    if "packed_seq_params" not in names and not {"cu_seqlens", "cu_seqlens_padded"} <= {*names}:
        lacking.append("packed_seq_params (or cu_seqlens and cu_seqlens_padded)")
    if unknown or lacking:
        problems = [f"has {', '.join(unknown)}"] if unknown else []
        problems += [f"lacks {', '.join(lacking)}"] if lacking else []
        raise DynamicBatchArgumentError(
            f"the batch that {where} unpacks {' and '.join(problems)}; dynamic micro-batches know "
            f"({', '.join(SIX_FIELDS)}), as in pretrain_gpt.py up to 0.17, and "
            f"({', '.join(TEN_FIELDS)}) from 0.18 on"
        )
