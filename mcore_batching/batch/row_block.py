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

_HOST = torch.device("cpu")


@dataclasses.dataclass(eq=False, kw_only=True)
class RowBlock:
    """Rows of some samples, each tensor made for all of them at once when it is first read.

    Attributes:
        fields: of the rows' samples, row after row; on the host.
        nodes: what each row is made of.
        sample_indices: of each row's samples; empty in all rows if the samples are fabricated.
        context_parallel_size: ranks that share each row.
        context_parallel_rank: this rank among them.
        pad_token_id: fills padding, and labels where there is no next token.
        depths: of multi-token prediction; 0: none.
        has_labels: True: labels and loss masks are the samples' own fields ``labels`` and
            ``loss_mask``, with a value per token.
        device: to which what is read of the rows moves.
    """

    fields: Columns
    nodes: Sequence[Nodes]
    sample_indices: Sequence[tuple[int, ...]]
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    pad_token_id: int = 0
    depths: int = 0
    has_labels: bool = False
    device: torch.device = _HOST

    def __post_init__(self) -> None:
        self.is_placeholder = not self.sample_indices[0]
        # First sample of each row, and behind the last one's.
        self._samples = [*accumulate((len(each.paths) for each in self.nodes), initial=0)]
        # For further epochs: tensors with the length of each row's part, and fields; on the host.
        self._made: dict[tuple[str, int], tuple[Tensor, list[int]]] = {}
        self._fields: dict[str, Tensor | list[Any]] = {}

    def rows(self) -> list[PackedMicroBatch]:
        """Each of them, of what is on the device; views. Anew at each call: what is done to their
        tensors changes neither samples nor further epochs."""
        moved: dict[tuple[str, int], Sequence[Tensor]] = {}
        of_all, made = self.fields.replaced(_MovedFields(self)), list[PackedMicroBatch]()
        for number, nodes in enumerate(self.nodes):
            fields = of_all.taken(range(*self._samples[number : number + 2]))
            own, *later = (
                functools.partial(self._part, moved, number, depth)
                for depth in range(self.depths + 1)
            )
            row = PackedMicroBatch(
                _part=own,
                host_cu_seqlens_padded=nodes.segments,
                max_seqlen=max(map(operator.sub, nodes.segments[1:], nodes.segments)),
                total_lengths=fields.total_lengths,
                response_lengths=fields.response_lengths,
                sample_indices=self.sample_indices[number],
                nodes=nodes,
                is_placeholder=self.is_placeholder,
                responses=ResponseTokens(own),
                fields=fields,
                context_parallel_size=self.context_parallel_size,
                context_parallel_rank=self.context_parallel_rank,
                later=tuple(map(LaterTokens, later)),
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
        if name.startswith("distinct") and not self._is_shared:
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
        return sent(tensor, self.device, copy=True)

    def copied_all(self, values: list[Any]) -> list[Any]:
        """A copy of what lists and dicts hold: of host tensors on the device, by one transfer for
        each type. Tensors with a gradient, of a subclass, or elsewhere follow by themselves."""
        found: list[Tensor] = []
        map_tensors(values, found.append)
        if not found:
            return values
        by_type: dict[torch.dtype, list[Tensor]] = {}
        moved: dict[int, Tensor] = {}
        for each in found:
            if _is_plain(each):
                by_type.setdefault(each.dtype, []).append(each)
            else:
                moved[id(each)] = each.to(self.device, non_blocking=True)
        for plain in by_type.values():
            flat = self.copied(torch.cat([each.reshape(-1) for each in plain]))
            parts = torch.unsafe_split_with_sizes(flat, [each.numel() for each in plain])
            shaped = zip(plain, parts, strict=True)
            moved |= {id(each): part.view(each.shape) for each, part in shaped}
        copies: list[Any] = map_tensors(values, lambda each: moved[id(each)])
        return copies

    def tensor(self, name: str, depth: int = 0) -> tuple[Tensor, list[int]]:
        """A tensor of all rows, by name and depth of multi-token prediction, one row behind the
        other in the last dimension, and the length of each row's part; on the host.

        Raises:
            BatchError: a row cannot be cut.
        """
        if (name, depth) not in self._made:
            made, counts = self._make(name, depth)
            self._made[name, depth] = pinned(made, self.device), counts
        return self._made[name, depth]

    def field(self, name: str) -> Tensor | list[Any]:
        """A field of these samples alone, flat as in `Columns`; on the host."""
        if name not in self._fields:
            own = self.fields.compact([name]).fields[name]
            self._fields[name] = pinned(own, self.device) if isinstance(own, Tensor) else own
        return self._fields[name]

    def forget_index(self) -> None:
        """Free what tensors are made of, which takes more memory than they do."""
        for name in ("_index", "_owned", "_distinct"):
            vars(self).pop(name, None)

    def _make(self, name: str, depth: int) -> tuple[Tensor, list[int]]:
        match name:
            case "cu_seqlens_padded":
                flat = integers([*chain(*(nodes.segments for nodes in self.nodes))])
                return flat.int(), [len(nodes.segments) for nodes in self.nodes]
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
            case "labels" | "loss_mask" if self.has_labels:
                made = packed_field(self._index, self.fields, self.fields.schema[name], depth)
            case "labels":
                made = self._ids(depth + 1, depth)
            case "loss_mask":
                held, positions = self._index.predicting(depth)
                made = self._weights.new_zeros(1, self._index.num_local)
                made[0].index_add_(0, positions, self._weights.index_select(0, held))
            case "position_ids":
                made = self._positions(depth)
            case "padding_mask":
                # All of a padding sample, so that MoE routers do not count its tokens.
                tags = torch.tensor(self.fields.is_padding, dtype=torch.bool, device="cpu")
                made = self._index.is_padding(tags)[None]
            case _:
                raise AssertionError(name)
        return made, self._tokens.counts

    @functools.cached_property
    def _index(self) -> RowIndex:
        size, rank = self.context_parallel_size, self.context_parallel_rank
        spans = self.fields.token_span, self.fields.response_span
        return RowIndex(*spans, self.nodes, size, rank)

    @functools.cached_property
    def _tokens(self) -> Span:
        """Positions of each row's slice among those of all."""
        size = self.context_parallel_size
        return Span([nodes.segments[-1] // size for nodes in self.nodes])

    @functools.cached_property
    def _responses(self) -> Span:
        """Response tokens of each row among those of all."""
        lengths = self.fields.response_lengths
        return Span([sum(lengths[a:b]) for a, b in pairwise(self._samples)])

    @functools.cached_property
    def _weights(self) -> Tensor:
        weights = self.fields.loss_weights()
        return torch.zeros_like(weights) if self.is_placeholder else weights

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
        return distinct, row, row.bincount(minlength=len(self.nodes)), indices

    @functools.cached_property
    def owned_num_tokens(self) -> list[int]:
        """Trainable tokens of each row that this rank predicts."""
        if self.context_parallel_size == 1:
            counts = [0.0] if self.is_placeholder else self.fields.weight_sums()[1].tolist()
            return [int(sum(counts[a:b])) for a, b in pairwise(self._samples)]
        held, _, row, _ = self._owned
        is_trained = self._weights.index_select(0, held) != 0
        return row[is_trained].bincount(minlength=len(self.nodes)).tolist()

    @functools.cached_property
    def _is_shared(self) -> bool:
        """True if samples of some row have tokens in common."""
        return any(nodes.is_shared for nodes in self.nodes)

    def _ids(self, later: int, depth: int) -> Tensor:
        """``[1, T_local]`` tokens `later` places on; 0 where those at a depth are beyond a
        segment's end."""
        index, fields = self._index, self.fields
        made = fields.flat("tokens").index_select(0, index.places(fields.token_span, later)).long()
        if self.pad_token_id:  # the place of padding holds a 0
            made.masked_fill_(index.is_absent(later), self.pad_token_id)
        return (made.masked_fill_(index.is_beyond(depth), 0) if depth else made)[None]

    def _positions(self, depth: int) -> Tensor:
        fields = self.fields
        own = [name for name in fields if fields.schema[name].kind is Kind.POSITION_IDS]
        if not own:
            return self._index.counted(depth)[None]
        places = self._index.places(fields.token_span, depth)
        made = fields.flat(own[0]).index_select(0, places).long()
        return made.movedim(0, -1).unsqueeze(-2).contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


class _MovedFields(Mapping[str, Any]):
    """Fields of a block's samples alone, flat as in `Columns`, each moved when it is read."""

    def __init__(self, block: RowBlock) -> None:
        self._block = block
        self._moved: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._moved:
            own = self._block.field(name)
            if isinstance(own, Tensor):
                self._moved[name] = self._block.copied(own)
            else:
                self._moved[name] = self._block.copied_all(own)
        return self._moved[name]

    def __contains__(self, name: object) -> bool:
        return name in self._block.fields  # `Mapping` would move it to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.fields)

    def __len__(self) -> int:
        return len(self._block.fields)
