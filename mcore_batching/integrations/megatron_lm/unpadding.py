"""Unpadded samples of stock batches.

A stock batch is a dict of tensors ``[micro_batch_size, seq_length]`` (or of lists of tensors of
any length): ``tokens``, ``labels`` (already shifted by one), ``loss_mask`` and ``position_ids``.
``--sft`` adds ``cu_seqlens``, where a row's conversations begin and the last one ends, at which the
row is cut first. A sample is cut after its last trained position: attention is causal, so nothing
after it can reach the loss:

    tokens     [[5, 6, 7, 8, 0, 0],      samples  [5, 6, 7]   # 8 is not trained
                [9, 4, 0, 0, 0, 0]]               [9]         # no position is trained
    loss_mask  [[0, 1, 1, 0, 0, 0],
                [0, 0, 0, 0, 0, 0]]

``--use-varlen-dataset`` gives a list of such dicts, one a sample, of tensors ``[length]``.

A row without a trained position keeps one token, so that the number of samples stays what the
training loop counts as consumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.planning.errors import MCoreBatchingError

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")

# Response lengths are 0: labels and masks come ready-made.
STOCK_SCHEMA = DEFAULT_SCHEMA.declare("labels", Kind.PER_TOKEN).declare("loss_mask", Kind.PER_TOKEN)


class StockDataError(MCoreBatchingError, RuntimeError):
    """A script's data iterator ended too soon, or its batches lack a field."""


def draw_batches(data_iterator: Any, num_batches: int) -> list[Mapping[str, Any]] | None:
    """Take ordinary micro-batches from this rank's stock iterators; None if it has none.

    ``data_iterator`` is one, or one per model chunk, None where stock code reads nothing. A
    `StockDataError` if one ends.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    present = [iterator for iterator in iterators if iterator is not None]
    if not present:
        return None
    # All are drawn from, though one is read: those of further model chunks yield the same batches,
    # and must go on with the same ones in the next step.
    drawn: list[list[Mapping[str, Any]]] = [[] for _ in present]
    for iterator, batches in zip(present, drawn, strict=True):
        for number in range(num_batches):
            try:
                batches.append(next(iterator))
            except StopIteration:
                raise StockDataError(
                    f"the data iterator ended after {number} of {num_batches} micro-batches: "
                    "lower --train-iters or --eval-iters"
                ) from None
    return drawn[0]


def unpadded_samples(
    batches: Iterable[Mapping[str, Any]], *, split_documents: bool
) -> dict[str, Any]:
    """The four fields ``[length]`` of the batches' samples, their lengths, and responses of 0.

    Where ``split_documents``, position 0 inside a row begins a sample of its own, as documents are
    separate under ``--reset-attention-mask``. A `StockDataError` if a batch lacks a field.
    """
    data: dict[str, Any] = {name: [] for name in FIELDS}
    for batch in batches:
        for row in _rows(batch):
            for start, end in _extents(row, split_documents):
                for name in FIELDS:
                    data[name].append(row[name][start:end])
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    data["response_lengths"] = [0] * len(data["tokens"])
    return data


def num_truncated(batches: Iterable[Mapping[str, Any]]) -> int:
    """Rows of ``--sft`` that end inside a conversation, or just behind it: Megatron gives nothing
    that distinguishes these two."""
    rows = [row for batch in batches for row in _rows(batch) if "cu_seqlens" in row]
    # The last label is padding in every row, the last token only where the row was not full.
    return sum(int(row["tokens"][-1] != row["labels"][-1]) for row in rows)


def _rows(batch: Any) -> Iterator[dict[str, Tensor]]:
    if isinstance(batch, list):
        for sample in batch:
            yield from _rows({name: [values] for name, values in sample.items()})
        return
    missing = [name for name in FIELDS if batch.get(name) is None]
    if missing:
        raise StockDataError(
            f"the data iterator's batch lacks {', '.join(missing)}, it has "
            f"{', '.join(sorted(batch))}: yield {', '.join(FIELDS)}"
        )
    names = [*FIELDS, *(["cu_seqlens"] if batch.get("cu_seqlens") is not None else [])]
    for values in zip(*(batch[name] for name in names), strict=True):
        yield dict(zip(names, map(torch.as_tensor, values), strict=True))


def _extents(row: Mapping[str, Tensor], split_documents: bool) -> Iterator[tuple[int, int]]:
    """Start and end of each sample of a row."""
    cuts = {0, len(row["tokens"])}
    if split_documents:
        cuts |= {int(at) for at in (row["position_ids"] == 0).nonzero()}
    if "cu_seqlens" in row:
        cuts |= {int(at) for at in row["cu_seqlens"]}  # often many times the row's length
    for start, end in itertools.pairwise(sorted(cuts)):
        trained = row["loss_mask"][start:end].nonzero()
        if len(trained):
            yield start, start + int(trained[-1]) + 1
        elif start == 0:  # the row counts as consumed; documents within it do not
            yield 0, min(1, end)
