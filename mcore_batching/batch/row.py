"""A micro-batch as one packed row: inputs of the model and the loss, and its samples' indices.

Two samples of 3 and 2 tokens (responses 2 and 1), each padded to a multiple of 2, the row to 8:

    tokens             a b c . | d e | . .      . is padding
    labels             b c . . | e . | . .      next token within the sample
    position_ids       0 1 2 0 | 0 1 | 0 0
    loss_mask          1 1 0 0 | 1 0 | 0 0      1 where a response token is predicted
    cu_seqlens_padded  0 4 6 8                  the row's own padding is the last segment

Under context parallelism the row is cut as in `batch.row_index`; offsets are of the full row. Of
samples that begin others (`batch.rows.prefixes`) the row holds the others' tokens alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns, map_tensors
from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.fields.values import read_indices, require_token_id
from mcore_batching.batch.row_index import RowIndex, require_alignment
from mcore_batching.batch.rows.pinned_buffer import sent
from mcore_batching.batch.rows.prefixes import agree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LaterTokens:
    """A row as multi-token prediction reads it at one depth: at each position a later one's values.

    Depth 1 of the row drawn above, 0 where a segment ends; shapes as of the row's:

        tokens       b c . 0 | e 0 | . 0
        labels       c . . 0 | . 0 | . 0
        loss_mask    1 0 0 0 | 0 0 | 0 0
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ResponseTokens:
    """The R response tokens of a row, sample after sample. Response token j of a sample with p
    prompt tokens is predicted at the sample's position p - 1 + j, in its host's segment where it
    has none of its own.

        tokens        p a b . | c d          a b c d are the response tokens
        predicted at  0 1 | none 4           a at p, b at a, d at c
        loss_masks    1 1 | 0 1              c has no predecessor: it weighs nothing

    Attributes:
        loss_masks: float32 ``[R]``, loss weights, 0 where nothing predicts the token; the same on
            all context-parallel ranks.
        owned: bool ``[R]``, True for tokens predicted at a position of this rank's slice.
        owned_indices: int64 ``[owned]``, where `owned` is True.
        owned_positions: int64 ``[owned]``, positions of the slice that predict them.
    """

    loss_masks: Tensor
    owned: Tensor
    owned_indices: Tensor
    owned_positions: Tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedMicroBatch:
    """One context-parallel rank's slice of a packed row: of a full row of T tokens, ``T_local = T /
    cp``.

    Attributes:
        tokens: int64 ``[1, T_local]``.
        labels: int64 ``[1, T_local]``, the next token within the sample, else the padding token.
        position_ids: int64 ``[1, T_local]``, counted from 0 in each sample, or the batch's own;
            ``[axes, 1, T_local]`` if these have several axes. 0 in padding.
        loss_mask: float32 ``[1, T_local]``: at each position the mask of the response token that it
            predicts; 0 elsewhere, in placeholders and in padding samples.
        padding_mask: bool ``[1, T_local]``, True for padding, padding samples included.
        cu_seqlens_padded: int32 ``[segments + 1]``, offsets of the padded samples in the full row,
            of hosts alone; the row's own padding, where there is any, is one more segment.
        host_cu_seqlens_padded: the same offsets as Python ints.
        cu_seqlens: int32 ``[samples with a segment + 1]``, their offsets without padding.
        max_seqlen: tokens of the longest padded segment.
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
        sample_indices: origin index of each sample, ``()`` in a placeholder.
        hosts: for each sample the place of the one in whose segment it lies, perhaps its own.
        is_placeholder: True if the row's one sample is fabricated.
        responses: loss weights of the response tokens, and the positions that predict them.
        fields: every field of the samples, a mapping from names to one value per sample.
        schema: the kinds of the fields.
        index: where each position's values stand in flat fields; on the host.
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank among them.
        later: for multi-token prediction, at each depth from 1 on.
        token_weights: sum of the full row's loss mask, and at each of these depths.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    padding_mask: Tensor
    cu_seqlens_padded: Tensor
    host_cu_seqlens_padded: tuple[int, ...]
    cu_seqlens: Tensor
    max_seqlen: int
    total_lengths: list[int]
    response_lengths: list[int]
    sample_indices: tuple[int, ...]
    hosts: tuple[int, ...]
    is_placeholder: bool
    responses: ResponseTokens
    fields: Columns
    schema: Schema
    index: RowIndex
    context_parallel_size: int
    context_parallel_rank: int
    later: tuple[LaterTokens, ...] = ()
    token_weights: tuple[float, ...] = ()

    @property
    def num_samples(self) -> int:
        """Real samples: 0 for a placeholder."""
        return 0 if self.is_placeholder else len(self.total_lengths)

    def __getitem__(self, key: str) -> list[Any]:
        """The values of a field, one per sample.

        Raises:
            KeyError: the samples had no such field; names those that they had.
        """
        if key not in self.fields:
            raise KeyError(f"no field {key!r} in this micro-batch; it has {sorted(self.fields)}")
        return self.fields[key]

    def packed(self, key: str, pad_value: float = 0, *, later: int = 0) -> Tensor:
        """A field with rows per token, packed, padded and cut like `tokens`: ``[1, T_local, ...]``,
        of the type that torch promotes those of all samples to.

        Args:
            key: a field of kind PER_TOKEN or ROUTED_EXPERTS (or TOKENS).
            pad_value: fills padding, and tokens without a row (negative ``length_offset``). Padding
                of routed experts takes turns among them instead, so that it loads all evenly.
            later: each token has the value of the one `later` places after it in its sample.

        Raises:
            KeyError: the samples had no such field.
            BatchError: the field is of another kind, has more rows than tokens, or its trailing
                shapes differ between samples, or types that have none in common.
        """
        self[key]  # raises for a field that is not there
        field = self.schema[key]
        if field.kind not in (Kind.TOKENS, Kind.PER_TOKEN, Kind.ROUTED_EXPERTS):
            raise BatchError(
                f"field {key!r} is declared as Kind.{field.kind.name}, without rows per token; "
                f"read micro_batch[{key!r}], or declare it as Kind.PER_TOKEN"
            )
        # More values than tokens, as one for each gap and both ends: there is no row for some.
        if field.length_offset > 0:
            raise self.fields.unfit(key)
        rows, device = self.fields.rows(key), self.tokens.device
        values = rows.values.to(device)
        places = self.index.places(rows.span, later)
        made = values.index_select(0, sent(places, device))
        if field.kind is Kind.ROUTED_EXPERTS:
            pad_values = _spread_experts(values, sent(self.index.positions, device))
        elif pad_value:
            pad_values = made.new_full((), pad_value)
        else:
            return made[None]
        is_padding = sent(places == rows.span.end, device)
        return torch.where(is_padding.view(-1, *[1] * (made.dim() - 1)), pad_values, made)[None]

    def mapped(
        self, change: Callable[[Tensor], Tensor], names: Collection[str] | None = None
    ) -> PackedMicroBatch:
        """A copy with `change` made to every tensor, those in `fields` included, or to those of the
        attributes named.

            row.mapped(lambda tensor: tensor.to(device))
        """
        made = copy.copy(self)
        # Not by `dataclasses.replace`, which sets each of the attributes anew.
        for name in _TENSORS if names is None else names:
            vars(made)[name] = _mapped(getattr(self, name), change)
        return made


_TENSORS = (
    *("tokens", "labels", "position_ids", "loss_mask", "padding_mask"),
    *("cu_seqlens_padded", "cu_seqlens", "responses", "fields", "later"),
)
"""Attributes of a row that are tensors, or hold some."""


def _spread_experts(values: Tensor, positions: Tensor) -> Tensor:
    """``[positions, layers, top_k]`` experts for padding; the top_k of a token all differ. `values`
    are all rows of the field, and one of zeros behind them."""
    layers, top_k = values.shape[1:] if values.dim() == 3 else (0, 0)
    # top_k consecutive numbers modulo num_experts >= top_k all differ. It stays a tensor: with
    # .item() the host would wait for the device.
    num_experts = (
        values.max().long() + 1 if values.numel() else values.new_ones((), dtype=torch.int64)
    )
    slots = positions[:, None] * top_k + torch.arange(top_k, device=positions.device)
    slots = slots.remainder(num_experts.clamp(min=max(top_k, 1)))
    return slots.to(values.dtype)[:, None].expand(-1, layers, top_k)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, ResponseTokens | LaterTokens):
        return type(value)(**map_tensors(vars(value), change))
    if isinstance(value, Columns):
        return value.mapped(change)
    if isinstance(value, tuple):  # of later tokens
        return tuple(_mapped(each, change) for each in value)
    return map_tensors(value, change)


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
    hosts: Sequence[int] | None = None,
    depths: int = 0,
) -> PackedMicroBatch:
    """Pack samples into one row, and take a context-parallel rank's slice of it.

    Args:
        samples: field name to one value per sample: ``tokens``, ``total_lengths``,
            ``response_lengths`` and others; or `Columns`, which are checked already.
            ``loss_masks`` are all ones if absent.
        schema: the kind of every field.
        sample_indices: origin index of each sample, empty for a placeholder.
        sample_alignment_tokens: each sample is padded to a multiple of this. Under context
            parallelism it must be a multiple of ``2 * context_parallel_size``.
        row_alignment_tokens: the row is padded to a multiple of this.
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank among them.
        pad_token_id: fills padding, and labels where there is no next token.
        is_placeholder: True if the one sample is fabricated; its loss mask is all zero.
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
    columns = samples if isinstance(samples, Columns) else Columns.read(samples, schema)
    count = len(columns.total_lengths)
    indices = _read_indices(sample_indices, count, is_placeholder)
    index = RowIndex(
        columns.token_span,
        columns.response_span,
        range(count) if hosts is None else _checked_hosts(hosts, columns, schema),
        sample_alignment_tokens=sample_alignment_tokens,
        row_alignment_tokens=row_alignment_tokens,
        size=context_parallel_size,
        rank=context_parallel_rank,
    )
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    return _packed(index, columns, schema, indices, pad_token_id, depths, is_placeholder)


def _packed(
    index: RowIndex,
    columns: Columns,
    schema: Schema,
    sample_indices: tuple[int, ...],
    pad_token_id: int,
    depths: int,
    is_placeholder: bool,
) -> PackedMicroBatch:
    device, offsets = columns["tokens"][0].device, index.offsets
    weights = loss_weights(columns, device)
    if is_placeholder:
        weights.zero_()
    responses, masks, token_weights = _responses(index, weights, depths)
    own, *later = (
        {"loss_mask": mask[None], **stream}
        for mask, stream in zip(
            masks, _streams(index, columns, schema, pad_token_id, depths), strict=True
        )
    )
    return PackedMicroBatch(
        **own,
        padding_mask=sent(_padding_mask(index, columns), device)[None],
        cu_seqlens_padded=torch.tensor(offsets, dtype=torch.int32, device=device),
        host_cu_seqlens_padded=offsets,
        cu_seqlens=torch.tensor([0, *accumulate(index.lengths)], dtype=torch.int32, device=device),
        max_seqlen=max(end - start for start, end in pairwise(offsets)),
        total_lengths=columns.total_lengths,
        response_lengths=columns.response_lengths,
        sample_indices=sample_indices,
        hosts=index.hosts,
        is_placeholder=is_placeholder,
        responses=responses,
        fields=columns,
        schema=schema,
        index=index,
        context_parallel_size=index.size,
        context_parallel_rank=index.rank,
        later=tuple(LaterTokens(**each) for each in later),
        token_weights=token_weights,
    )


def _streams(
    index: RowIndex, columns: Columns, schema: Schema, pad_token_id: int, depths: int
) -> list[dict[str, Tensor]]:
    """Tokens, labels and position ids ``[..., 1, T_local]``, of the row and at each depth."""
    tokens = columns.rows("tokens")
    device, end = tokens.values.device, tokens.span.end
    ids, positions = tokens.values.long(), _position_ids(columns, schema, device)
    places = [sent(index.places(tokens.span, later), device) for later in range(depths + 2)]
    # A label is the next depth's token, but for what stands behind the end of a segment.
    padded = [ids.index_select(0, at).masked_fill_(at == end, pad_token_id) for at in places]
    streams = []
    for depth in range(depths + 1):
        stream = {"tokens": padded[depth], "labels": padded[depth + 1]}
        if depth:
            beyond = sent(index.is_beyond(depth), device)
            stream = {name: each.masked_fill(beyond, 0) for name, each in stream.items()}
        if positions is None:
            stream["position_ids"] = sent(index.counted(depth), device)
        else:
            stream["position_ids"] = positions.index_select(0, places[depth]).movedim(0, -1)
        streams.append({name: each.unsqueeze(-2) for name, each in stream.items()})
    return streams


def _position_ids(columns: Columns, schema: Schema, device: torch.device) -> Tensor | None:
    """The batch's own, int64 ``[tokens + 1]`` or ``[tokens + 1, axes]``; None if it has none."""
    names = [name for name in columns if schema[name].kind is Kind.POSITION_IDS]
    if not names:
        return None
    if len(names) > 1:
        raise SchemaError(
            names[1],
            expected="one field of kind POSITION_IDS in a batch",
            found=f"{len(names)}: {', '.join(names)}",
        )
    axes = {each.shape[:-1] for each in columns[names[0]] if each.numel()}
    if len(axes) > 1:
        raise SchemaError(
            names[0],
            expected="the same number of axes for every sample",
            found=f"shapes {', '.join(str(list(each.shape)) for each in columns[names[0]])}",
        )
    return columns.rows(names[0]).values.to(device, torch.int64)


def _padding_mask(index: RowIndex, columns: Columns) -> Tensor:
    """Bool ``[T_local]``, True for padding."""
    tags = columns.get("is_padding")
    # All of a padding sample is masked as padding, so that MoE routers do not count its tokens.
    return ~index.is_real(None if tags is None else ~torch.tensor(tags, device="cpu"))


def loss_weights(columns: Columns, device: torch.device) -> Tensor:
    """Loss weights of the response tokens, float32 ``[R]``: all ones if ``loss_masks`` is absent, 0
    in padding samples, and in the first token of a sample without a prompt, which nothing
    predicts."""
    span, tags = columns.response_span, columns.get("is_padding") or ()
    if "loss_masks" in columns and span.counts:
        # A copy, since some are masked in place.
        weights = columns.rows("loss_masks").values[:-1].to(device, torch.float32, copy=True)
    else:
        weights = torch.ones(span.end, device=device)
    has_no_prompt = (span.lengths == columns.token_span.lengths) & (span.lengths > 0)
    weights.index_fill_(0, sent(span.starts[has_no_prompt], device), 0.0)
    if any(tags):
        is_padding = torch.tensor(tags, dtype=torch.bool, device="cpu")
        is_masked = is_padding.index_select(0, span.samples)
        weights.masked_fill_(sent(is_masked, device), 0.0)
    return weights


def _responses(
    index: RowIndex, weights: Tensor, depths: int
) -> tuple[ResponseTokens, list[Tensor], tuple[float, ...]]:
    """The response tokens, of loss weights ``[R]``; of the row and at each depth the loss mask
    ``[T_local]`` and its sum over the full row."""
    put = functools.partial(sent, device=weights.device)
    masks, token_weights = [], []
    for depth in range(depths + 1):
        held, positions = map(put, index.predicting(depth))
        mask = weights.new_zeros(index.num_local)
        masks.append(mask.index_copy_(0, positions, weights.index_select(0, held)))
        kept = weights
        if depth:
            kept = weights.masked_fill(put(index.predicted_within < depth), 0.0)
        else:
            owned_indices, owned_positions = held, positions
        # In double precision: micro-batches, and so packing, should not show in the sum.
        token_weights.append(float(kept.sum(dtype=torch.float64)))
    responses = ResponseTokens(
        loss_masks=weights,
        owned=torch.zeros_like(weights, dtype=torch.bool).index_fill_(0, owned_indices, True),
        owned_indices=owned_indices,
        owned_positions=owned_positions,
    )
    return responses, masks, tuple(token_weights)


def _checked_hosts(
    hosts: Sequence[int], fields: Mapping[str, Any], schema: Schema
) -> tuple[int, ...]:
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
    return tuple(hosts)


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
