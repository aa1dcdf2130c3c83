"""Packed rows as the batches of a stock script, by a ``get_batch`` in place of its own.

That is found in the globals of the script's forward step, wherever the script was imported from,
and still reads the batches of ordinary iterators. A script unpacks its batch into local names,
which identify the values.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.columns import sent
from mcore_batching.integrations.replacements import Function, Hook, is_replacement
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.topology import row_group

FLAG = "--use-dynamic-batch-size"

installation = Hook(empty=f"{FLAG} is not given")
"""Replacements in this process: those of `install`, and get_batch of every script."""

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
        made: dict[str, Any] = {
            "tokens": row.tokens,
            "labels": row.labels,
            "loss_mask": row.loss_mask,
            "position_ids": row.position_ids,
            # Scripts squeeze a batch dimension off, as stock data loaders put one in front.
            "cu_seqlens_padded": row.cu_seqlens_padded[None],
            "max_seqlen": torch.tensor(row.max_seqlen, dtype=torch.int32),
        }
        if "cu_seqlens" in names:
            made["cu_seqlens"] = self._counted_cu_seqlens(row)
        if "packed_seq_params" in names:
            made["packed_seq_params"] = compat.packed_seq_params(
                row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
            )
        return [made.get(name) for name in names]

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


def problems_of_fields(names: Sequence[str]) -> list[str]:
    """The faults of a batch of these values: unknown to packed rows, or lacking for them."""
    # Those of six are among the seven.
    unknown = [name for name in names if name not in {*SEVEN_FIELDS, *TEN_FIELDS}]
    lacking = [name for name in _NEEDED if name not in names]
    if "packed_seq_params" not in names and not {"cu_seqlens", "cu_seqlens_padded"} <= {*names}:
        lacking.append("packed_seq_params (or cu_seqlens and cu_seqlens_padded)")
    found = {"has": unknown, "lacks": lacking}
    return [f"{verb} {', '.join(which)}" for verb, which in found.items() if which]


def use_packed_batches(forward_step_func: Callable[..., Any]) -> None:
    """Let a forward step's ``get_batch`` accept packed rows, unless it does so already."""
    function: Any = forward_step_func
    while isinstance(function, functools.partial):
        function = function.func
    # Of a decorated forward step the globals would be those of the decorator's module.
    function = inspect.unwrap(function)
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    original = scope.get("get_batch")
    if not callable(original):
        raise DynamicBatchArgumentError(
            f"{function!r} has no get_batch in its module: name the function that reads the "
            "batch get_batch"
        )
    # Ours already, or of a script that is patched.
    code = getattr(inspect.unwrap(original), "__code__", None)
    if is_replacement(original) or "next_batch" in getattr(code, "co_names", ()):
        return
    ours = functools.partial(_get_batch, fields_unpacked_by(function))
    installation.replace(scope, "get_batch", ours)


def _get_batch(
    fields: Sequence[str], original: Function, data_iterator: Any, *rest: Any, **options: Any
) -> Any:
    packed = next_batch(data_iterator, fields)
    return original(data_iterator, *rest, **options) if packed is None else packed


def fields_unpacked_by(forward_step: Callable[..., Any]) -> tuple[str, ...]:
    """The names into which a forward step's source unpacks its ``get_batch``; an error where it
    does not.

        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    """
    where = f"{getattr(forward_step, '__module__', '')}.{forward_step.__name__}"
    advice = (
        "mcore_batching.integrations.megatron_lm.next_batch(data_iterator, names) in the first "
        "lines of get_batch, with the names of what it returns"
    )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward_step)))
    except (OSError, SyntaxError) as error:
        raise DynamicBatchArgumentError(
            f"cannot read the source of {where} ({error}): call {advice}"
        ) from None
    found = sorted(_unpackings(tree), key=len, reverse=True)
    if not found:
        raise DynamicBatchArgumentError(
            f"{where} does not unpack get_batch(...) into names: call {advice}"
        )
    for names in found:
        # Of several branches, by the batch's length, the longest that packed rows fit.
        if not problems_of_fields(names):
            return names
    # The others are older forms of the longest.
    raise DynamicBatchArgumentError(
        f"the batch of {where} {' and '.join(problems_of_fields(found[0]))}; known are "
        f"({', '.join(SIX_FIELDS)}) up to 0.17 and ({', '.join(TEN_FIELDS)}) from 0.18 on"
    )


def _unpackings(tree: ast.Module) -> list[tuple[str, ...]]:
    """Names into which a function unpacks a call of ``get_batch``, or a variable that holds its
    result."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    # batch = get_batch(data_iterator); tokens, labels, ... = batch
    holders = {
        node.targets[0].id
        for node in assigned
        if _calls_get_batch(node.value) and isinstance(node.targets[0], ast.Name)
    }
    return [
        tuple(getattr(name, "id", "?") for name in node.targets[0].elts)
        for node in assigned
        if isinstance(node.targets[0], ast.Tuple)
        and (_calls_get_batch(node.value) or getattr(node.value, "id", None) in holders)
    ]


def _calls_get_batch(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", None) == "get_batch"
