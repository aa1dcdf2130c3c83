"""A micro-batch as one packed row: inputs of the model and the loss, and its samples' indices.

Two samples of 3 and 2 tokens (responses 2 and 1), each padded to a multiple of 2, the row to 8:

    tokens             a b c . | d e | . .      . is padding
    labels             b c . . | e . | . .      next token within the sample
    position_ids       0 1 2 0 | 0 1 | 0 0
    loss_mask          1 1 0 0 | 1 0 | 0 0      1 where a response token is predicted
    cu_seqlens_padded  0 4 6 8                  the row's own padding is the last segment

Under context parallelism a row is cut as in `batch.row_index`; offsets are of the full row. What
samples have in common at their beginnings (`batch.prefix_tree`) the row holds once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.pinned_buffer import sent
from mcore_batching.batch.row_index import Nodes, RowIndex


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
    prompt tokens is predicted at place p - 1 + j of the sample. Samples that share tokens may have
    several at one position.

        tokens        p a b . | c d          a b c d are the response tokens
        predicted at  0 1 | none 4           a at p, b at a, d at c
        loss_masks    1 1 | 0 1              c has no predecessor: it weighs nothing

    Attributes:
        loss_masks: float32 ``[R]``, loss weights, 0 where nothing predicts the token; the same on
            all context-parallel ranks.
        owned: bool ``[R]``, True for tokens predicted at a position of this rank's slice.
        owned_indices: int64 ``[owned]``, where `owned` is True.
        owned_positions: int64 ``[owned]``, positions of the slice that predict them.
        distinct_positions: int64 ``[positions]``, each of these once; None where none repeats.
        distinct_indices: int64 ``[owned]``, place of each of `owned_positions` in
            `distinct_positions`; None where none repeats.
    """

    loss_masks: Tensor
    owned: Tensor
    owned_indices: Tensor
    owned_positions: Tensor
    distinct_positions: Tensor | None = None
    distinct_indices: Tensor | None = None


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
            predicts, or the sum over samples that share it; 0 elsewhere, in placeholders and in
            padding samples.
        padding_mask: bool ``[1, T_local]``, True for padding, padding samples included.
        cu_seqlens_padded: int32 ``[segments + 1]``, offsets of the padded samples in the full row;
            the row's own padding, where there is any, is one more segment. A sample that begins
            another has no segment of its own, and a row with branches is one segment.
        host_cu_seqlens_padded: the same offsets as Python ints.
        max_seqlen: tokens of the longest padded segment.
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
        sample_indices: origin index of each sample, ``()`` in a placeholder.
        nodes: stretches of samples that the row is made of.
        is_placeholder: True if the row's one sample is fabricated.
        responses: loss weights of the response tokens, and the positions that predict them.
        fields: every field of the samples, a mapping from names to one value per sample.
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank among them.
        owned_num_tokens: trainable tokens that this rank predicts; summed over ranks the step's
            `StepTotals.num_tokens`.
        later: for multi-token prediction, at each depth from 1 on.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    padding_mask: Tensor
    cu_seqlens_padded: Tensor
    host_cu_seqlens_padded: tuple[int, ...]
    max_seqlen: int
    total_lengths: list[int]
    response_lengths: list[int]
    sample_indices: tuple[int, ...]
    nodes: Nodes
    is_placeholder: bool
    responses: ResponseTokens
    fields: Columns
    context_parallel_size: int
    context_parallel_rank: int
    owned_num_tokens: int
    later: tuple[LaterTokens, ...] = ()

    @property
    def num_samples(self) -> int:
        """Real samples: 0 for a placeholder."""
        return 0 if self.is_placeholder else len(self.total_lengths)

    @functools.cached_property
    def index(self) -> RowIndex:
        """Places of each position's values in flat fields; on the host."""
        return RowIndex(
            self.fields.token_span,
            self.fields.response_span,
            self.nodes,
            self.context_parallel_size,
            self.context_parallel_rank,
        )

    def __getitem__(self, key: str) -> list[Any]:
        """The values of a field, one per sample.

        Raises:
            KeyError: the samples had no such field; names those that they had.
        """
        if key not in self.fields:
            raise KeyError(f"no field {key!r} in this micro-batch; it has {sorted(self.fields)}")
        return self.fields[key]

    def packed(self, key: str) -> Tensor:
        """A field of kind PER_TOKEN or ROUTED_EXPERTS (or TOKENS), packed, padded and cut like
        `tokens`: ``[1, T_local, ...]``, 0 in padding, and for tokens without a row (negative
        ``length_offset``). Padding of routed experts takes turns among them instead, so that it
        loads all evenly.

        Raises:
            KeyError: the samples had no such field.
            BatchError: the field is of another kind, or has more rows than tokens.
        """
        self[key]  # raises for a field that is not there
        field = self.fields.schema[key]
        if field.kind not in (Kind.TOKENS, Kind.PER_TOKEN, Kind.ROUTED_EXPERTS):
            raise BatchError(
                f"field {key!r} is declared as Kind.{field.kind.name}, without rows per token; "
                f"read micro_batch[{key!r}], or declare it as Kind.PER_TOKEN"
            )
        # More values than tokens, as one for each gap and both ends: there is no row for some.
        if field.length_offset > 0:
            raise BatchError(
                f"field {key!r} cannot be packed: expected at most one row per token of "
                f"{self.total_lengths}, found {field.length_offset} more; read micro_batch[{key!r}]"
            )
        return packed_field(self.index, self.fields, field)


def packed_field(index: RowIndex, fields: Columns, field: Field, later: int = 0) -> Tensor:
    """``[1, T_local, ...]`` values of a field with at most one row per token, those of the tokens
    `later` places on."""
    values, span = fields.flat(field.name), fields.span(field.name)
    device, places = values.device, index.places(span, later)
    made = values.index_select(0, sent(places, device))
    if field.kind is Kind.ROUTED_EXPERTS:
        experts = _experts_of_padding(values, sent(index.positions, device))
        made = torch.where(sent(places == span.end, device).view(-1, 1, 1), experts, made)
    return made[None]


def spread_experts(positions: Tensor, top_k: int, num_experts: Tensor | int) -> Tensor:
    """``[positions, top_k]`` experts for tokens without recorded ones, which take turns; the top_k
    of a token all differ."""
    # top_k consecutive numbers modulo num_experts >= top_k all differ.
    slots = positions[:, None] * top_k + torch.arange(top_k, device=positions.device)
    return slots.remainder(num_experts)


def _experts_of_padding(values: Tensor, positions: Tensor) -> Tensor:
    """``[positions, layers, top_k]`` experts for padding. `values` are all rows of the field, and
    one of zeros behind them."""
    layers, top_k = values.shape[1:] if values.dim() == 3 else (0, 0)
    # It stays a tensor: with .item() the host would wait for the device.
    num_experts = (
        values.max().long() + 1 if values.numel() else values.new_ones((), dtype=torch.int64)
    )
    slots = spread_experts(positions, top_k, num_experts.clamp(min=max(top_k, 1)))
    return slots.to(values.dtype)[:, None].expand(-1, layers, top_k)
