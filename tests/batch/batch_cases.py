"""Random batches, and a packer in plain Python lists that shares no code with the package's."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, PackedMicroBatch, Schema
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.planning.forest import Forest

PAD, LAYERS, TOP_K, AXES = 999, 2, 4, 3


def make_samples(shapes: list[tuple[int, int]], seed: int = 0) -> dict[str, list[Any]]:
    """Samples of (total length, response length), with masks and a field per token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, length: int) -> torch.Tensor:
        return torch.randint(1, high, (length,), generator=generator)

    return {
        "tokens": [draw(900, total) for total, _ in shapes],
        "total_lengths": [total for total, _ in shapes],
        "response_lengths": [response for _, response in shapes],
        "loss_masks": [draw(4, response) - 1 for _, response in shapes],
        "advantages": [
            torch.rand(response, generator=generator, dtype=torch.float64) for _, response in shapes
        ],
    }


MARKED = DEFAULT_SCHEMA.declare("fewer", Kind.PER_TOKEN, length_offset=-2)
for _name in ("mark", "labels", "loss_mask"):
    MARKED = MARKED.declare(_name, Kind.PER_TOKEN)


def marked(
    shapes: list[tuple[int, int]],
    rows: Sequence[Sequence[int]] = (),
    begins: random.Random | None = None,
) -> dict[str, list[Any]]:
    """Samples of `MARKED` in which no two tokens are the same, nor values of a field, none of them
    0; but some samples of these rows begin as others."""
    totals = torch.tensor([total for total, _ in shapes])
    starts = (totals.cumsum(0) - totals + 1).tolist()
    samples = make_samples(shapes)
    tokens = [torch.arange(s, s + t) for s, (t, _) in zip(starts, shapes, strict=True)]
    for first, *others in rows:
        for i in others if begins else ():
            other = tokens[begins.choice([first, *others])]
            common = begins.choice([0, begins.randint(0, len(other)), len(other)])
            tokens[i][:common] = other[: len(tokens[i])][:common]
    samples["tokens"] = tokens
    samples["mark"] = [torch.stack((each, -each), 1) for each in samples["tokens"]]
    samples["fewer"] = [each[: max(len(each) - 2, 0)] * 0.5 for each in samples["tokens"]]
    samples["position_ids"] = [
        torch.stack((each + 7, each + 9)) if len(each) else [] for each in samples["tokens"]
    ]
    return samples


def full_batch(
    shapes: list[tuple[int, int]], seed: int = 0, axes: tuple[int, ...] = (AXES,)
) -> dict[str, Any]:
    """A value of every kind, distinct everywhere so that a shift by one shows."""
    count = len(shapes)
    return {
        **make_samples(shapes, seed),
        "rewards": [float(i) for i in range(count)],
        "values": [
            (torch.arange(r * 2.0) + 100 * i).reshape(r, 2).to(torch.bfloat16)
            for i, (_, r) in enumerate(shapes)
        ],
        "max_seq_lens": [64] * count,
        "uids": [f"prompt {i // 2}" for i in range(count)],
        "sample_indices": list(range(count)),
        "metadata": [{"turn": i} for i in range(count)],
        "position_ids": [
            (torch.arange(t) + torch.arange(math.prod(axes))[:, None]).reshape(*axes, t).int()
            for t, _ in shapes
        ],
        "multimodal_train_inputs": [{"pixels": torch.rand(4, 4)} for _ in shapes],
        "rollout_routed_experts": [
            torch.randint(0, 60, (max(t - 1, 0), LAYERS, TOP_K), dtype=torch.uint8)
            for t, _ in shapes
        ],
        "rollout_top_p_token_offsets": [torch.arange(r + 1) for _, r in shapes],
        "returns": None,
    }


def equal(a: Any, b: Any) -> bool:
    """True if values, and all that they hold, are of one type and equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def pack_on_all_ranks(
    samples: dict[str, Any], size: int = 1, **options: Any
) -> list[PackedMicroBatch]:
    """The row of these samples, as each of `size` context-parallel ranks packs it."""
    given = {"size": size, "align": 2 * size if size > 1 else 1, "pad_token_id": PAD} | options
    return [pack(samples, rank=rank, **given) for rank in range(size)]


def pack(
    samples: dict[str, Any], schema: Schema = DEFAULT_SCHEMA, **options: Any
) -> PackedMicroBatch:
    """The row of all samples, which are checked."""
    columns = Columns.read(samples, schema)
    return block_of(columns, [range(len(columns.total_lengths))], **options).rows()[0]


def block_of(
    columns: Columns,
    rows: Sequence[Sequence[int]],
    align: int = 1,
    row_align: int = 1,
    size: int = 1,
    rank: int = 0,
    forest: Forest | None = None,
    is_placeholder: bool = False,
    **layout: Any,
) -> RowBlock:
    """Rows of some of the samples, packed at once."""
    nodes = [Nodes.of(columns.total_lengths, row, forest, align, row_align) for row in rows]
    indices = [() if is_placeholder else tuple(row) for row in rows]
    fields = columns.taken([*itertools.chain(*rows)])
    slices = {"context_parallel_size": size, "context_parallel_rank": rank}
    return RowBlock(fields=fields, nodes=nodes, sample_indices=indices, **slices, **layout)


def merge_packed(parts: Sequence[Tensor], cu_seqlens_padded: Sequence[int]) -> Tensor:
    """The packed row, from the slices of all context-parallel ranks: of each segment these hold a
    chunk from its beginning, then one from its end."""
    if len(parts) == 1:
        return parts[0]
    row, at = [parts[0][:0]], 0
    for start, end in itertools.pairwise(cu_seqlens_padded):
        chunk = (end - start) // (2 * len(parts))
        row += [part[at : at + chunk] for part in parts]
        row += [part[at + chunk : at + 2 * chunk] for part in reversed(parts)]
        at += 2 * chunk
    return torch.cat(row)


@st.composite
def sample_shapes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(total length, response length) of some samples, empty ones and whole responses included."""
    made = []
    for total in draw(st.lists(st.integers(0, 30), min_size=1, max_size=6)):
        responses = st.sampled_from([0, min(1, total), total]) | st.integers(0, total)
        made.append((total, draw(responses)))
    return made


def boundary_shapes(context_parallel_size: int) -> list[tuple[int, int]]:
    """Lengths around which slicing goes wrong, with responses of no token, of one, of all but one
    and of the whole sample."""
    chunks = 2 * context_parallel_size
    return [
        (total, response)
        for total in (0, 1, chunks - 1, chunks, chunks + 1, 5 * chunks + 3)
        for response in sorted({0, min(1, total), max(total - 1, 0), total})
    ]
