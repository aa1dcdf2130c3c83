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
  often with a dense mask, quadratic in a sample's length; a warning says why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
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

from mcore_batching.batch.rows.side_by_side import sent
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention.segments import (
    EVERYTHING,
    KernelRow,
    attend_run_by_run,
    attention_runs,
    causal_attention,
    why_not_variable_length,
    zigzag_restore_index,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError

logger = logging.getLogger(__name__)

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
"""Masks under which no token sees a later one of its sequence."""


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
        # Every rank's queries saw these keys and made a part of their gradient. A reduce-scatter
        # would do, but gloo has none in every version.
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        first = ctx.group.rank() * ctx.local_tokens
        return grad[first : first + ctx.local_tokens], None


class _Geometry:
    """A row's runs, and its indices on the device, each copied there once."""

    def __init__(
        self, cu_seqlens: list[int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._cu_seqlens, self._size, self._device = cu_seqlens, group.size(), device
        self.runs = attention_runs(cu_seqlens, group.size(), group.rank())

    @functools.cached_property
    def restore_index(self) -> Tensor:
        """The order of gathered keys in the row."""
        return sent(zigzag_restore_index(self._cu_seqlens, self._size), self._device)

    @functools.cached_property
    def kernel_row(self) -> KernelRow:
        """For the variable-length kernel."""
        return KernelRow(self.runs, self._device)


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

    # Of the sinks, which tensor-parallel ranks share as heads.
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
        # Passed on by Megatron where it does without its globals, else taken from these.
        self.tp_group, self.cp_group = compat.packed_rows.attention_groups(pg_collection)
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
        if group.size() > 1:
            key, value = _gathered(key, value, geometry.restore_index, group)
        # The kernel has neither dropout, which training from scratch may ask for, nor sinks.
        sinks = self.softmax_offset
        reason = why_not_variable_length(query, value) or ("dropout" if dropout else "")
        reason = reason or ("attention sinks" if sinks is not None else "")
        if reason:
            # On the CPU there is nothing that would be faster.
            if query.is_cuda:
                _warn_of_slow_attention(reason)
            settings = self.softmax_scale, dropout, self.window, sinks
            out = attend_run_by_run(query, key, value, geometry.runs, *settings)
        else:
            out = geometry.kernel_row.attend(query, key, value, self.softmax_scale, self.window)
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


def _gathered(
    key: Tensor, value: Tensor, restore: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, in its order, from this rank's slice of them."""
    # One collective for both: keys and values side by side on the last axis.
    both: Any = cast(Any, _GatherTokens).apply(torch.cat((key, value), dim=-1), group)
    # Ranks hold zigzag chunks, which lie rank after rank: put into the row's order.
    both = both.index_select(0, restore)
    key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
    return key, value


def _geometry(packed_seq_params: Any, group: dist.ProcessGroup, device: torch.device) -> _Geometry:
    """Of the row, and kept with it: layers share it."""
    geometry: _Geometry | None = getattr(packed_seq_params, "attention_geometry", None)
    # On the row's parameters, which live as long as its pass; a cache would need an end of its own.
    if geometry is None:
        geometry = _Geometry(host_cu_seqlens(packed_seq_params), group, device)
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
