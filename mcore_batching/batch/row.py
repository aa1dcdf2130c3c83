"""A micro-batch as one packed row: inputs of the model and the loss, and its samples' indices.

Two samples of 3 and 2 tokens (responses 2 and 1), each padded to a multiple of 2, the row to 8:

    tokens             a b c . | d e | . .      . is padding
    labels             b c . . | e . | . .      next token within the sample
    position_ids       0 1 2 0 | 0 1 | 0 0
    loss_mask          1 1 0 0 | 1 0 | 0 0      1 where a response token is predicted
    cu_seqlens_padded  0 4 6 8                  the row's own padding is the last segment

Rows of a step are laid out in blocks, one behind the other, and then cut (`RowBlock`): so each
operation is launched once for several rows. Under context parallelism a row is cut as in
`batch.row_index`; offsets are of the full row. Of samples that begin others (`batch.prefix_tree`)
the row holds the others' tokens alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.pinned_buffer import PinnedBuffer, sent
from mcore_batching.batch.prefix_tree import require_hosts
from mcore_batching.batch.row_index import RowIndex, Span, padded_offsets, require_alignment
from mcore_batching.batch.schema import Schema
from mcore_batching.batch.values import read_indices, require_token_id


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
        max_seqlen: tokens of the longest padded segment.
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
        sample_indices: origin index of each sample, ``()`` in a placeholder.
        hosts: for each sample the place of the one in whose segment it lies, perhaps its own.
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
    hosts: tuple[int, ...]
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
        """Where each position's values stand in flat fields; on the host."""
        own = [i for i, host in enumerate(self.hosts) if host == i]
        padding = [len(self.hosts)] * (len(self.host_cu_seqlens_padded) - 1 - len(own))
        return RowIndex(
            self.fields.token_span,
            self.fields.response_span,
            self.host_cu_seqlens_padded,
            own + padding,
            self.hosts,
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

    def packed(self, key: str, pad_value: float = 0, *, later: int = 0) -> Tensor:
        """A field with rows per token, packed, padded and cut like `tokens`: ``[1, T_local, ...]``.

        Args:
            key: a field of kind PER_TOKEN or ROUTED_EXPERTS (or TOKENS).
            pad_value: fills padding, and tokens without a row (negative ``length_offset``). Padding
                of routed experts takes turns among them instead, so that it loads all evenly.
            later: each token has the value of the one `later` places after it in its sample.

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
        return _packed(self.index, self.fields, field, pad_value, later)


_STREAMS = ("tokens", "labels", "position_ids", "loss_mask")
_TENSORS = (*_STREAMS, "padding_mask", "cu_seqlens_padded")
_RESPONSES = ("loss_masks", "owned", "owned_indices", "owned_positions")


def _packed(index: RowIndex, fields: Columns, field: Field, pad_value: float, later: int) -> Tensor:
    """``[1, T_local, ...]`` values of a field with at most one row per token."""
    values, span = fields.flat(field.name), fields.span(field.name)
    device, places = values.device, index.places(span, later)
    made = values.index_select(0, sent(places, device))
    if field.kind is Kind.ROUTED_EXPERTS:
        pad_values = _experts_of_padding(values, sent(index.positions, device))
    elif pad_value:
        pad_values = made.new_full((), pad_value)
    else:
        return made[None]
    is_padding = sent(places == span.end, device)
    return torch.where(is_padding.view(-1, *[1] * (made.dim() - 1)), pad_values, made)[None]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows are padded and cut; attributes as arguments of `pack`.

    Attributes:
        has_labels: True: labels and loss masks are the samples' own fields ``labels`` and
            ``loss_mask``, with a value per token.
    """

    sample_alignment_tokens: int = 1
    row_alignment_tokens: int = 1
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    pad_token_id: int = 0
    depths: int = 0
    has_labels: bool = False


class RowBlock:
    """Rows of some samples, packed at once on the host; `rows` cuts them.

    Args:
        columns: samples, those of the rows among them.
        rows: places of each row's samples.
        layout: of all rows.
        sample_indices: of each row, as of `pack`.
        hosts: for each of the columns' samples the one in whose segment it lies; both are in the
            same row. None: all have segments of their own.
        is_placeholder: True if the samples are fabricated.

    Attributes:
        fields: of the rows' samples, row after row.
        owned_num_tokens: of each row, as of `PackedMicroBatch`.

    Raises:
        BatchError: a row is too long, or cannot be cut.
    """

    def __init__(
        self,
        columns: Columns,
        rows: Sequence[Sequence[int]],
        layout: Layout,
        *,
        sample_indices: Sequence[tuple[int, ...]],
        hosts: Sequence[int] | None = None,
        is_placeholder: bool = False,
    ) -> None:
        self._layout, self._is_placeholder = layout, is_placeholder
        self._sample_indices = sample_indices
        chosen = [sample for row in rows for sample in row]
        self.fields = columns.taken(chosen)
        self._hosts: Sequence[int] = range(len(chosen))
        if hosts is not None:
            place = {sample: at for at, sample in enumerate(chosen)}
            self._hosts = [place[hosts[sample]] for sample in chosen]
        # First sample of each row, and behind the last one's.
        self._samples = [*accumulate(map(len, rows), initial=0)]
        self._tensors: dict[tuple[str, int], Tensor] = {}  # by name and depth
        self._cuts: dict[str, list[int]] = {}
        self._buffer: PinnedBuffer | None = None
        self._device = torch.device("cpu")
        index = self._lay_out()
        self._add_responses(index)
        for depth, stream in enumerate(self._streams(index)):
            self._tensors |= {(name, depth): value for name, value in stream.items()}

    def _lay_out(self) -> RowIndex:
        """The index of all rows, and their offsets."""
        layout, fields, hosts = self._layout, self.fields, self._hosts
        size = layout.context_parallel_size
        offsets, segments = [0], list[int]()
        self._offsets = list[tuple[int, ...]]()
        for first, last in pairwise(self._samples):
            # A sample in another's segment is not laid out: the row holds its tokens once.
            own = [i for i in range(first, last) if hosts[i] == i]
            lengths = [fields.total_lengths[i] for i in own]
            of_row = padded_offsets(
                lengths, layout.sample_alignment_tokens, layout.row_alignment_tokens
            )
            start = offsets[-1]
            offsets += [start + offset for offset in of_row[1:]]
            segments += own + [len(hosts)] * (len(of_row) - 1 - len(own))
            self._offsets.append(of_row)
        flat = [offset for of_row in self._offsets for offset in of_row]
        self._tensors["cu_seqlens_padded", 0] = torch.tensor(flat, dtype=torch.int32, device="cpu")
        self._cuts["cu_seqlens_padded"] = [*map(len, self._offsets)]
        tokens = [of_row[-1] // size for of_row in self._offsets]
        self._cuts |= dict.fromkeys((*_STREAMS, "padding_mask"), tokens)
        spans = fields.token_span, fields.response_span
        rank = layout.context_parallel_rank
        return RowIndex(*spans, offsets, segments, hosts, size, rank)

    def _add_responses(self, index: RowIndex) -> None:
        """Loss weights of the response tokens, and the positions that predict them."""
        lengths = self.fields.response_lengths
        of_rows = Span.of([sum(lengths[a:b]) for a, b in pairwise(self._samples)])
        weights = loss_weights(self.fields).clone()  # not those of the field itself
        if self._is_placeholder:
            weights = torch.zeros_like(weights)
        held, positions = index.predicting()
        row, count = of_rows.samples.index_select(0, held), len(of_rows.counts)
        tokens = Span.of(self._cuts["tokens"])
        is_trained = (weights.index_select(0, held) != 0).float()
        trained = row.bincount(is_trained, minlength=count)
        self.owned_num_tokens: list[int] = trained.long().tolist()
        made = {
            "loss_masks": weights,
            "owned": torch.zeros_like(weights, dtype=torch.bool).index_fill_(0, held, True),
            "owned_indices": held - of_rows.firsts.index_select(0, row),
            "owned_positions": positions - tokens.firsts.index_select(0, row),
        }
        self._tensors |= {(name, 0): value for name, value in made.items()}
        self._cuts |= dict.fromkeys(_RESPONSES[:2], of_rows.counts)
        self._cuts |= dict.fromkeys(_RESPONSES[2:], row.bincount(minlength=count).tolist())
        tags = self.fields.get("is_padding")
        # All of a padding sample is masked as padding, so that MoE routers do not count its tokens.
        padding = None if tags is None else torch.tensor(tags, dtype=torch.bool, device="cpu")
        self._tensors["padding_mask", 0] = ~index.is_real(padding)[None]

    def _streams(self, index: RowIndex) -> Iterator[dict[str, Tensor]]:
        """Tokens, labels, position ids and loss masks ``[..., 1, T_local]``, at each depth."""
        fields, layout = self.fields, self._layout
        ids, end = fields.flat("tokens"), fields.token_span.end
        weights, axes = self._tensors["loss_masks", 0], fields.position_ids
        places = [index.places(fields.token_span, later) for later in range(layout.depths + 2)]
        # A label is the next depth's token, but for what stands behind the end of a segment.
        padded = [ids.index_select(0, at).long() for at in places]
        if layout.pad_token_id:  # the place of padding holds a 0
            for each, at in zip(padded, places, strict=True):
                each.masked_fill_(at == end, layout.pad_token_id)
        for depth in range(layout.depths + 1):
            stream = {"tokens": padded[depth], "labels": padded[depth + 1]}
            if depth:
                beyond = index.is_beyond(depth)
                stream = {name: each.masked_fill(beyond, 0) for name, each in stream.items()}
            if axes is None:
                stream["position_ids"] = index.counted(depth)
            else:
                own = fields.flat(axes).index_select(0, places[depth])
                stream["position_ids"] = own.long().movedim(0, -1)
            stream = {name: each.unsqueeze(-2) for name, each in stream.items()}
            if layout.has_labels:
                for name in ("labels", "loss_mask"):
                    stream[name] = _packed(index, fields, fields.schema[name], 0, depth)
            else:
                held, positions = index.predicting(depth)
                mask = weights.new_zeros(1, index.num_local)
                mask[0].index_copy_(0, positions, weights.index_select(0, held))
                stream["loss_mask"] = mask
            yield stream

    def pinned(
        self,
        device: torch.device,
        names: Collection[str] | None = None,
        fields: Collection[str] | None = None,
    ) -> RowBlock:
        """These rows, ready for `on_device`, in one buffer: attributes by these names
        (the others stay on the host), and these fields alone; None: all."""
        own = self.fields.compact(fields).fields
        moved = {k: v for k, v in self._tensors.items() if names is None or k[0] in names}
        # From pageable memory the host would wait for the copy.
        buffer = PinnedBuffer((moved, own), pin_memory=device.type == "cuda")
        made = self._with(*buffer.value)
        made._buffer, made._device = buffer, device
        return made

    def on_device(self) -> RowBlock:
        """These `pinned` rows on their device, by one copy that the host does not wait for."""
        assert self._buffer is not None
        return self._with(*self._buffer.on(self._device))

    def _with(
        self, tensors: dict[tuple[str, int], Tensor], fields: dict[str, Tensor | list[Any]]
    ) -> RowBlock:
        made = copy.copy(self)
        made._tensors, made.fields = self._tensors | tensors, self.fields.replaced(fields)
        return made

    def rows(self) -> list[PackedMicroBatch]:
        """Each of them; views."""
        # unsafe_: see `PinnedBuffer`.
        parts = {
            key: torch.unsafe_split_with_sizes(tensor, self._cuts[key[0]], dim=-1)
            for key, tensor in self._tensors.items()
        }
        layout, made = self._layout, list[PackedMicroBatch]()
        for number, (first, last) in enumerate(pairwise(self._samples)):
            own = {key: part[number] for key, part in parts.items()}
            offsets, fields = self._offsets[number], self.fields.taken(range(first, last))
            later = [
                LaterTokens(**{name: own[name, depth] for name in _STREAMS})
                for depth in range(1, layout.depths + 1)
            ]
            row = PackedMicroBatch(
                **{name: own[name, 0] for name in _TENSORS},
                host_cu_seqlens_padded=offsets,
                max_seqlen=max(end - start for start, end in pairwise(offsets)),
                total_lengths=fields.total_lengths,
                response_lengths=fields.response_lengths,
                sample_indices=self._sample_indices[number],
                hosts=tuple(host - first for host in self._hosts[first:last]),
                is_placeholder=self._is_placeholder,
                responses=ResponseTokens(**{name: own[name, 0] for name in _RESPONSES}),
                fields=fields,
                context_parallel_size=layout.context_parallel_size,
                context_parallel_rank=layout.context_parallel_rank,
                owned_num_tokens=self.owned_num_tokens[number],
                later=tuple(later),
            )
            made.append(row)
        return made


def loss_weights(columns: Columns) -> Tensor:
    """Loss weights of the response tokens, float32 ``[R]``: all ones if ``loss_masks`` is absent, 0
    in padding samples, and in the first token of a sample without a prompt, which nothing
    predicts."""
    span, tags = columns.response_span, columns.get("is_padding") or ()
    if "loss_masks" in columns:
        weights = columns.compact(["loss_masks"]).flat("loss_masks")[:-1].float()
    else:
        weights = torch.ones(span.total, device="cpu")
    has_no_prompt = (span.lengths == columns.token_span.lengths) & (span.lengths > 0)
    if has_no_prompt.any():
        weights = weights.index_fill(0, span.firsts[has_no_prompt], 0.0)
    if any(tags):
        is_padding = torch.tensor(tags, dtype=torch.bool, device="cpu")
        weights = weights.masked_fill(is_padding.index_select(0, span.samples), 0.0)
    return weights


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
    device: torch.device | str | None = None,
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
        device: where the row is to be; None: where the first sample's tokens are.

    Returns:
        the row, of copies.

    Raises:
        SchemaError: a field is not declared, or a value does not match its kind.
        BatchError: no samples, not one index per sample, alignments that do not divide, a
            ``pad_token_id`` that is no integer, or hosts that cannot hold their samples.
    """
    require_alignment(sample_alignment_tokens, row_alignment_tokens, context_parallel_size)
    columns = samples if isinstance(samples, Columns) else Columns.read(samples, schema)
    count = len(columns.total_lengths)
    indices = _read_indices(sample_indices, count, is_placeholder)
    if hosts is not None:
        require_hosts(hosts, columns)
    layout = Layout(
        sample_alignment_tokens=sample_alignment_tokens,
        row_alignment_tokens=row_alignment_tokens,
        context_parallel_size=context_parallel_size,
        context_parallel_rank=context_parallel_rank,
        pad_token_id=require_token_id("pad_token_id", pad_token_id),
        depths=depths,
    )
    made = RowBlock(
        columns,
        [range(count)],
        layout,
        sample_indices=[indices],
        hosts=hosts,
        is_placeholder=is_placeholder,
    )
    if device is None:
        tokens = samples["tokens"][0]
        device = tokens.device if isinstance(tokens, Tensor) else "cpu"
    if torch.device(device).type != "cpu":
        made = made.pinned(torch.device(device)).on_device()
    return made.rows()[0]


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
