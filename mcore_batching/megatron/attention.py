"""Core attention for packed rows, for layer specs without Transformer Engine.

Megatron's local `DotProductAttention` refuses packed sequences and context parallelism. This
module takes its place in a layer spec: causal within each sequence of the row, grouped-query heads,
sliding windows, attention sinks, context parallel by all-gathering keys and values. A packed row
gives what its sequences give alone.

Not for training at scale, where Transformer Engine's attention is the one to use:

- Under context parallelism keys and values of the whole row are gathered on each rank, cp times the
  memory of ring attention.
- On CUDA in half precision one variable-length kernel runs per row. Where it cannot
  (`why_not_variable_length`, dropout, sinks) one `scaled_dot_product_attention` per run of queries,
  often with a dense mask, quadratic in a sample's length; a warning gives the reason.

Queries see keys by `RowGeometry`: each run of local queries sees some stretches of the whole row,
copied one behind the other where they do not lie so. Attention within a run is causal, the last
query aligned to the last key (the convention of FlashAttention 2.1 and later). Without context
parallelism a sequence is one run; with it, a rank's two zigzag chunks of a sequence are two. A row
of one sequence of 8 tokens on 2 ranks:

    rank 0 holds 0 1 6 7    2 queries see keys 0:2, 2 see keys 0:8
    rank 1 holds 2 3 4 5    2 queries see keys 0:4, 2 see keys 0:6
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import divide
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mcore_batching.batch.columns import sent
from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron.errors import DynamicBatchArgumentError

EVERYTHING = -1
"""A window without an end, as Megatron and PyTorch write it."""


Run = tuple[int, Sequence[tuple[int, int]]]
"""A number of queries, and the stretches of the row that hold their keys, each from a token to
behind another."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    window: int = EVERYTHING,
    sink: Tensor | None = None,
) -> Tensor:
    """``[batch, heads, queries, dim]`` attention, the last query aligned to the last key.

    Keys and values are ``[batch, key-value heads, keys, dim]``; their dims may differ.

    Args:
        window: keys that a query sees before its own; or `EVERYTHING`.
        sink: ``[heads]``, the score of a key that all queries see and that has no value.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_windowed = EVERYTHING < window < num_keys
    enable_gqa = query.shape[1] != key.shape[1]
    mask = None
    # `is_causal` aligns the first query to the first key, here the last ones align; where that is
    # the same it holds all: the fastest kernels take no mask.
    if is_windowed or sink is not None or num_queries != num_keys:
        # Query i is the token num_keys - num_queries + i of its sequence.
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_keys - num_queries)
        mask = mask.triu(num_keys - num_queries - window) if is_windowed else mask
    if sink is not None and mask is not None:
        # One more dim, in which the sink's key alone is 1: the score is each query head's own.
        score = (sink / scale).to(query)[None, :, None, None]
        query = torch.cat((query, score.expand(*query.shape[:3], 1)), dim=-1)
        key = pad(key, (0, 1, 0, 1))
        key[..., -1, -1] = 1.0
        value, mask = pad(value, (0, 0, 0, 1)), pad(mask, (0, 1), value=True)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=enable_gqa,
    )


@functools.cache
def variable_length_kernel() -> Any:
    """PyTorch's variable-length attention, or None where this build has none that fits."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    # Earlier versions take neither a model's own scale, nor a window, nor heads that share keys.
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= {*inspect.signature(varlen_attn).parameters} else None


def why_not_variable_length(query: Tensor, value: Tensor) -> str:
    """Why the variable-length kernel cannot take ``[tokens, heads, dim]``; empty if it can."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    # PyTorch would refuse these with an error in the middle of a step.
    if not query.is_cuda:
        return "it runs on CUDA alone"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    if variable_length_kernel() is None:
        return f"PyTorch {torch.__version__} has none with scale, window_size and enable_gqa"
    if value_dim != dim:
        return f"heads have {dim} dims in queries and {value_dim} in values"
    # Limits of FlashAttention 2, which it calls.
    if dim > 256 or dim % 8:
        return f"it takes up to 256 dims a head, in multiples of 8, not {dim}"
    return ""


logger = logging.getLogger(__name__)

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
"""Masks under which no token sees a later one of its sequence."""


class _GatherStretches(torch.autograd.Function):
    """``[tokens, ...]`` to its stretches one behind the other, which may overlap."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stretches: Sequence[tuple[int, int]]) -> Tensor:
        ctx.stretches, ctx.shape = stretches, rows.shape
        return torch.cat([rows[start:end] for start, end in stretches])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Many runs add to a beginning: not in half precision, and in the same order every time.
        (grad,) = grads
        dtype = torch.promote_types(grad.dtype, torch.float32)
        summed = torch.zeros(ctx.shape, dtype=dtype, device=grad.device)
        place = 0
        for start, end in ctx.stretches:
            summed[start:end] += grad[place : place + end - start]
            place += end - start
        return summed.to(grad.dtype), None


class RowGeometry:
    """The keys that each run of a rank's queries sees; what the device has of it is copied there
    once, the same in every layer.

    Args:
        cu_seqlens: ``[sequences + 1]`` offsets in the full row; under context parallelism each
            length divides by twice the ranks.
        group: ranks that share the row, in the order of their slices.
        runs: in the order of the queries; None: each chunk of a sequence sees its beginning.
        device: of queries and keys.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        runs: Sequence[Run] | None = None,
    ) -> None:
        self._cu_seqlens, self._group, self._device = cu_seqlens, group, device
        if runs is None:
            size, rank = (1, 0) if group is None else (group.size(), group.rank())
            # Kernels break on runs without queries.
            runs = [
                (end - first, [(start, end)])
                for start, first, end in Slice(cu_seqlens, size, rank).chunks
                if first < end
            ]
        self._queries = [queries for queries, _ in runs]
        self._keys = [sum(end - start for start, end in stretches) for _, stretches in runs]
        self._stretches = [stretch for _, stretches in runs for stretch in stretches]

    @functools.cached_property
    def _restore_index(self) -> Tensor:
        """The order in which gathered keys are the full row: int64 ``[tokens of that row]``."""
        assert self._group is not None
        size = self._group.size()
        held = [Slice(self._cu_seqlens, size, rank).positions for rank in range(size)]
        # Gathered token k is at row position held[k]; the inverse permutation finds it.
        return sent(torch.cat(held).argsort(), self._device)

    @functools.cached_property
    def offsets_and_longest(self) -> tuple[Tensor, Tensor, int, int]:
        """int32 ``[runs + 1]`` offsets of queries and of keys, and the most of each in a run."""
        of_queries, of_keys = (
            sent(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), self._device)
            for lengths in (self._queries, self._keys)
        )
        return of_queries, of_keys, max(self._queries), max(self._keys)

    def keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[keys, heads, dim]`` of all runs, one run behind the other, from this
        rank's slice of them."""
        if self._group is not None and self._group.size() > 1:
            # One collective for both: keys and values side by side on the last axis. Backward adds
            # up the gradients that the queries of all ranks make of them.
            both = torch.cat((key, value), -1)
            both = gather_from_sequence_parallel_region(both, group=self._group)
            # Ranks hold zigzag chunks, which lie rank after rank: put into the row's order.
            both = both.index_select(0, self._restore_index)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        ends = [0, *(end for _, end in self._stretches)]
        if [start for start, _ in self._stretches] == ends[:-1]:
            return key, value
        gather = cast(Any, _GatherStretches).apply
        return gather(key, self._stretches), gather(value, self._stretches)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = EVERYTHING
    ) -> Tensor:
        """``[tokens, heads, dim]`` attention of all runs by the variable-length kernel, to keys and
        values as `keys` gives them."""
        out: Tensor = variable_length_kernel()(
            *(each.contiguous() for each in (query, key, value)),
            *self.offsets_and_longest,
            scale=scale,
            window_size=(window, 0),  # 0 after: causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    def attend_run_by_run(self, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        """The same by one `causal_attention` per run, with its `options`."""
        counts = self._queries, self._keys, self._keys
        parts = map(torch.split, (query, key, value), counts)
        outs = []
        for part in zip(*parts, strict=True):
            # [tokens, heads, dim] -> [1, heads, tokens, dim], as the kernels take it.
            q, k, v = (each.transpose(0, 1)[None] for each in part)
            outs.append(causal_attention(q, k, v, *options)[0].transpose(0, 1))
        return torch.cat(outs)


@functools.cache
def _warn_of_slow_attention(reason: str) -> None:
    logger.warning(
        "PackedAttention runs one attention per sample, without PyTorch's variable-length kernel: "
        "%s; Transformer Engine's attention may take it",
        reason,
    )


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Drop-in for ``DotProductAttention`` in a layer spec, for packed (THD) and plain rows.

    Takes the constructor arguments that Megatron's attention layers give to a core attention.
    """

    # The sinks are cut over tensor-parallel ranks as the heads are.
    sharded_state_dict = DotProductAttention.sharded_state_dict

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in CAUSAL:
            raise DynamicBatchArgumentError(
                f"PackedAttention is causal, the layer's attn_mask_type {attn_mask_type}: build it "
                "with AttnMaskType.causal, or with Transformer Engine's attention"
            )
        self.config: TransformerConfig = config
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        # Some models attend to everything in every n-th layer, to a window in the others.
        skips = config.window_attn_skip_freq
        is_windowed = is_layer_window_attention(config.window_size, skips, layer_number)
        self.window: int = config.window_size[0] if is_windowed else EVERYTHING
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # Named as Megatron's, so that checkpoints are the same.
        heads = divide(config.num_attention_heads, self.tp_group.size())
        self.softmax_offset = _sinks(config, heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Causal attention within each sequence, whatever the mask: it follows from the offsets.

        Args:
            query: ``[tokens, heads, dim]`` packed, or ``[sequence, batch, heads, dim]``.
            key: like ``query`` with key-value heads.
            value: like ``key``; its dim may differ.
            attention_mask: not used, nor is its type.
            attention_bias: must be None.
            packed_seq_params: offsets of the padded sequences, and the row's own context-parallel
                group where it has one; None for plain rows, without context parallelism alone.

        Returns:
            ``[tokens, heads * dim]`` packed, or ``[sequence, batch, heads * dim]``.
        """
        if attention_bias is not None:
            raise DynamicBatchArgumentError(
                "PackedAttention takes no attention_bias: use Transformer Engine's attention"
            )
        dropout = self.dropout if self.training else 0.0
        # As Megatron's own: tensor-parallel ranks draw numbers of their own, or the heads of all
        # would drop the same keys. Under sequence parallelism its transformer block sees to that.
        draws_own = bool(dropout) and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws_own else contextlib.nullcontext():
            if packed_seq_params is None:
                return self._plain(query, key, value, dropout)
            return self._packed(query, key, value, dropout, packed_seq_params)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, packed_seq_params: Any
    ) -> Tensor:
        # Under dynamic CP every row has its own group, of more or fewer ranks than the model's.
        group: dist.ProcessGroup = packed_seq_params.cp_group or self.cp_group
        geometry = _geometry(packed_seq_params, group, query.device)
        key, value = geometry.keys(key, value)
        # The kernel has neither dropout, which training from scratch may ask for, nor sinks.
        sinks = self.softmax_offset
        reason = why_not_variable_length(query, value) or ("dropout" if dropout else "")
        reason = reason or ("attention sinks" if sinks is not None else "")
        if reason:
            # On the CPU there is nothing that would be faster.
            if query.is_cuda:
                _warn_of_slow_attention(reason)
            settings = self.softmax_scale, dropout, self.window, sinks
            out = geometry.attend_run_by_run(query, key, value, *settings)
        else:
            out = geometry.attend(query, key, value, self.softmax_scale, self.window)
        return out.reshape(out.shape[0], -1)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        if self.cp_group.size() > 1:
            raise DynamicBatchArgumentError(
                "under context parallelism PackedAttention needs packed_seq_params: pass them to "
                "the model, or set --context-parallel-size 1"
            )
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        settings = self.softmax_scale, dropout, self.window, self.softmax_offset
        out = causal_attention(q, k, v, *settings)
        sequence, batch = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def _geometry(
    packed_seq_params: Any, group: dist.ProcessGroup, device: torch.device
) -> RowGeometry:
    """The row's geometry, stored in its parameters: layers share it."""
    geometry: RowGeometry | None = getattr(packed_seq_params, "attention_geometry", None)
    # On the row's parameters, which live as long as its pass; a cache would need an end of its own.
    if geometry is None:
        geometry = RowGeometry(host_cu_seqlens(packed_seq_params), group, device)
        packed_seq_params.attention_geometry = geometry
    return geometry


def host_cu_seqlens(packed_seq_params: Any) -> list[int]:
    """Offsets of the padded sequences as Python ints."""
    # Rows of this package carry them, so that no layer waits for the device.
    offsets = getattr(packed_seq_params, "host_cu_seqlens", None)
    if offsets is None:
        # Rows of a caller's own: without padding Megatron gives the plain offsets alone.
        padded = packed_seq_params.cu_seqlens_q_padded
        chosen = packed_seq_params.cu_seqlens_q if padded is None else padded
        offsets = chosen.tolist()
    return list(offsets)


def _sinks(config: TransformerConfig, heads: int) -> Tensor | None:
    """A score for each head of this rank; None where each softmax is over tokens alone."""
    if config.softmax_type == "vanilla":
        return None
    device = torch.cuda.current_device()
    if config.softmax_type == "off-by-one":
        return torch.zeros(heads, dtype=config.params_dtype, device=device)
    sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    if config.perform_initialization:
        config.init_method(sinks)
    return sinks
