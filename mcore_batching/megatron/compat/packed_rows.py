"""Megatron's parameters of a packed row, and the ranks that share it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_batching.megatron.compat.layers import HAVE_TRANSFORMER_ENGINE


def attention_groups(pg_collection: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Tensor- and context-parallel groups for a core attention."""
    # 0.16 may give a core attention no collection at all, later versions always do.
    tp_group = getattr(pg_collection, "tp", None)
    cp_group = getattr(pg_collection, "cp", None)
    return (
        parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group,
        parallel_state.get_context_parallel_group() if cp_group is None else cp_group,
    )


def packed_seq_params(
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> PackedSeqParams:
    """Megatron's THD parameters for a row of padded sequences.

    Args:
        cu_seqlens: int32 ``[sequences + 1]`` offsets in the full row, before context-parallel
            slicing.
        max_seqlen: longest padded sequence, in tokens.
        host_cu_seqlens: the same offsets as Python ints.
        group: ranks that share the row, where rows differ in it; None: the model's own.
    """
    # As stock Megatron does, the offsets of the padded sequences are given as the real ones, as
    # Transformer Engine's context-parallel attention wants it: trailing padding attends to its own
    # sequence, and causal masking hides it from every real token.
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    give_offsets(params, host_cu_seqlens, group)
    return params


def give_offsets(
    params: Any, host_cu_seqlens: Sequence[int], group: dist.ProcessGroup | None = None
) -> None:
    """Set the offsets on the host, the sequence of each token and, under dynamic CP, the row's own
    context-parallel group on a row's parameters."""
    params.host_cu_seqlens = tuple(host_cu_seqlens)
    # From 0.17 on Mamba layers begin anew with every sample by `seq_idx` alone. Megatron makes it
    # where `total_tokens` is given from the start, but then the host waits for the device.
    if hasattr(params, "seq_idx"):
        params.total_tokens = host_cu_seqlens[-1]
        params.seq_idx = _sequence_of_tokens(params, host_cu_seqlens[-1])
    if group is not None:
        params.cp_group, params.local_cp_size = group, group.size()


def forget_padded_length(params: Any) -> None:
    """Clear ``tokens_per_sample`` of packed-sequence parameters."""
    # From 0.19 on layers of experts cut a row at multiples of it, and stock scripts set it to the
    # padded length of a sample, which packed rows do not have.
    if getattr(params, "tokens_per_sample", None) is not None:
        params.tokens_per_sample = None


def _sequence_of_tokens(params: Any, total_tokens: int) -> Tensor:
    """int32 ``[1, total_tokens]``: the number of each token's sequence in the whole row."""
    offsets = (
        params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    )
    numbers = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    return numbers.repeat_interleave(offsets.diff(), output_size=total_tokens)[None]


def end_states_with_samples() -> None:
    """Let Mamba layers begin anew with every sample, also in rows that others make.

    For frameworks that make them without ``total_tokens``, once the model is built.
    """
    mixer = sys.modules.get("megatron.core.ssm.mamba_mixer")
    if mixer is None or not hasattr(PackedSeqParams, "seq_idx"):
        return
    if hasattr(mixer.MambaMixer, "states_end_with_samples"):
        return
    ssm_training = mixer.MambaMixer._ssm_training

    def with_sequences(self: Any, inputs: Tensor, packed_seq_params: Any = None) -> Tensor:
        if packed_seq_params is not None and packed_seq_params.seq_idx is None:
            packed_seq_params.seq_idx = _sequence_of_tokens(packed_seq_params, len(inputs))
        output: Tensor = ssm_training(self, inputs, packed_seq_params)
        return output

    mixer.MambaMixer._ssm_training = with_sequences
    mixer.MambaMixer.states_end_with_samples = True


def let_rows_have_groups(attention: Any) -> None:
    """Let an attention layer rotate positions by the row's group instead of the model's."""
    # Core attentions read the group in the row's parameters; the rotation before them reads the
    # layer's `pg_collection.cp`.
    _follow_rows(attention, attention.pg_collection, "cp")
    if HAVE_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        # Megatron makes it where the model's own size is above 1 alone.
        if TEDotProductAttention.cp_stream is None and torch.cuda.is_available():
            TEDotProductAttention.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


def let_router_have_groups(layer: Any, router: Any) -> None:
    """Let the router of a layer sum the load of experts over the ranks that share a row."""
    if not hasattr(router, "models_group"):
        router.models_group = router.tp_cp_group
    _follow_rows(layer, router, "tp_cp_group")


def _follow_rows(layer: Any, owner: Any, name: str) -> None:
    """Replace a group of ``owner`` by the row's while a layer runs forward, which it does again,
    with the same parameters, where backward computes whole layers anew."""
    if hasattr(layer, "groups_of_rows"):
        return
    layer.groups_of_rows = []

    def before_forward(module: Any, _: Any, named: dict[str, Any]) -> None:
        params = named.get("packed_seq_params")
        module.groups_of_rows.append(getattr(owner, name))
        if params is not None and params.cp_group is not None:
            setattr(owner, name, params.cp_group)

    def after_forward(module: Any, *unused: Any) -> None:
        setattr(owner, name, module.groups_of_rows.pop())

    layer.register_forward_pre_hook(before_forward, with_kwargs=True)
    layer.register_forward_hook(after_forward, always_call=True)
