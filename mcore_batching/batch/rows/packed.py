"""A micro-batch as one packed row: inputs of the model and the loss, and its samples' indices.

Two samples of 3 and 2 tokens (responses 2 and 1), each padded to a multiple of 2, the row to 8:

    tokens             a b c . | d e | . .      . is padding
    labels             b c . . | e . | . .      next token within the sample
    position_ids       0 1 2 0 | 0 1 | 0 0
    loss_mask          1 1 0 0 | 1 0 | 0 0      1 where a response token is predicted
    cu_seqlens_padded  0 4 6 8                  the row's own padding is the last segment

Under context parallelism the row is cut as in `batch.rows.row_layout`; offsets are of the full row.
Of samples that begin others (`batch.rows.prefixes`) the row holds the others' tokens alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.rows.response_tokens import ResponseTokens
from mcore_batching.batch.rows.row_layout import Row


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
        fields: every field of the samples, one value per sample, as `Schema.validate` returns it.
        schema: the kinds of the fields.
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
    fields: Mapping[str, list[Any]]
    schema: Schema
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
        values, field = self[key], self.schema[key]
        if field.kind not in (Kind.TOKENS, Kind.PER_TOKEN, Kind.ROUTED_EXPERTS):
            raise BatchError(
                f"field {key!r} is declared as Kind.{field.kind.name}, without rows per token; "
                f"read micro_batch[{key!r}], or declare it as Kind.PER_TOKEN"
            )
        laid_out = [i for i, host in enumerate(self.hosts) if host == i]
        rows = _of_one_type(key, [values[i][later:].to(self.tokens.device) for i in laid_out])
        trailing = {tuple(row.shape[1:]) for row in rows if row.shape[0]}
        # More values than tokens, as one for each gap and both ends: there is no row for some.
        if len(trailing) > 1 or field.length_offset > 0:
            raise BatchError(
                f"field {key!r} cannot be packed: expected rows of one shape, at most one per "
                f"token of {self.total_lengths}, found {[list(row.shape) for row in rows]}; "
                f"read micro_batch[{key!r}]"
            )
        offsets = self.host_cu_seqlens_padded
        row = Row(offsets, self.context_parallel_size, self.context_parallel_rank)
        is_routed = field.kind is Kind.ROUTED_EXPERTS
        padding = _spread_experts(rows, row.num_tokens) if is_routed else None
        return row.local(row.lay_out(rows, pad_value, padding=padding))[None]

    def mapped(
        self, change: Callable[[Tensor], Tensor], names: Collection[str] | None = None
    ) -> PackedMicroBatch:
        """A copy with `change` made to every tensor, those in `fields` included, or to those of the
        attributes named.

            row.mapped(lambda tensor: tensor.to(device))
        """
        changed = {
            field.name: _map_tensors(getattr(self, field.name), change)
            for field in dataclasses.fields(self)
            if field.name != "schema" and (names is None or field.name in names)
        }
        return dataclasses.replace(self, **changed)


def _of_one_type(key: str, rows: list[Tensor]) -> list[Tensor]:
    # A list of integers is int64 beside the next sample's fractions, which it would cut off. What
    # was an empty list says nothing of its type.
    kinds = list(dict.fromkeys(row.dtype for row in rows if row.numel())) or [rows[0].dtype]
    try:
        common = functools.reduce(torch.promote_types, kinds)
    except RuntimeError as error:  # types of 8 bits have none with others
        raise BatchError(
            f"field {key!r} has samples of {' and '.join(map(str, kinds))}, which have no common "
            "type; give all the same"
        ) from error
    return [row.to(common) for row in rows]


def _spread_experts(rows: list[Tensor], num_tokens: int) -> Tensor:
    """``[tokens, layers, top_k]`` experts for padding; the top_k of a token all differ."""
    layers, top_k = next((row.shape[1:] for row in rows if row.dim() == 3), (0, 0))
    seen = [row.max().long() + 1 for row in rows if row.numel()]
    # top_k consecutive numbers modulo num_experts >= top_k all differ. It stays a tensor: with
    # .item() the host would wait for the device.
    num_experts = torch.stack(seen).max().clamp(min=max(top_k, 1)) if seen else max(top_k, 1)
    slots = torch.arange(num_tokens * top_k, device=rows[0].device).remainder(num_experts)
    return slots.to(rows[0].dtype).view(num_tokens, 1, top_k).expand(num_tokens, layers, top_k)


def _map_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, ResponseTokens | LaterTokens):
        return type(value)(**_map_tensors(vars(value), move))
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, move) for key, item in value.items()}
    if type(value) in (list, tuple):
        if value and isinstance(value[0], int | float):  # lengths, offsets: nothing to look for
            return value
        return type(value)(_map_tensors(item, move) for item in value)
    return value
