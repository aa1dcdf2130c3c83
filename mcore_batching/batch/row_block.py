"""Rows of a step, packed in blocks: laid out one behind the other, and then cut, so that each
operation is launched once for several rows. A block moves to a device in one buffer.

    [1, 2, 3] int64, [0.5] float32          24 bytes, 104 of padding, 4 bytes, 124 of padding
    PinnedBuffer(tensors).on(device)        the same tensors, views of one buffer on the device
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, compress, pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns, map_tensors
from mcore_batching.batch.row import LaterTokens, PackedMicroBatch, ResponseTokens, packed_field
from mcore_batching.batch.row_index import Nodes, RowIndex, Span

_STREAMS = ("tokens", "labels", "position_ids", "loss_mask")
_TENSORS = (*_STREAMS, "padding_mask", "cu_seqlens_padded")
_RESPONSES = ("loss_masks", "owned_indices", "owned_positions")
_DISTINCT = ("distinct_positions", "distinct_indices")
_ALIGNMENT_BYTES = 128
"""Start of each tensor of a buffer, for kernels' vectorized loads; PyTorch's allocator aligns to
512."""


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
    """Rows of some samples, packed at once on the host; `rows` cuts them.

    Args:
        columns: samples, those of the rows among them.
        rows: places of each row's samples.
        nodes: what each row is made of.
        layout: of all rows.
        sample_indices: indices of each row's samples in the columns, empty for a placeholder.
        is_placeholder: True if the samples are fabricated.

    Attributes:
        fields: of the rows' samples, row after row.
        owned_num_tokens: of each row, as of `PackedMicroBatch`.

    Raises:
        BatchError: a row cannot be cut.
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
    ) -> None:
        self._layout, self._is_placeholder = layout, is_placeholder
        self._sample_indices, self._nodes = sample_indices, nodes
        self.fields = columns.taken([sample for row in rows for sample in row])
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
        layout, fields = self._layout, self.fields
        size, rank = layout.context_parallel_size, layout.context_parallel_rank
        flat = [offset for nodes in self._nodes for offset in nodes.segments]
        self._tensors["cu_seqlens_padded", 0] = torch.tensor(flat, dtype=torch.int32, device="cpu")
        self._cuts["cu_seqlens_padded"] = [len(nodes.segments) for nodes in self._nodes]
        tokens = [nodes.segments[-1] // size for nodes in self._nodes]
        self._cuts |= dict.fromkeys((*_STREAMS, "padding_mask"), tokens)
        spans = fields.token_span, fields.response_span
        return RowIndex(*spans, self._nodes, size, rank)

    def _add_responses(self, index: RowIndex) -> None:
        """Loss weights of the response tokens, and the positions that predict them."""
        lengths = self.fields.response_lengths
        of_rows = Span.of([sum(lengths[a:b]) for a, b in pairwise(self._samples)])
        weights = loss_weights(self.fields)
        if self._is_placeholder:
            weights = torch.zeros_like(weights)
        held, positions = index.predicting()
        row, own, counts = of_rows.samples, weights, of_rows.lengths
        if len(held) < len(weights):
            row, own = row.index_select(0, held), weights.index_select(0, held)
            counts = row.bincount(minlength=len(counts))
        tokens = Span.of(self._cuts["tokens"])
        trained = torch.segment_reduce((own != 0).float(), "sum", lengths=counts, unsafe=True)
        self.owned_num_tokens: list[int] = trained.long().tolist()
        made = {
            "loss_masks": weights,
            "owned_indices": held - of_rows.firsts.index_select(0, row),
            "owned_positions": positions - tokens.firsts.index_select(0, row),
        }
        if any(nodes.is_shared for nodes in self._nodes):
            distinct, indices = torch.unique(positions, return_inverse=True)
            of_row = tokens.samples.index_select(0, distinct)
            places = of_row.bincount(minlength=len(counts))
            firsts = places.cumsum(0) - places
            made["distinct_positions"] = distinct - tokens.firsts.index_select(0, of_row)
            made["distinct_indices"] = indices - firsts.index_select(0, row)
            self._cuts["distinct_positions"] = places.tolist()
            self._cuts["distinct_indices"] = counts.tolist()
        self._tensors |= {(name, 0): value for name, value in made.items()}
        self._cuts["loss_masks"] = of_rows.counts
        self._cuts |= dict.fromkeys(_RESPONSES[1:], counts.tolist())
        tags = self.fields.get("is_padding")
        # All of a padding sample is masked as padding, so that MoE routers do not count its tokens.
        padding = None if tags is None else torch.tensor(tags, dtype=torch.bool, device="cpu")
        self._tensors["padding_mask", 0] = index.is_padding(padding)[None]

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
                    stream[name] = packed_field(index, fields, fields.schema[name], depth)
            else:
                held, positions = index.predicting(depth)
                mask = weights.new_zeros(1, index.num_local)
                mask[0].index_add_(0, positions, weights.index_select(0, held))
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
            nodes, fields = self._nodes[number], self.fields.taken(range(first, last))
            repeated = {name: own[name, 0] for name in _DISTINCT if (name, 0) in own}
            later = [
                LaterTokens(**{name: own[name, depth] for name in _STREAMS})
                for depth in range(1, layout.depths + 1)
            ]
            row = PackedMicroBatch(
                **{name: own[name, 0] for name in _TENSORS},
                host_cu_seqlens_padded=nodes.segments,
                max_seqlen=max(end - start for start, end in pairwise(nodes.segments)),
                total_lengths=fields.total_lengths,
                response_lengths=fields.response_lengths,
                sample_indices=self._sample_indices[number],
                nodes=nodes,
                is_placeholder=self._is_placeholder,
                responses=ResponseTokens(**{name: own[name, 0] for name in _RESPONSES}, **repeated),
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


class PinnedBuffer:
    """Copies of the host tensors in a value (its dicts, lists and tuples) in one buffer, pinned for
    a CUDA device: a copy from pageable memory makes the host wait, non_blocking or not. Tensors on
    a device, with a gradient, or of a subclass stay outside it.

    Attributes:
        value: the same with views of the buffer in place of those tensors.
    """

    def __init__(self, value: Any, *, pin_memory: bool) -> None:
        found: list[Tensor] = []
        map_tensors(value, found.append)
        self._are_copied = [*map(_is_copied, found)]
        copied = [*compress(found, self._are_copied)]
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in copied]
        # Bytes of the first tensor, of the padding behind it, of the second tensor, ...
        sizes = [tensor.nbytes for tensor in copied]
        self._sizes = [part for size in sizes for part in (size, -size % _ALIGNMENT_BYTES)]
        self._buffer = torch.empty(
            sum(self._sizes), dtype=torch.uint8, device="cpu", pin_memory=pin_memory
        )
        views = self._views(self._buffer)
        for view, tensor in zip(views, copied, strict=True):
            view.copy_(tensor)
        self.value = self._with(views, value, lambda each: each)

    def on(self, device: torch.device) -> Any:
        """The value with copies of its tensors on a device. The host does not wait for pinned
        memory."""
        moved = self._views(self._buffer.to(device, non_blocking=True, copy=True))
        # What was not copied follows by itself.
        return self._with(moved, self.value, lambda each: each.to(device, non_blocking=True))

    def _with(self, views: list[Tensor], value: Any, others: Callable[[Tensor], Tensor]) -> Any:
        """The value with these views in place of what was copied."""
        held, are_copied = iter(views), iter(self._are_copied)
        return map_tensors(value, lambda each: next(held) if next(are_copied) else others(each))

    def _views(self, buffer: Tensor) -> list[Tensor]:
        # unsafe_: views without a shared version counter. Otherwise autograd would take a change in
        # place of one tensor for a change of all.
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)[::2]
        kinds = zip(parts, self._kinds, strict=True)
        return [part.view(dtype).view(shape) for part, (dtype, shape) in kinds]


def _is_copied(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )
