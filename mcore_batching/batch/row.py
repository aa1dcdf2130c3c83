"""A micro-batch as one packed row: inputs of the model and the loss, and its samples' indices.

Two samples of 3 and 2 tokens (responses 2 and 1), each padded to a multiple of 2, the row to 8:

    tokens             a b c . | d e | . .      . is padding
    labels             b c . . | e . | . .      next token within the sample
    position_ids       0 1 2 0 | 0 1 | 0 0
    loss_mask          1 1 0 0 | 1 0 | 0 0      1 where a response token is predicted
    cu_seqlens_padded  0 4 6 8                  the row's own padding is the last segment

Under context parallelism a row is cut as in `batch.row_index`; offsets are of the full row. What
samples have in common at their beginnings (`batch.prefix_tree`) the row holds once. Values of whole
responses come back from the slices that ranks hold:

    row of one sample, prompt p, response a b c; cp 2     p a b c
    rank 0 has positions 0 and 3                          log p(a), .
    rank 1 has positions 1 and 2                          log p(b), log p(c)
    gather_response, on both ranks                        [log p(a), log p(b), log p(c)]
    row.responses.owned_indices                           0 on rank 0, 1 2 on rank 1
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.row_index import Nodes, RowIndex

Value = TypeVar("Value")


class _Part(Generic[Value]):
    """A value of a row, made and moved with those of its block when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, row: Any, owner: type) -> Value:
        made: Value = row._part(self._name)
        vars(row)[self._name] = made  # where it is found from now on
        return made


class _Parts:
    def __init__(self, part: Callable[[str], Any]) -> None:
        self._part = part  # gives one by its name


class LaterTokens(_Parts):
    """A row as multi-token prediction reads it at one depth: at each position a later one's values.

    Depth 1 of the row drawn above, 0 where a segment ends; shapes as of the row's:

        tokens       b c . 0 | e 0 | . 0
        labels       c . . 0 | . 0 | . 0
        loss_mask    1 0 0 0 | 0 0 | 0 0
    """

    tokens, position_ids = _Part[Tensor](), _Part[Tensor]()
    labels, loss_mask = _Part[Tensor](), _Part[Tensor]()


class ResponseTokens(_Parts):
    """The R response tokens of a row, sample after sample. Response token j of a sample with p
    prompt tokens is predicted at place p - 1 + j of the sample. Samples that share tokens may have
    several at one position.

        tokens        p a b . | c d          a b c d are the response tokens
        predicted at  0 1 | none 4           a at p, b at a, d at c
        loss_masks    1 1 | 0 1              c has no predecessor: it weighs nothing

    Attributes:
        loss_masks: float32 ``[R]``, loss weights, 0 where nothing predicts the token; the same on
            all context-parallel ranks.
        owned_indices: int64 ``[owned]``, tokens predicted at a position of this rank's slice.
        owned_positions: int64 ``[owned]``, positions of the slice that predict them.
        distinct_positions: int64 ``[positions]``, each of these once; None where none repeats.
        distinct_indices: int64 ``[owned]``, place of each of `owned_positions` in
            `distinct_positions`; None where none repeats.
    """

    loss_masks, owned_indices = _Part[Tensor](), _Part[Tensor]()
    owned_positions = _Part[Tensor]()
    distinct_positions, distinct_indices = _Part[Tensor | None](), _Part[Tensor | None]()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedMicroBatch:
    """One context-parallel rank's slice of a packed row: of a full row of T tokens, ``T_local = T /
    cp``. Tensors move to the device when they are first read.

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
        sample_indices: index of each sample in the columns that the row was made from, ``()`` in a
            placeholder. In the engine these are the samples that this rank runs, which came from
            any rank: a value of your own per sample belongs into a field, not into a list.
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

    tokens, labels, position_ids = _Part[Tensor](), _Part[Tensor](), _Part[Tensor]()
    loss_mask, padding_mask = _Part[Tensor](), _Part[Tensor]()
    cu_seqlens_padded = _Part[Tensor]()
    owned_num_tokens = _Part[int]()
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
    later: tuple[LaterTokens, ...]
    _part: Callable[[str], Any] = dataclasses.field(repr=False)

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
            [self.nodes],
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
    if field.kind is Kind.ROUTED_EXPERTS and made.dim() == 3 and made.numel():
        # Padding has experts that take turns. A tensor: for a number the host would wait.
        top_k, num_experts = made.shape[2], values.max().long() + 1
        positions = sent(index.positions, device)
        experts = spread_experts(positions, top_k, num_experts.clamp(min=top_k)).to(made.dtype)
        is_padding = sent(places == span.end, device)
        made = torch.where(is_padding[:, None, None], experts[:, None], made)
    return made[None]


def spread_experts(positions: Tensor, top_k: int, num_experts: Tensor | int) -> Tensor:
    """``[positions, top_k]`` experts for tokens without recorded ones, which take turns; the top_k
    of a token all differ."""
    # top_k consecutive numbers modulo num_experts >= top_k all differ.
    slots = positions[:, None] * top_k + torch.arange(top_k, device=positions.device)
    return slots.remainder(num_experts)


def gather_response(
    local_stream: Tensor,
    micro_batch: PackedMicroBatch,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Values of each sample's response tokens, whole on every context-parallel rank.

    A collective over ``group`` (an all-reduce), and another one in backward, which sums the ranks'
    gradients: if one rank runs backward through the result, all must. A loss that every rank
    computes in full is counted once per rank: divide it by the group's size, or use `token_mean`.

    Args:
        local_stream: ``[T_local, ...]``, at each position of this rank's slice the value of the
            next token.
        micro_batch: the row.
        group: the context-parallel group, ranks in the order of their slices; None without context
            parallelism.

    Returns:
        ``[response_length, ...]`` for each sample, of the stream's type, 0.0 where nothing predicts
        the token; attached to the graph even if every response is empty.

    Raises:
        BatchError: the stream is not as long as the slice, or ``group`` has another size than the
            row was cut for.
    """
    expected = micro_batch.tokens.shape[1]
    if not local_stream.dim() or local_stream.shape[0] != expected:
        raise BatchError(
            f"expected local_stream of shape [{expected}, ...], one value per token of the slice, "
            f"got {list(local_stream.shape)}"
        )
    positions = micro_batch.responses.owned_positions.to(local_stream.device)
    own = local_stream.index_select(0, positions)
    return PerSample(gather_own_values(own, micro_batch, group=group), micro_batch)


class PerSample(list[Tensor]):
    """``[R, ...]`` values of a row's response tokens as one view for each sample."""

    def __init__(self, flat: Tensor, micro_batch: PackedMicroBatch) -> None:
        super().__init__(flat.split_with_sizes(micro_batch.response_lengths))
        self.flat, self.lengths, self.views = flat, micro_batch.response_lengths, [*self]


def flat_values(values: Sequence[Tensor], lengths: list[int]) -> Tensor | None:
    """The ``[R]`` values that `PerSample` made these views of, for samples of these response
    lengths; None if they are others."""
    if type(values) is not PerSample or values.flat.dim() != 1 or values.lengths != lengths:
        return None
    # A list may have been changed since.
    is_as_made = len(values) == len(lengths) and all(map(operator.is_, values, values.views))
    return values.flat if is_as_made else None


def gather_own_values(
    own_values: Tensor, micro_batch: PackedMicroBatch, *, group: dist.ProcessGroup | None
) -> Tensor:
    """Whole responses ``[R, ...]``, sample after sample, from this rank's ``[owned, ...]`` values
    at ``micro_batch.responses.owned_positions``. Collective and errors as of `gather_response`."""
    size = 1 if group is None else group.size()
    if size != micro_batch.context_parallel_size:
        raise BatchError(
            f"expected the {micro_batch.context_parallel_size} ranks that share the row, got "
            f"{size}; set group to the context-parallel group"
        )
    flat, count = own_values, sum(micro_batch.response_lengths)
    # Zeros where another rank predicts the token, so the sum over ranks is the whole response.
    if len(own_values) < count:
        owned = micro_batch.responses.owned_indices.to(own_values.device)
        flat = own_values.new_zeros((count, *own_values.shape[1:]))
        flat = flat.index_copy(0, owned, own_values)
    # Without response tokens no rank of the row calls: all have the same lengths.
    if group is not None and size > 1 and flat.numel():
        flat = all_reduce(flat, group=group)  # type: ignore[no-untyped-call]
    return flat
