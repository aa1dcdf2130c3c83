"""Torch stand-ins for the kernels of Mamba and GatedDeltaNet layers, which run on GPUs alone, and
Megatron's Mamba layers in a `GPTModel`.

For ``mamba_ssm``, ``causal_conv1d`` and ``flash-linear-attention`` under the CPU stand-in. As
these, they begin anew with every sequence of a row; the scan's memory is quadratic in its length.

    --spec kit.hybrid_spec packed_hybrid_stack_spec    for scripts, in place of the package's own
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from kit.stand_ins import stood_in
from mcore_batching import megatron
from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron import compat, cpu_emulation, specs

with stood_in("triton"):  # whose kernels are for inference
    from megatron.core.ssm import mamba_mixer


def hybrid_spec() -> Any:
    """`mcore_batching.megatron.packed_hybrid_stack_spec`, whose layers run on the CPU as well."""
    spec = megatron.packed_hybrid_stack_spec
    if cpu_emulation.is_enabled():
        stand_in_for_kernels()
        if compat.has_hybrid_model() and compat.packs_sparse_attention():
            spec.submodules.dsa_layer = _sparse_layer()
    return spec


def _sparse_layer() -> Any:
    """Megatron's layer of sparse attention, without Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    layer = hybrid_stack_spec.submodules.dsa_layer
    made = specs._replaced(layer, specs._LOCAL, adds_norms=True)
    indexer = made.submodules.self_attention.submodules.core_attention.submodules.indexer
    for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
        setattr(indexer.submodules, name, _WholeLinear)
    return made


class _WholeLinear(torch.nn.Linear):
    """A projection of sparse attention's indexer, which all tensor-parallel ranks hold whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **unused: Any,
    ) -> None:
        super().__init__(input_size, output_size, bias, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(inputs), None


def stand_in_for_kernels() -> None:
    """Replace the kernels in the state-space layers that are imported by now."""
    stand_ins = {
        "HAVE_FLA": True,
        "HAVE_MAMBA_SSM": True,
        "MAMBA_HAS_STATE_DTYPE": False,
        "ExtendedRMSNorm": _GroupNorm,
        "_check_mamba_sequence_packing_support": lambda **options: (True, None),
        "mamba_split_conv1d_scan_combined": _mamba,
        "causal_conv1d": _causal_convolution,
        "chunk_gated_delta_rule": _gated_delta_rule,
        "l2norm": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
        # The one function that Mamba calls of Transformer Engine, under context parallelism.
        "tex": types.SimpleNamespace(thd_get_partitioned_indices=_own_places),
        "is_te_min_version": lambda version: True,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.ssm."):
            # All of them: 0.16 leaves the names undefined where a kernel is missing.
            vars(module).update(stand_ins)


class _GroupNorm(torch.nn.Module):
    def __init__(self, channels: int, eps: float, group_size: int, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels))
        self.eps, self.group_size = eps, group_size

    def forward(self, values: Tensor) -> Tensor:
        groups = torch.unflatten(values, -1, (-1, self.group_size))
        return (
            functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        )


def _own_places(offsets: Tensor, total_tokens: int, ranks: int, rank: int) -> Tensor:
    """int32 ``[tokens of the rank]``: their places in the whole row."""
    return Slice(offsets.tolist(), ranks, rank).positions.to(torch.int32)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the causal depthwise convolution of one sequence, ``[batch, tokens, channels]``."""
    before = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    made = functional.conv1d(before, weight[:, None], bias, groups=len(weight))
    return functional.silu(made.transpose(1, 2))


def _mamba(
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
    """Convolution and state-space scan ``[batch, tokens, inner]`` of sequences that begin anew
    where ``seq_idx`` changes, in the quadratic form."""
    heads, skip = len(step_bias), options["D"][:, None]
    inner = heads * headdim
    gate, mixed, steps = torch.split(projected, [inner, len(weight), heads], -1)
    numbers = torch.zeros(projected.shape[1]) if seq_idx is None else seq_idx[0]
    lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    made = []
    for x, step in zip(torch.split(mixed, lengths, 1), torch.split(steps, lengths, 1), strict=True):
        x = _convolved(x, weight, bias)
        x, *keys_and_queries = torch.split(x, [inner, *[(x.shape[-1] - inner) // 2] * 2], -1)
        x = torch.unflatten(x, -1, (heads, headdim))
        keys, queries = (
            torch.unflatten(each, -1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2)
            for each in keys_and_queries
        )
        step = functional.softplus(step + step_bias)
        # In float64, or what differences of these sums lose to rounding shows in the gradients.
        decay = (step * decay_rates).double().cumsum(1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, :, :, None]
        decays = (decay[:, :, None] - decay[:, None]).masked_fill(~past, -torch.inf).exp().to(x)
        scores = torch.einsum("blhn,bmhn->blmh", queries, keys) * decays
        y = torch.einsum("blmh,bmhp->blhp", scores, x * step[..., None]) + x * skip
        made.append(y.flatten(2))
    return torch.cat(made, 1) * functional.silu(gate)


def _sequences(values: Tensor, offsets: Tensor | None) -> Sequence[Tensor]:
    """Parts of ``[batch, tokens, ...]``."""
    return [values] if offsets is None else torch.split(values, offsets.diff().tolist(), 1)


def _causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor | None, **unused: Any
) -> tuple[Tensor, None]:
    """``[batch, tokens, channels]``."""
    made = [_convolved(each, weight, bias) for each in _sequences(x, cu_seqlens)]
    return torch.cat(made, 1), None


def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Megatron's own rule in torch, which takes one sequence: ``[batch, tokens, heads, dim]``."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    sequences = zip(*(_sequences(each, cu_seqlens) for each in (q, k, v, g, beta)), strict=True)
    # Chunks of one token: within longer ones it takes differences of sums of gates in float32, and
    # what they lose to rounding shows in the gradients (5e-5 with chunks of 16, 6e-7 so).
    made = [torch_chunk_gated_delta_rule(*each, chunk_size=1)[0] for each in sequences]
    return torch.cat(made, 1), None


class Mixer(mamba_mixer.MambaMixer):
    """Megatron's mixer where a transformer layer has its attention."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **unused: Any
    ) -> None:
        del unused
        stand_in_for_kernels()
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
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=specs.SequenceParallelNorm)
