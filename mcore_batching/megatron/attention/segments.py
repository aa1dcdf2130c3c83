"""A packed row's attention as runs of queries and keys, and the kernels that compute them.

A `Run` is a contiguous stretch of local queries with the stretch of gathered keys that they may
see. Attention within a run is causal, the last query aligned to the last key (the convention of
FlashAttention 2.1 and later). Without context parallelism a sequence is one run; with it, a rank's
two zigzag chunks of a sequence are two. A row of one sequence of 8 tokens on 2 ranks:

    rank 0 holds 0 1 6 7    Run(queries 0:2, keys 0:2)  Run(queries 2:4, keys 0:8)
    rank 1 holds 2 3 4 5    Run(queries 0:2, keys 0:4)  Run(queries 2:4, keys 0:6)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mcore_batching.batch.rows.row_layout import Row
from mcore_batching.batch.rows.side_by_side import sent

MAX_HEAD_DIM = 256
"""Of FlashAttention 2, which PyTorch's variable-length attention calls."""
HEAD_DIM_MULTIPLE = 8
EVERYTHING = -1
"""A window without an end, as Megatron and PyTorch write it."""


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
    """The runs of one rank for a row of padded sequences, in the order of the queries.

    ``cu_seqlens``: ``[sequences + 1]`` offsets in the full row; each length divides by
    ``2 * context_parallel_size`` (by nothing where that is 1).
    """
    runs: list[Run] = []
    query = 0
    row = Row(tuple(cu_seqlens), context_parallel_size, context_parallel_rank)
    for start, first, end in row.chunks():
        # Kernels break on runs without queries.
        if first < end:
            # A chunk sees all keys of its sequence up to its own end.
            runs.append(Run(query, query + end - first, start, end))
            query += end - first
    return runs


def zigzag_restore_index(cu_seqlens: Sequence[int], context_parallel_size: int) -> Tensor:
    """The order in which ``gathered[index]`` is the full row: int64 ``[tokens of that row]``."""
    ranks = range(context_parallel_size)
    held = [Row(tuple(cu_seqlens), context_parallel_size, rank).positions() for rank in ranks]
    # Gathered token k is at row position held[k]; the inverse permutation finds it.
    return torch.cat(held).argsort()


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

    Keys and values, whose dims may differ, are ``[batch, key-value heads, keys, dim]``.

    Args:
        window: keys that a query sees before its own; or `EVERYTHING`.
        sink: ``[heads]``, the score of a key that all queries see and that has no value.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_windowed = EVERYTHING < window < num_keys
    enable_gqa = query.shape[1] != key.shape[1]
    mask = None
    # `is_causal` aligns the first query to the first key, here the last ones align; where that is
    # the same it says all: the fastest kernels take no mask.
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


def attend_run_by_run(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], *options: Any
) -> Tensor:
    """``[tokens, heads, dim]`` attention by one `causal_attention` per run, with its `options`."""
    outs = []
    for run in runs:
        # [tokens, heads, dim] -> [1, heads, tokens, dim], as the kernels take it.
        q = query[run.query_start : run.query_end].transpose(0, 1)[None]
        k = key[run.key_start : run.key_end].transpose(0, 1)[None]
        v = value[run.key_start : run.key_end].transpose(0, 1)[None]
        outs.append(causal_attention(q, k, v, *options)[0].transpose(0, 1))
    return torch.cat(outs)


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
    # What PyTorch would refuse with an error in the middle of a step.
    if not query.is_cuda:
        return "it runs on CUDA alone"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    if variable_length_kernel() is None:
        return f"PyTorch {torch.__version__} has none with scale, window_size and enable_gqa"
    if value_dim != dim:
        return f"heads have {dim} dims in queries and {value_dim} in values"
    if dim > MAX_HEAD_DIM or dim % HEAD_DIM_MULTIPLE:
        fits = f"up to {MAX_HEAD_DIM} dims a head, in multiples of {HEAD_DIM_MULTIPLE}"
        return f"it takes {fits}, not {dim}"
    return ""


class KernelRow:
    """The runs of a row as the variable-length kernel takes them; the same in every layer."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        queries = [run.query_end - run.query_start for run in runs]
        keys = [run.key_end - run.key_start for run in runs]
        self._key_index: Tensor | None = None
        # Runs of a context-parallel rank share keys; the kernel wants a copy for each run.
        if queries != keys:
            index = torch.cat([torch.arange(run.key_start, run.key_end) for run in runs])
            self._key_index = sent(index, device)
        offsets = [
            sent(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)
            for lengths in (queries, keys)
        ]
        self._offsets_and_longest = (*offsets, max(queries), max(keys))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = EVERYTHING
    ) -> Tensor:
        """``[tokens, heads, dim]`` attention of all runs by one kernel."""
        if self._key_index is not None:
            key, value = (each.index_select(0, self._key_index) for each in (key, value))
        out: Tensor = variable_length_kernel()(
            *(each.contiguous() for each in (query, key, value)),
            *self._offsets_and_longest,
            scale=scale,
            window_size=(window, 0),  # 0 after: causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out
