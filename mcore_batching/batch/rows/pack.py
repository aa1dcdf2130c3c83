"""`pack`: per-sample lists into one packed row (drawn in `mcore_batching.batch.rows.packed`).

Samples stay apart: labels, position ids and masks end at a sample's end. A sample may have 0 tokens
or more, its response 0 tokens up to the whole sample. One that begins another, its host, may lie in
the host's segment; then the row holds the host's tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields.field_checks import checked_values
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.fields.value_checks import require_index, require_token_id
from mcore_batching.batch.rows.packed import LaterTokens, PackedMicroBatch
from mcore_batching.batch.rows.prefixes import agree
from mcore_batching.batch.rows.response_tokens import (
    loss_masks,
    predicted_positions,
    response_tokens,
)
from mcore_batching.batch.rows.row_layout import Row, padded_offsets, require_alignment
from mcore_batching.planning.errors import Argument
from mcore_batching.planning.integers import entries


def pack(
    samples: Mapping[str, Any],
    *,
    schema: Schema,
    sample_indices: Sequence[int],
    sample_alignment_tokens: int = 1,
    row_alignment_tokens: int = 1,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
    pad_token_id: int = 0,
    is_placeholder: bool = False,
    validated: bool = False,
    hosts: Sequence[int] | None = None,
    depths: int = 0,
) -> PackedMicroBatch:
    """Pack samples into one row, and take a context-parallel rank's slice of it.

        row = pack(
            {"tokens": [[1, 2, 3], [4, 5]], "total_lengths": [3, 2], "response_lengths": [2, 1]},
            schema=DEFAULT_SCHEMA,
            sample_indices=(0, 1),
            sample_alignment_tokens=2,
        )
        row.tokens        [[1, 2, 3, 0, 4, 5]]
        row.loss_mask     [[1, 1, 0, 0, 1, 0]]
        row["tokens"]     [[1, 2, 3], [4, 5]]      the samples' own values, as tensors

    Args:
        samples: field name to one value per sample: ``tokens``, ``total_lengths``,
            ``response_lengths`` and others. ``loss_masks`` are all ones if absent.
        schema: the kind of every field.
        sample_indices: origin index of each sample, empty for a placeholder.
        sample_alignment_tokens: each sample is padded to a multiple of this. Under context
            parallelism it must be a multiple of ``2 * context_parallel_size``.
        row_alignment_tokens: the row is padded to a multiple of this.
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank among them.
        pad_token_id: fills padding, and labels where there is no next token.
        is_placeholder: True if the one sample is fabricated; its loss mask is all zero.
        validated: True if ``schema.validate`` returned these values: only the lengths of what lies
            in the row are checked again.
        hosts: for each sample the place among them of the one in whose segment it lies, whose
            tokens begin with its own; its own place if it has a segment; None: all have one.
        depths: of multi-token prediction; 0: none.

    Returns:
        the row, on the device of the first sample's tokens.

    Raises:
        SchemaError: a field is not declared, or a value does not match its kind.
        BatchError: no samples, not one index per sample, alignments that do not divide into
            ``2 * context_parallel_size`` chunks, a ``pad_token_id`` that is no integer, hosts that
            lie in other segments themselves, or two samples that train the same token of a host.
    """
    require_alignment(sample_alignment_tokens, row_alignment_tokens, context_parallel_size)
    fields = dict(samples) if validated else schema.validate(samples)
    totals, responses = fields["total_lengths"], fields["response_lengths"]
    indices = _read_indices(sample_indices, len(totals), is_placeholder)
    if validated:
        _require_lengths(fields, schema)
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    # A sample in another's segment is not laid out: the row holds its tokens once.
    hosts = range(len(totals)) if hosts is None else _checked_hosts(hosts, fields, schema)
    laid_out = [i for i, host in enumerate(hosts) if host == i]
    lengths = [totals[i] for i in laid_out]
    row = Row(lengths, padded_offsets(lengths, sample_alignment_tokens, row_alignment_tokens))
    # Position of the row at which each response token is predicted: one before its own.
    start = dict(zip(laid_out, row.offsets, strict=False))
    predicted_at = predicted_positions([start[host] for host in hosts], totals, responses)
    if len(laid_out) < len(totals):
        _require_unique(predicted_at, row.num_tokens)
    device = fields["tokens"][0].device
    weights = loss_masks(
        fields, responses, predicted_at, is_placeholder=is_placeholder, device=device
    )
    own_part = functools.partial(
        row.local,
        context_parallel_size=context_parallel_size,
        context_parallel_rank=context_parallel_rank,
    )
    loss_mask = _at_positions(predicted_at, weights, row.num_tokens)
    return PackedMicroBatch(
        **_laid_out(row, fields, schema, laid_out, loss_mask, pad_token_id, depths, own_part),
        **_offsets(row, device),
        total_lengths=totals,
        response_lengths=responses,
        sample_indices=indices,
        hosts=tuple(hosts),
        is_placeholder=is_placeholder,
        responses=response_tokens(
            weights,
            predicted_at,
            row.offsets,
            context_parallel_size=context_parallel_size,
            context_parallel_rank=context_parallel_rank,
        ),
        fields=fields,
        schema=schema,
        context_parallel_size=context_parallel_size,
        context_parallel_rank=context_parallel_rank,
    )


def _laid_out(
    row: Row,
    fields: Mapping[str, list[Any]],
    schema: Schema,
    laid_out: Sequence[int],
    loss_mask: Tensor,
    pad_token_id: int,
    depths: int,
    own_part: Callable[..., Tensor],
) -> dict[str, Any]:
    """The row's tensors of one entry per token, `own_part` of each, and the sums of loss masks."""
    device = fields["tokens"][0].device
    tokens = [fields["tokens"][i].to(device, torch.int64) for i in laid_out]
    full = {
        "tokens": row.lay_out(tokens, pad_token_id),
        "labels": row.lay_out([each[1:] for each in tokens], pad_token_id),
        "position_ids": _position_ids(row, fields, laid_out, schema),
        "loss_mask": loss_mask,
    }
    # Before the row is cut: what comes later in a sample is on other context-parallel ranks.
    deeper = [{k: row.later(v, depth) for k, v in full.items()} for depth in range(1, depths + 1)]
    own, *later = (
        {k: own_part(v, dim=-1).unsqueeze(-2) for k, v in each.items()} for each in (full, *deeper)
    )
    return {
        **own,
        "later": tuple(LaterTokens(**each) for each in later),
        # In double precision: micro-batches, and so packing, should not show in the sum.
        "token_weights": tuple(float(each["loss_mask"].double().sum()) for each in (full, *deeper)),
        "padding_mask": own_part(_padding_mask(row, tokens, fields, laid_out))[None],
    }


def _offsets(row: Row, device: torch.device) -> dict[str, Any]:
    """Where samples lie in the row, as attention takes it."""
    lengths = [0, *accumulate(row.total_lengths)]
    return {
        "cu_seqlens_padded": torch.tensor(row.offsets, dtype=torch.int32, device=device),
        "host_cu_seqlens_padded": tuple(row.offsets),
        "cu_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "max_seqlen": max(end - start for start, end in pairwise(row.offsets)),
    }


def _require_lengths(fields: Mapping[str, Any], schema: Schema) -> None:
    # Values replaced since they were validated would shift the row, silently, if of another length.
    for name, values in fields.items():
        if schema[name].kind in (Kind.TOKENS, Kind.POSITION_IDS):
            checked_values(
                schema[name], values, fields["total_lengths"], fields["response_lengths"]
            )


def _checked_hosts(
    hosts: Sequence[int], fields: Mapping[str, Any], schema: Schema
) -> Sequence[int]:
    count = len(fields["total_lengths"])
    is_place = [host in range(len(hosts)) and hosts[host] == host for host in hosts]
    if len(hosts) != count or not all(is_place):
        raise BatchError(
            Argument("hosts"),
            f" must be {count} places of samples that are their own hosts, got {list(hosts)}; set ",
            Argument("hosts"),
            " to None",
        )
    # Values replaced since hosts were found would, silently, be taken for the host's.
    for i, host in enumerate(hosts):
        for name, values in fields.items() if host != i else ():
            if not agree(schema[name], values[i], values[host]):
                raise SchemaError(
                    name,
                    sample_index=i,
                    expected=f"what its host, sample {host}, begins with",
                    found="other values; give them to get_data_iterator, or declare the field as "
                    "Kind.METADATA if no row is made of it",
                )
    return hosts


def _require_unique(predicted_at: Tensor, num_tokens: int) -> None:
    # Gradients of tokens that are predicted at the same position would overwrite each other.
    twice = (torch.bincount(predicted_at[predicted_at >= 0], minlength=num_tokens) > 1).nonzero()
    if twice.numel():
        raise BatchError(
            f"two samples train the token predicted at position {int(twice[0])}; end a response "
            "before the next one of its host begins, or set ",
            Argument("hosts"),
            " to None",
        )


def _read_indices(
    sample_indices: Sequence[int], num_samples: int, is_placeholder: bool
) -> tuple[int, ...]:
    indices = tuple(
        require_index("sample_indices", index)
        for index in entries("sample_indices", sample_indices, BatchError)
    )
    if not num_samples:
        raise BatchError(
            "expected at least one sample, got none: pack make_placeholder(...) with ",
            Argument("is_placeholder", True),
            " and ",
            Argument("sample_indices", ()),
        )
    expected = 0 if is_placeholder else num_samples
    if len(indices) != expected:
        raise BatchError(
            f"expected {expected} sample_indices for {num_samples} samples with "
            f"is_placeholder={is_placeholder}, got {len(indices)}; give one per real sample",
        )
    return indices


def _at_positions(positions: Tensor, values: Tensor, num_tokens: int) -> Tensor:
    """``[num_tokens]``: each value at its position, 0 elsewhere."""
    kept = positions >= 0  # -1: predicted nowhere
    full = values.new_zeros(num_tokens)
    full[positions[kept].to(values.device)] = values[kept.to(values.device)]
    return full


def _padding_mask(
    row: Row, tokens: Sequence[Tensor], fields: Mapping[str, list[Any]], laid_out: Sequence[int]
) -> Tensor:
    """Bool ``[row tokens]``, True for padding."""
    # All of a padding sample is masked as padding, so that MoE routers do not count its tokens.
    tags = fields.get("is_padding") or [False] * len(fields["total_lengths"])
    tagged = zip(tokens, [tags[i] for i in laid_out], strict=True)
    return row.lay_out([torch.full_like(*each, dtype=torch.bool) for each in tagged], True)


def _position_ids(
    row: Row, fields: Mapping[str, list[Any]], laid_out: Sequence[int], schema: Schema
) -> Tensor:
    """int64 ``[row tokens]``, or ``[axes, row tokens]``."""
    names = [name for name in fields if schema[name].kind is Kind.POSITION_IDS]
    if len(names) > 1:
        raise SchemaError(
            names[1],
            expected="one field of kind POSITION_IDS in a batch",
            found=f"{len(names)}: {', '.join(names)}",
        )
    device = fields["tokens"][0].device
    if not names:
        return row.lay_out([torch.arange(n, device=device) for n in row.total_lengths], 0)
    pieces = [fields[names[0]][i].to(device, torch.int64) for i in laid_out]
    axes = {tuple(piece.shape[:-1]) for piece in pieces if piece.numel()}
    if len(axes) > 1:
        raise SchemaError(
            names[0],
            expected="the same number of axes for every sample",
            found=f"shapes {', '.join(str(list(piece.shape)) for piece in pieces)}",
        )
    # [axes, tokens] -> [tokens, axes], which lays out like any field with rows, and back.
    return row.lay_out([piece.movedim(-1, 0) for piece in pieces], 0).movedim(0, -1)
