"""Rows of a step in blocks: laid out one behind the other, and then cut, so that each operation is
launched once for several rows.

A tensor is made, and moves to the device, for a whole block when it is first read of one of its
rows. So a pipeline stage without a loss makes no labels, and what a loss reads is made while the
device runs the row's forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns, map_tensors, pinned, sent
from mcore_batching.batch.fields import Kind
from mcore_batching.batch.row import LaterTokens, PackedMicroBatch, ResponseTokens, packed_field
from mcore_batching.batch.row_index import Nodes, RowIndex, Span, integers

_DISTINCT = ("distinct_positions", "distinct_indices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Options of how rows are cut and filled.

    Attributes:
        context_parallel_size: ranks that share each row.
        context_parallel_rank: this rank among them.
        pad_token_id: fills padding, and labels where there is no next token.
        depths: of multi-token prediction; 0: none.
        has_labels: True: labels and loss masks are the samples' own fields ``labels`` and
            ``loss_mask``, with a value per token.
    """

    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    pad_token_id: int = 0
    depths: int = 0
    has_labels: bool = False


class RowBlock:
    """Rows of some samples, each tensor made for all of them at once when it is first read.

    Args:
        columns: samples, those of the rows among them.
        rows: places of each row's samples.
        nodes: what each row is made of.
        layout: of all rows.
        sample_indices: indices of each row's samples in the columns, empty for a placeholder.
        is_placeholder: True if the samples are fabricated.
        device: to which what is read of the rows moves.

    Attributes:
        fields: of the rows' samples, row after row; on the host.
    """

    def __init__(
        self,
        columns: Columns,
        rows: Sequence[Sequence[int]],
        nodes: Sequence[Nodes],
        layout: Layout,
        *,
        sample_indices: Sequence[tuple[int, ...]],
        is_placeholder: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._nodes, self._layout, self._is_placeholder = nodes, layout, is_placeholder
        self._sample_indices, self._device = sample_indices, device or torch.device("cpu")
        self.fields = columns.taken([sample for row in rows for sample in row])
        # First sample of each row, and behind the last one's.
        self._samples = [*accumulate(map(len, rows), initial=0)]
        self._made: dict[tuple[str, int], tuple[Tensor, list[int]]] = {}
        self._fields: dict[str, Tensor | list[Any]] = {}

    def rows(self) -> list[PackedMicroBatch]:
        """Each of them, of what is on the device; views. Anew at each call: what is done to their
        tensors changes neither samples nor further epochs."""
        moved: dict[tuple[str, int], Sequence[Tensor]] = {}
        of_all, layout = self.fields.replaced(_MovedFields(self)), self._layout
        depths, made = range(layout.depths + 1), list[PackedMicroBatch]()
        for number, nodes in enumerate(self._nodes):
            fields = of_all.taken(range(self._samples[number], self._samples[number + 1]))
            parts = [functools.partial(self._part, moved, number, depth) for depth in depths]
            row = PackedMicroBatch(
                _part=parts[0],
                host_cu_seqlens_padded=nodes.segments,
                max_seqlen=max(map(operator.sub, nodes.segments[1:], nodes.segments)),
                total_lengths=fields.total_lengths,
                response_lengths=fields.response_lengths,
                sample_indices=self._sample_indices[number],
                nodes=nodes,
                is_placeholder=self._is_placeholder,
                responses=ResponseTokens(parts[0]),
                fields=fields,
                context_parallel_size=layout.context_parallel_size,
                context_parallel_rank=layout.context_parallel_rank,
                later=tuple(map(LaterTokens, parts[1:])),
            )
            made.append(row)
        return made

    def _part(
        self, moved: dict[tuple[str, int], Sequence[Tensor]], number: int, depth: int, name: str
    ) -> Any:
        """One row's value, by name and depth of multi-token prediction, moved with those of all
        rows when the first is read."""
        if name == "owned_num_tokens":
            return self.owned_num_tokens[number]
        if name in _DISTINCT and not self.is_shared:
            return None
        if (name, depth) not in moved:
            whole, counts = self.tensor(name, depth)
            # unsafe_: views without a shared version counter. Otherwise autograd would take a
            # change in place of one row for a change of all.
            parts = torch.unsafe_split_with_sizes(self.copied(whole), counts, dim=-1)
            moved[name, depth] = parts
        return moved[name, depth][number]

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device, for which the host does not wait."""
        return sent(tensor, self._device, copy=True)

    def copied_all(self, values: list[Any]) -> list[Any]:
        """A copy of what lists and dicts hold: of host tensors on the device, by one transfer for
        each type. Tensors with a gradient, of a subclass, or elsewhere follow by themselves."""
        found: list[Tensor] = []
        map_tensors(values, found.append)
        if not found:
            return values
        by_type: dict[torch.dtype, dict[int, Tensor]] = {}
        moved: dict[int, Tensor] = {}
        for each in found:
            if _is_plain(each):
                by_type.setdefault(each.dtype, {})[id(each)] = each
            else:
                moved[id(each)] = each.to(self._device, non_blocking=True)
        for plain in by_type.values():
            flat = self.copied(torch.cat([each.reshape(-1) for each in plain.values()]))
            parts = torch.unsafe_split_with_sizes(flat, [each.numel() for each in plain.values()])
            shaped = zip(plain.items(), parts, strict=True)
            moved |= {key: part.view(each.shape) for (key, each), part in shaped}
        copies: list[Any] = map_tensors(values, lambda each: moved[id(each)])
        return copies

    def tensor(self, name: str, depth: int = 0) -> tuple[Tensor, list[int]]:
        """A tensor of all rows, by name and depth of multi-token prediction, one row behind the
        other in the last dimension, and the length of each row's part; on the host.

        Kept for further epochs.

        Raises:
            BatchError: a row cannot be cut.
        """
        if (name, depth) not in self._made:
            made, counts = self._make(name, depth)
            self._made[name, depth] = pinned(made, self._device), counts
        return self._made[name, depth]

    def field(self, name: str) -> Tensor | list[Any]:
        """A field of these samples alone, flat as in `Columns`; on the host, and kept for further
        epochs."""
        if name not in self._fields:
            own = self.fields.compact([name]).fields[name]
            self._fields[name] = pinned(own, self._device) if isinstance(own, Tensor) else own
        return self._fields[name]

    def forget_index(self) -> None:
        """Free what tensors are made of, which takes more memory than they do."""
        for name in ("_index", "_owned", "_distinct"):
            vars(self).pop(name, None)

    def _make(self, name: str, depth: int) -> tuple[Tensor, list[int]]:
        match name:
            case "cu_seqlens_padded":
                flat = integers([*chain(*(nodes.segments for nodes in self._nodes))])
                return flat.int(), [len(nodes.segments) for nodes in self._nodes]
            case "loss_masks":
                return self._weights, self._responses.counts
            case "owned_indices":
                held, _, row, owned = self._owned
                return held - self._responses.firsts.index_select(0, row), owned.tolist()
            case "owned_positions":
                _, positions, row, owned = self._owned
                return positions - self._tokens.firsts.index_select(0, row), owned.tolist()
            case "distinct_positions":
                distinct, row, places, _ = self._distinct
                return distinct - self._tokens.firsts.index_select(0, row), places.tolist()
            case "distinct_indices":
                (_, _, row, owned), (_, _, places, indices) = self._owned, self._distinct
                firsts = places.cumsum(0) - places
                return indices - firsts.index_select(0, row), owned.tolist()
            case "tokens":
                made = self._ids(depth, depth)
            case "labels" | "loss_mask" if self._layout.has_labels:
                field = self.fields.schema[name]
                made = packed_field(self._index, self.fields, field, depth)
            case "labels":
                made = self._ids(depth + 1, depth)
            case "loss_mask":
                held, positions = self._index.predicting(depth)
                made = self._weights.new_zeros(1, self._index.num_local)
                made[0].index_add_(0, positions, self._weights.index_select(0, held))
            case "position_ids":
                made = self._positions(depth)
            case "padding_mask":
                tags = self.fields.is_padding
                # All of a padding sample, so that MoE routers do not count its tokens.
                padding = torch.tensor(tags, dtype=torch.bool, device="cpu") if any(tags) else None
                made = self._index.is_padding(padding)[None]
            case _:
                raise AssertionError(name)
        return made, self._tokens.counts

    @functools.cached_property
    def _index(self) -> RowIndex:
        size, rank = self._layout.context_parallel_size, self._layout.context_parallel_rank
        spans = self.fields.token_span, self.fields.response_span
        return RowIndex(*spans, self._nodes, size, rank)

    @functools.cached_property
    def _tokens(self) -> Span:
        """Positions of each row's slice among those of all."""
        size = self._layout.context_parallel_size
        return Span([nodes.segments[-1] // size for nodes in self._nodes])

    @functools.cached_property
    def _responses(self) -> Span:
        """Response tokens of each row among those of all."""
        lengths = self.fields.response_lengths
        return Span([sum(lengths[a:b]) for a, b in pairwise(self._samples)])

    @functools.cached_property
    def _weights(self) -> Tensor:
        weights = loss_weights(self.fields)
        return torch.zeros_like(weights) if self._is_placeholder else weights

    @functools.cached_property
    def _owned(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Response tokens that this rank predicts, int64 ``[owned]`` each: places among all of the
        block; positions that predict them, among all slices; their rows. How many each row has."""
        held, positions = self._index.predicting()
        row, counts = self._responses.samples, self._responses.lengths
        if len(held) < len(row):
            row = row.index_select(0, held)
            counts = row.bincount(minlength=len(counts))
        return held, positions, row, counts

    @functools.cached_property
    def _distinct(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions that predict response tokens, each once, and their rows; how many each row has;
        the place of each of the tokens' positions among them."""
        distinct, indices = torch.unique(self._owned[1], return_inverse=True)
        row = self._tokens.samples.index_select(0, distinct)
        return distinct, row, row.bincount(minlength=len(self._nodes)), indices

    @functools.cached_property
    def owned_num_tokens(self) -> list[int]:
        """Trainable tokens of each row that this rank predicts."""
        if self._layout.context_parallel_size == 1:
            of_samples = [0.0] if self._is_placeholder else weight_sums(self.fields)[1].tolist()
            return [int(sum(of_samples[a:b])) for a, b in pairwise(self._samples)]
        held, _, _, counts = self._owned
        own = self._weights.index_select(0, held)
        trained = torch.segment_reduce((own != 0).float(), "sum", lengths=counts, unsafe=True)
        return [int(each) for each in trained.tolist()]

    @functools.cached_property
    def is_shared(self) -> bool:
        """True if samples of some row have tokens in common."""
        return any(nodes.is_shared for nodes in self._nodes)

    def _ids(self, later: int, depth: int) -> Tensor:
        """``[1, T_local]`` tokens `later` places on; 0 where those at a depth are beyond a
        segment's end."""
        index, fields = self._index, self.fields
        made = fields.flat("tokens").index_select(0, index.places(fields.token_span, later)).long()
        if self._layout.pad_token_id:  # the place of padding holds a 0
            made.masked_fill_(index.is_absent(later), self._layout.pad_token_id)
        return (made.masked_fill_(index.is_beyond(depth), 0) if depth else made)[None]

    def _positions(self, depth: int) -> Tensor:
        fields = self.fields
        axes = [name for name in fields if fields.schema[name].kind is Kind.POSITION_IDS]
        if not axes:
            return self._index.counted(depth)[None]
        places = self._index.places(self.fields.token_span, depth)
        own = self.fields.flat(axes[0]).index_select(0, places).long()
        return own.movedim(0, -1).unsqueeze(-2).contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


class _MovedFields(Mapping[str, Tensor | list[Any]]):
    """Fields of a block's samples alone, flat as in `Columns`."""

    def __init__(self, block: RowBlock) -> None:
        self._block = block
        self._moved: dict[str, Tensor | list[Any]] = {}

    def __getitem__(self, name: str) -> Tensor | list[Any]:
        if name not in self._moved:
            own = self._block.field(name)
            if isinstance(own, Tensor):
                self._moved[name] = self._block.copied(own)
            else:
                self._moved[name] = self._block.copied_all(own)
        return self._moved[name]

    def __contains__(self, name: object) -> bool:
        return name in self._block.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.fields)

    def __len__(self) -> int:
        return len(self._block.fields)


def loss_weights(columns: Columns) -> Tensor:
    """Loss weights of the response tokens, float32 ``[R]``: all ones if ``loss_masks`` is absent, 0
    in padding samples, and in the first token of a sample without a prompt, which nothing
    predicts."""
    span, tags = columns.response_span, columns.is_padding
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


def weight_sums(columns: Columns, depth: int = 0, *, has_labels: bool = False) -> Tensor:
    """Sum of each sample's loss weights of tokens that are predicted at a depth of multi-token
    prediction, and how many are not 0; float64 ``[2, samples]``."""
    name = "loss_mask" if has_labels else "loss_masks"
    own, tokens = columns.response_span, columns.token_span.lengths
    span = columns.token_span if has_labels else own
    sums = columns.sums(name) if name in columns else span.lengths.double().expand(2, -1)
    # The first ones are predicted by nothing so far ahead: response token j of a sample with p
    # prompt tokens by place p - 1 + j - depth.
    none = (
        torch.tensor(depth, device="cpu")
        if has_labels
        else (depth + 1 - tokens + own.lengths).clamp_(min=0)
    )
    early = Span(none.minimum(span.lengths).tolist(), span.starts, span.end)
    if early.total:
        values = torch.ones(early.total, dtype=torch.float64, device="cpu")
        if name in columns:
            values = columns.flat(name).index_select(0, early.places[:-1])
            values = values.float().double()  # as they were added up
        parts = torch.stack((values, (values != 0).double()))
        sums = sums.index_add(1, early.samples, parts, alpha=-1)
    tags = [] if has_labels else columns.is_padding
    if any(tags):
        sums = sums.masked_fill(torch.tensor(tags, dtype=torch.bool, device="cpu"), 0.0)
    return sums
