"""Core attention for packed rows, for layer specs without Transformer Engine.

Megatron's local `DotProductAttention` refuses packed sequences and context parallelism. This
module stands in its place in a layer spec: causal within each sequence of the row, grouped-query
heads, context parallel by all-gathering keys and values.

Guarantees
- A token attends to the earlier tokens of its own sequence and to nothing else: a packed row
  gives what its sequences give alone.
- With context parallelism the queries stay where they are; keys and values are gathered over the
  group (backward: summed over the group, own part kept). That costs cp times the key and value
  memory of ring attention; Transformer Engine's attention is the one to use at scale.
- On CPU `scaled_dot_product_attention` runs once per run of queries; on CUDA PyTorch's
  variable-length attention runs once per row where it exists (half precision, no dropout).

The work is described by `runs`: a run is a contiguous stretch of local queries together with the
stretch of gathered keys that it may see. Attention within a run is causal with the last query
aligned to the last key (the convention of FlashAttention 2.1 and later). Without context
parallelism a sequence is one run; with it, a rank's two zigzag chunks of a sequence are two runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mcore_batching.megatron import compat


@dataclasses.dataclass(frozen=True)
class Run:
    """Queries ``[query_start, query_end)`` of this rank see keys ``[key_start, key_end)``.

    Keys are numbered in the row in which every sequence stands whole and in order.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int


def attention_runs(
    cu_seqlens: Sequence[int], context_parallel_size: int, context_parallel_rank: int
) -> list[Run]:
    """The runs of one rank for a row of padded sequences.

    Args:
        cu_seqlens: ``[sequences + 1]`` token offsets of the padded sequences in the full row; each
            length divides by ``2 * context_parallel_size`` (by nothing where that is 1).
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank.

    Returns:
        one run a sequence without context parallelism, two with it, in the order of the queries.
    """
    runs: list[Run] = []
    query = 0
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        if end == start:
            continue
        if context_parallel_size == 1:
            runs.append(Run(start, end, start, end))
            continue
        chunk = divide(end - start, 2 * context_parallel_size)
        for place in (context_parallel_rank, 2 * context_parallel_size - 1 - context_parallel_rank):
            runs.append(Run(query, query + chunk, start, start + (place + 1) * chunk))
            query += chunk
    return runs


def zigzag_restore_index(cu_seqlens: Sequence[int], context_parallel_size: int) -> Tensor:
    """Where each token of the full row lies in the concatenation of all ranks' local rows.

    Returns:
        int64 ``[tokens of the full row]``: ``full = gathered[index]``.
    """
    local_tokens = cu_seqlens[-1] // context_parallel_size
    parts: list[Tensor] = []
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk = (end - start) // (2 * context_parallel_size)
        local_start = start // context_parallel_size
        for place in range(2 * context_parallel_size):
            mirrored = 2 * context_parallel_size - 1 - place
            rank, second = (place, 0) if place < context_parallel_size else (mirrored, 1)
            first = rank * local_tokens + local_start + second * chunk
            parts.append(torch.arange(first, first + chunk))
    return torch.cat(parts)


class _GatherTokens(torch.autograd.Function):
    """``[tokens / cp, ...]`` on each rank to ``[tokens, ...]`` on all, rank after rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.local_tokens = local.shape[0]
        gathered = local.new_empty((local.shape[0] * group.size(), *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        first = ctx.group.rank() * ctx.local_tokens
        return grad[first : first + ctx.local_tokens], None


class PackedAttention(MegatronModule):
    """Drop-in for ``DotProductAttention`` in a layer spec, for packed (THD) and plain rows.

    Takes the constructor arguments that Megatron's attention layers give to a core attention.

    Raises:
        ValueError: the configuration asks for something that only Transformer Engine has here
            (sliding windows, attention sinks, query-key layer scaling).
    """

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
        del attn_mask_type, attention_type, cp_comm_type, unused
        _refuse_unsupported(config)
        self.config: TransformerConfig = config
        self.layer_number = layer_number
        tp_group, self.cp_group = compat.attention_groups(pg_collection)
        projection = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_partition = divide(projection, tp_group.size())
        head_size = divide(projection, config.num_attention_heads)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_size)
        self.dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

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
        """Causal attention within each sequence.

        Args:
            query: ``[tokens, heads, dim]`` packed, or ``[sequence, batch, heads, dim]``.
            key: like ``query`` with key-value heads.
            value: like ``key``; its dim may differ.
            attention_mask: not used; the mask follows from the sequence offsets.
            attn_mask_type: not used.
            attention_bias: must be None.
            packed_seq_params: offsets of the padded sequences, None for plain rows.
            unused: what newer versions add for other attentions.

        Returns:
            ``[tokens, heads * dim]`` packed, or ``[sequence, batch, heads * dim]``.
        """
        del attention_mask, attn_mask_type, unused
        if attention_bias is not None:
            raise ValueError(
                "PackedAttention takes no attention_bias; use Transformer Engine's attention"
            )
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is None:
            return self._plain(query, key, value, dropout)
        cu_seqlens = host_cu_seqlens(packed_seq_params)
        cp_size = self.cp_group.size()
        if cp_size > 1:
            index = zigzag_restore_index(cu_seqlens, cp_size).to(key.device)
            # One collective for both: keys and values side by side on the last axis.
            both = _GatherTokens.apply(torch.cat((key, value), dim=-1), self.cp_group)
            both = both.index_select(0, index)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        runs = attention_runs(cu_seqlens, cp_size, self.cp_group.rank())
        if _has_variable_length_kernel(query) and dropout == 0.0:
            out = _by_variable_length_kernel(query, key, value, runs, self.softmax_scale)
        else:
            out = _run_by_run(query, key, value, runs, self.softmax_scale, dropout)
        return out.reshape(out.shape[0], -1)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        if self.cp_group.size() > 1:
            raise ValueError(
                "PackedAttention needs packed_seq_params under context parallelism: "
                "give the model packed rows, or set --context-parallel-size 1"
            )
        out = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            dropout_p=dropout,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        sequence, batch = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def host_cu_seqlens(packed_seq_params: Any) -> list[int]:
    """Offsets of the padded sequences as Python ints.

    Rows packed by this project carry them (attribute ``host_cu_seqlens``), so that no layer waits
    for the device; others are read back.
    """
    offsets = getattr(packed_seq_params, "host_cu_seqlens", None)
    if offsets is None:
        padded = packed_seq_params.cu_seqlens_q_padded
        chosen = packed_seq_params.cu_seqlens_q if padded is None else padded
        offsets = chosen.tolist()
    return list(offsets)


def _refuse_unsupported(config: TransformerConfig) -> None:
    asked = []
    if getattr(config, "window_size", None) is not None:
        asked.append("window_size (sliding window)")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        asked.append(f"softmax_type={config.softmax_type!r}")
    if config.apply_query_key_layer_scaling:
        asked.append("apply_query_key_layer_scaling")
    if asked:
        raise ValueError(
            f"PackedAttention does not support {', '.join(asked)}: install Transformer Engine and "
            "set --transformer-impl transformer_engine, or turn it off"
        )


def _run_by_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[Run],
    scale: float,
    dropout: float,
) -> Tensor:
    """``[tokens, heads, dim]`` attention by one `scaled_dot_product_attention` a run."""
    outs = []
    for run in runs:
        q = query[run.query_start : run.query_end].transpose(0, 1)[None]
        k = key[run.key_start : run.key_end].transpose(0, 1)[None]
        v = value[run.key_start : run.key_end].transpose(0, 1)[None]
        num_queries, num_keys = q.shape[2], k.shape[2]
        mask = None
        if num_queries != num_keys:
            # `is_causal` aligns the first query to the first key; here the last ones align.
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            mask = mask.tril(num_keys - num_queries)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@functools.cache
def _variable_length_kernel() -> Any:
    """PyTorch's variable-length attention, or None where this build has none that fits."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    import inspect

    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= set(parameters) else None


def _has_variable_length_kernel(query: Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and _variable_length_kernel() is not None
    )


def _by_variable_length_kernel(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scale: float
) -> Tensor:
    """``[tokens, heads, dim]`` attention of all runs by one kernel."""
    query_lengths = [run.query_end - run.query_start for run in runs]
    key_lengths = [run.key_end - run.key_start for run in runs]
    if any(run.key_end - run.key_start != run.query_end - run.query_start for run in runs):
        # The runs of a context-parallel rank share keys, the kernel wants each run's own.
        index = torch.cat([torch.arange(run.key_start, run.key_end) for run in runs])
        index = index.to(key.device, non_blocking=True)
        key, value = key.index_select(0, index), value.index_select(0, index)

    def offsets(lengths: Sequence[int]) -> Tensor:
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return starts.to(query.device, non_blocking=True)

    out: Tensor = _variable_length_kernel()(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        offsets(query_lengths),
        offsets(key_lengths),
        max(query_lengths),
        max(key_lengths),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out
