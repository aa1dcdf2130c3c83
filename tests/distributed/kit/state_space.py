"""Megatron's own Mamba layers on the CPU: stand-ins for the kernels that run on GPUs alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from kit.stand_ins import stood_in
from mcore_batching.batch.zigzag import packed_positions

with stood_in("triton"):  # whose kernels are for inference
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer


class Mixer(mamba_mixer.MambaMixer):
    """Megatron's mixer where a transformer layer has its attention."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **unused: Any
    ) -> None:
        del unused
        _stand_in()
        super().__init__(
            config,
            submodules,
            config.hidden_size,
            layer_number=layer_number,
            pg_collection=pg_collection,
        )

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: Any = None, **options: Any
    ) -> Any:
        del unused, options
        return super().forward(hidden_states, packed_seq_params=packed_seq_params)


def with_mamba(attention_layer: ModuleSpec, config: TransformerConfig) -> Any:
    """This stage's layers: every fourth one as given, the others with Mamba for attention."""
    mixer = ModuleSpec(
        module=Mixer,
        submodules=mamba_mixer.MambaMixerSubmodules(
            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
        ),
    )
    mamba_layer = dataclasses.replace(
        attention_layer,
        submodules=dataclasses.replace(attention_layer.submodules, self_attention=mixer),
    )
    count = config.num_layers // config.pipeline_model_parallel_size
    first = count * parallel_state.get_pipeline_model_parallel_rank()
    layers = [
        attention_layer if number % 4 == 3 else mamba_layer
        for number in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


def _stand_in() -> None:
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    mamba_mixer.ExtendedRMSNorm = _GroupNorm
    mamba_mixer._check_mamba_sequence_packing_support = lambda **options: (True, None)
    mamba_mixer.mamba_split_conv1d_scan_combined = _scan
    mamba_context_parallel.tex = _Engine
    mamba_context_parallel.is_te_min_version = lambda version: True


class _GroupNorm(torch.nn.Module):
    """RMSNorm of groups of channels."""

    def __init__(self, channels: int, eps: float, group_size: int, **unused: Any) -> None:
        del unused
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels))
        self.eps, self.group_size = eps, group_size

    def forward(self, values: Tensor) -> Tensor:
        groups = values.unflatten(-1, (-1, self.group_size))
        return (
            functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        )


class _Engine:
    """The one function of Transformer Engine that Mamba calls under context parallelism."""

    @staticmethod
    def thd_get_partitioned_indices(
        offsets: Tensor, total_tokens: int, ranks: int, rank: int
    ) -> Tensor:
        """int32 ``[tokens of the rank]``: their places in the whole row."""
        del total_tokens
        return packed_positions(offsets.tolist(), ranks, rank).to(torch.int32)


def _scan(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    step_bias: Tensor,
    decay_rates: Tensor,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None,
    **options: Any,
) -> Tensor:
    """Convolution and state-space scan ``[1, tokens, inner]`` of sequences that begin anew where
    ``seq_idx`` changes, in the quadratic form."""
    heads, skip = len(step_bias), options["D"][:, None]
    inner = heads * headdim
    gate, mixed, steps = projected.split([inner, len(weight), heads], -1)
    numbers = torch.zeros(projected.shape[1]) if seq_idx is None else seq_idx[0]
    lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    made = []
    for x, step in zip(mixed.split(lengths, 1), steps.split(lengths, 1), strict=True):
        before = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        x = functional.silu(
            functional.conv1d(before, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
        )
        x, *keys_and_queries = x.split([inner, *[(x.shape[-1] - inner) // 2] * 2], -1)
        x = x.unflatten(-1, (heads, headdim))
        keys, queries = (
            each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2)
            for each in keys_and_queries
        )
        step = functional.softplus(step + step_bias)
        decay = (step * decay_rates).cumsum(1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, :, :, None]
        decays = (decay[:, :, None] - decay[:, None]).masked_fill(~past, -torch.inf).exp()
        scores = torch.einsum("blhn,bmhn->blmh", queries, keys) * decays
        y = torch.einsum("blmh,bmhp->blhp", scores, x * step[..., None]) + x * skip
        made.append(y.flatten(2))
    return torch.cat(made, 1) * functional.silu(gate)
