"""Attention of rows with branches: each node of a prefix tree attends to its path.

    row    a b c | d e f | d g h i     a b c is the beginning of both branches

    queries    keys
    a b c      a b c
    d e f      a b c d e f
    d g h i    a b c d g h i

For the model such a row is one sequence, so that context parallelism and rotary embeddings take it
as any other. The row's parameters change that where samples matter, as recomputed layers run again
in the backward pass with them:

- `PackedAttention` takes keys and values along the paths; Transformer Engine's attention gets them
  gathered by a hook, with offsets by which the last query is aligned to the last key;
- rotary embeddings are gathered by each token's place in its sample;
- a rotary embedding is handed to the row of its owner.

Gathered keys take memory: about `keys / real_tokens` of `StepStatistics` times those of a row
without branches, in each layer that does not recompute its attention.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.utils import unwrap_model

from mcore_batching.batch.columns import sent
from mcore_batching.batch.row import PackedMicroBatch
from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention import RowGeometry

_ALONG_PATHS = {
    *("GPTModel", "HybridModel", "MambaModel", "TransformerBlock", "TransformerLayer"),
    *("HybridStack", "MambaStack", "MultiTokenPredictionBlock", "MultiTokenPredictionLayer"),
    *("Attention", "MultiLatentAttention"),
    *("DotProductAttention", "TEDotProductAttention", "PackedAttention"),
}
"""Classes with a forward pass that takes a row's offsets and runs rows with branches. Any other
that takes them runs on from branch to branch, or may: state-space layers, sparse attention, a
caller's own layers."""


def why_no_branches(chunks: Sequence[Any]) -> str:
    """Why samples of a model share tokens only where one begins another; empty if branches, too."""
    for chunk in chunks:
        for name, layer in unwrap_model(chunk).named_modules():
            kind: Any = type(layer)
            runs, takes_offsets = _forward_pass(kind)
            if takes_offsets and runs not in _ALONG_PATHS:
                return f"{name} is a {runs}, which is not known to follow the branches of a row"
            fuses = getattr(getattr(layer, "config", None), "apply_rope_fusion", False)
            if isinstance(layer, MultiLatentAttention) and fuses:
                return f"{name} fuses its rotary embedding (set --no-rope-fusion)"
    return ""


@functools.cache
def _forward_pass(kind: Any) -> tuple[str, bool]:
    """Name of the class that has the forward pass of modules of this kind, and whether the pass
    takes a row's offsets, or may."""
    owner: Any = next(each for each in kind.__mro__ if "forward" in vars(each))
    parameters = inspect.signature(owner.forward).parameters
    # Megatron's own that take any argument, as `IdentityOp`, make nothing of it.
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_megatrons = owner.__module__.startswith("megatron.core.")
    takes_offsets = "packed_seq_params" in parameters or (takes_any and not is_megatrons)
    return owner.__name__, takes_offsets or owner.__name__ == "DSAttention"


class _BottomRight:
    """A mask type of Transformer Engine, which reads the name alone; Megatron's enum lacks it."""

    name = "padding_causal_bottom_right"


class Paths(RowGeometry):
    """Keys that the queries of one rank's slice of a row with branches attend to.

    Attributes:
        positions: place of each token of the full row in its sample, int64 ``[T]`` on the device.
    """

    def __init__(self, row: PackedMicroBatch, group: dist.ProcessGroup | None) -> None:
        nodes, device = row.nodes, row.tokens.device
        size = row.context_parallel_size
        runs = []
        for _, first, end in Slice(nodes.segments, size, row.context_parallel_rank).chunks:
            for node, (start, stop) in enumerate(itertools.pairwise(nodes.offsets)):
                queries = min(end, stop) - max(first, start)  # of the chunk in the node
                if queries > 0:
                    path = self._path(nodes.offsets, nodes.parents, node, min(end, stop))
                    runs.append((queries, path))
        super().__init__(nodes.segments, group, device, runs)
        lengths = torch.tensor(nodes.offsets, device="cpu").diff()
        firsts = torch.tensor(nodes.starts, device="cpu") - torch.tensor(nodes.offsets[:-1])
        places = torch.arange(nodes.offsets[-1], device="cpu")
        self.positions = sent(places + firsts.repeat_interleave(lengths), device)

    @staticmethod
    def _path(
        offsets: Sequence[int], parents: Sequence[int], node: int, end: int
    ) -> list[tuple[int, int]]:
        """Stretches of the row from a node's root on, up to the position ``end`` in the node."""
        stretches = [(offsets[node], end)]
        while parents[node] >= 0:
            node = parents[node]
            start, stop = offsets[node], offsets[node + 1]
            # A first child stands right behind its parent.
            if stop == stretches[-1][0]:
                stretches[-1] = start, stretches[-1][1]
            else:
                stretches.append((start, stop))
        return stretches[::-1]

    @property
    def params(self) -> PackedSeqParams:
        """The row's runs as Transformer Engine's attention takes them."""
        of_queries, of_keys, most_queries, most_keys = self.offsets_and_longest
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=of_queries,
            cu_seqlens_kv=of_keys,
            max_seqlen_q=most_queries,
            max_seqlen_kv=most_keys,
        )
        params.local_cp_size = 1  # without a group: it gathers nothing itself
        return params


def attend_to_paths(chunks: Sequence[Any]) -> None:
    """Let a model run rows with branches; other rows run as before. Once for each model."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        if getattr(model, "attends_to_paths", False):
            continue
        model.attends_to_paths = True
        for module in model.modules():
            core: Any = getattr(module, "core_attention", None)
            if compat.is_engines_attention(core):
                core.register_forward_pre_hook(_gather_keys, with_kwargs=True)
                core.register_forward_hook(_end_paths, with_kwargs=True, always_call=True)
            rotary = getattr(module, "rotary_pos_emb", None)
            # Multimodal ones go by the row's position ids.
            if rotary is not None and compat.class_of_forward(rotary) in _ROTARY:
                rotary.positions_of_rows = []
                module.register_forward_pre_hook(_begin_row, with_kwargs=True)
                module.register_forward_hook(_end_row, always_call=True)
                rotary.register_forward_hook(_gather_rotations)


_ROTARY = ("RotaryEmbedding", "YarnRotaryEmbedding")


def _paths(named: dict[str, Any]) -> Paths | None:
    """The paths of the row that a module is called with; None where it has no branches."""
    geometry = getattr(named.get("packed_seq_params"), "attention_geometry", None)
    return geometry if isinstance(geometry, Paths) else None


def _gather_keys(
    _: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    paths = _paths(named)
    if paths is None:
        return None
    query, key, value, *rest = arguments
    changed = {"packed_seq_params": paths.params, "attn_mask_type": _BottomRight}
    return (query, *paths.keys(key, value), *rest), named | changed


def _end_paths(core: Any, _: Any, named: dict[str, Any], *unused: Any) -> None:
    """Let Transformer Engine's attention have the model's ranks again."""
    group = parallel_state.get_context_parallel_group()
    if named.get("attn_mask_type") is _BottomRight and group.size() > 1:
        ranks = dist.get_process_group_ranks(group)
        core.set_context_parallel_group(group, ranks, type(core).cp_stream, core.cp_comm_type)


def _begin_row(owner: Any, _: Any, named: dict[str, Any]) -> None:
    paths = _paths(named)
    owner.rotary_pos_emb.positions_of_rows.append(None if paths is None else paths.positions)


def _end_row(owner: Any, *unused: Any) -> None:
    owner.rotary_pos_emb.positions_of_rows.pop()


def _gather_rotations(rotary: Any, _: Any, output: Any) -> Any:
    positions = rotary.positions_of_rows[-1] if rotary.positions_of_rows else None
    if positions is None:
        return None
    if isinstance(output, tuple):  # YaRN's factor beside it
        return output[0].index_select(0, positions), *output[1:]
    return output.index_select(0, positions)
