"""`pack`: per-sample lists into one packed row (drawn in `mcore_batching.batch.rows.packed`).

row = pack(
    {"tokens": [[1, 2, 3], [4, 5]], "total_lengths": [3, 2], "response_lengths": [2, 1]},
    schema=DEFAULT_SCHEMA,
    sample_indices=(0, 1),
    sample_alignment_tokens=2,
)
row.tokens        [[1, 2, 3, 0, 4, 5]]
row.loss_mask     [[1, 1, 0, 0, 1, 0]]
row["tokens"]     [[1, 2, 3], [4, 5]]      the samples' own values, as tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields.field_checks import checked_values
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.fields.value_checks import read_indices, require_token_id
from mcore_batching.batch.rows.packed import LaterTokens, PackedMicroBatch
from mcore_batching.batch.rows.prefixes import agree
from mcore_batching.batch.rows.response_tokens import (
    loss_masks,
    predicted_positions,
    response_tokens,
)
from mcore_batching.batch.rows.row_layout import Row, padded_offsets, require_alignment


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
        validated: True if ``schema.validate`` returned these values: lengths alone are checked.
        hosts: for each sample the place of the one whose tokens begin with its own, and in whose
            segment it lies; its own place if it has a segment; None: all have one.
        depths: of multi-token prediction; 0: none.

    Returns:
        the row, on the device of the first sample's tokens.

    Raises:
        SchemaError: a field is not declared, or a value does not match its kind.
        BatchError: no samples, not one index per sample, alignments that do not divide, a
            ``pad_token_id`` that is no integer, or hosts that cannot hold their samples.
    """
    require_alignment(sample_alignment_tokens, row_alignment_tokens, context_parallel_size)
    fields = dict(samples) if validated else schema.validate(samples)
    if validated:
        _require_lengths(fields, schema)
    totals = fields["total_lengths"]
    indices = _read_indices(sample_indices, len(totals), is_placeholder)
    hosts = range(len(totals)) if hosts is None else _checked_hosts(hosts, fields, schema)
    # A sample in another's segment is not laid out: the row holds its tokens once.
    lengths = [totals[i] for i, host in enumerate(hosts) if host == i]
    offsets = padded_offsets(lengths, sample_alignment_tokens, row_alignment_tokens)
    row = Row(offsets, context_parallel_size, context_parallel_rank)
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    return _packed(row, hosts, fields, schema, indices, is_placeholder, pad_token_id, depths)


def _packed(
    row: Row,
    hosts: Sequence[int],
    fields: dict[str, list[Any]],
    schema: Schema,
    indices: tuple[int, ...],
    is_placeholder: bool,
    pad_token_id: int,
    depths: int,
) -> PackedMicroBatch:
    laid_out = [i for i, host in enumerate(hosts) if host == i]
    # Position of the row at which each response token is predicted: one before its own.
    start = dict(zip(laid_out, row.offsets, strict=False))
    totals, responses = fields["total_lengths"], fields["response_lengths"]
    predicted_at = predicted_positions([start[host] for host in hosts], totals, responses)
    if len(laid_out) < len(totals):
        _require_unique(predicted_at, row.num_tokens)
    weights = loss_masks(fields, is_placeholder)
    device = weights.device
    kept = (predicted_at >= 0).to(device)
    weights = weights.masked_fill(~kept, 0.0)
    loss_mask = weights.new_zeros(row.num_tokens)
    loss_mask[predicted_at.to(device)[kept]] = weights[kept]
    full = _full_row(row, fields, schema, laid_out, pad_token_id) | {"loss_mask": loss_mask}
    # Before the row is cut: what comes later in a sample is on other context-parallel ranks.
    deeper = [{k: row.later(v, depth) for k, v in full.items()} for depth in range(1, depths + 1)]
    own, *later = (
        {k: row.local(v, dim=-1).unsqueeze(-2) for k, v in each.items()} for each in (full, *deeper)
    )
    return PackedMicroBatch(
        **own,
        padding_mask=row.local(_padding_mask(row, fields, laid_out))[None],
        cu_seqlens_padded=torch.tensor(row.offsets, dtype=torch.int32, device=device),
        host_cu_seqlens_padded=row.offsets,
        cu_seqlens=torch.tensor(
            [0, *accumulate(totals[i] for i in laid_out)], dtype=torch.int32, device=device
        ),
        max_seqlen=max(end - start for start, end in pairwise(row.offsets)),
        total_lengths=totals,
        response_lengths=responses,
        sample_indices=indices,
        hosts=tuple(hosts),
        is_placeholder=is_placeholder,
        responses=response_tokens(weights, predicted_at, row),
        fields=fields,
        schema=schema,
        context_parallel_size=row.context_parallel_size,
        context_parallel_rank=row.context_parallel_rank,
        later=tuple(LaterTokens(**each) for each in later),
        # In double precision: micro-batches, and so packing, should not show in the sum.
        token_weights=tuple(float(each["loss_mask"].double().sum()) for each in (full, *deeper)),
    )


def _full_row(
    row: Row,
    fields: Mapping[str, list[Any]],
    schema: Schema,
    laid_out: Sequence[int],
    pad_token_id: int,
) -> dict[str, Tensor]:
    """The row's tokens, labels and position ids, before it is cut."""
    device = fields["tokens"][0].device
    tokens = [fields["tokens"][i].to(device, torch.int64) for i in laid_out]
    return {
        "tokens": row.lay_out(tokens, pad_token_id),
        "labels": row.lay_out([each[1:] for each in tokens], pad_token_id),
        "position_ids": _position_ids(row, fields, laid_out, schema),
    }


def _padding_mask(row: Row, fields: Mapping[str, list[Any]], laid_out: Sequence[int]) -> Tensor:
    """Bool ``[row tokens]``, True for padding."""
    # All of a padding sample is masked as padding, so that MoE routers do not count its tokens.
    tags = fields.get("is_padding") or [False] * len(fields["tokens"])
    pieces = [torch.full_like(fields["tokens"][i], tags[i], dtype=torch.bool) for i in laid_out]
    return row.lay_out([piece.to(pieces[0].device) for piece in pieces], True)


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
            f"hosts must be {count} places of samples that are their own hosts, got {list(hosts)}"
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
            "before the next one of its host begins, or set hosts to None"
        )


def _read_indices(
    sample_indices: Sequence[int], num_samples: int, is_placeholder: bool
) -> tuple[int, ...]:
    indices = tuple(read_indices("sample_indices", sample_indices))
    if not num_samples:
        raise BatchError(
            "expected at least one sample; pack make_placeholder(...) with is_placeholder=True"
        )
    expected = 0 if is_placeholder else num_samples
    if len(indices) != expected:
        raise BatchError(
            f"expected {expected} sample_indices with is_placeholder={is_placeholder}, got "
            f"{len(indices)}; give one per real sample",
        )
    return indices


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
        counted = [torch.arange(fields["total_lengths"][i], device=device) for i in laid_out]
        return row.lay_out(counted, 0)
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
