"""Megatron's own Mamba layers in a `GPTModel`, on the CPU stand-in of their kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kit.cpu_kernels import stand_in_for_kernels
from kit.stand_ins import stood_in
from mcore_batching.megatron.specs import SequenceParallelNorm

with stood_in("triton"):  # whose kernels are for inference
    from megatron.core.ssm import mamba_mixer


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
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)
