"""Start-up of programs on megatron.core alone: process groups, model, optimizer.

A job on ``megatron.training`` has all of this already. The settings that dynamic micro-batches
need are in `pipeline_config`.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.specs import (
    NO_HYBRID_MODEL,
    hybrid_spec,
    packed_layer_spec,
    packed_mtp_block_spec,
)
from mcore_batching.planning import ParallelDims, ParallelDimsError


def initialize_process_group(timeout_seconds: float = 600.0) -> None:
    """Join torchrun's process group: NCCL on GPUs, gloo on the CPU stand-in.

    Raises:
        DeviceError: there is no CUDA device and the stand-in is not set, or the reverse.
    """
    if not cpu_emulation.is_enabled():
        if not torch.cuda.is_available():
            raise cpu_emulation.DeviceError(
                "no CUDA device: set MCORE_BATCHING_CPU=1 to run on the CPU, or check the driver "
                "and CUDA_VISIBLE_DEVICES"
            )
        # Ranks may share a GPU from NCCL 2.30 on (NCCL_MULTI_RANK_GPU_ENABLE=1); others refuse.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if cpu_emulation.is_enabled() else "nccl",
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def initialize_model_parallel(
    dims: ParallelDims, seed: int = 1234, timeout_seconds: float = 600.0
) -> None:
    """Make Megatron's process groups and seed its generators.

    A ``data_parallel`` of 1, the default, becomes what the number of processes makes it.

    Raises:
        ParallelDimsError: torchrun started more or fewer processes than ``dims`` need.
    """
    model_parallel = dims.tensor_parallel * dims.pipeline_parallel * dims.context_parallel
    needed = dims.data_parallel * model_parallel
    is_inferred = dims.data_parallel == 1 and dist.get_world_size() % needed == 0
    if needed != dist.get_world_size() and not is_inferred:
        raise ParallelDimsError(
            f"the parallel dims need {needed} processes, torchrun started "
            f"{dist.get_world_size()}: set --nproc-per-node to {needed} or change the dims"
        )
    virtual = dims.virtual_pipeline if dims.virtual_pipeline > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tensor_parallel,
        pipeline_model_parallel_size=dims.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=dims.context_parallel,
        expert_model_parallel_size=dims.expert_parallel,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def pipeline_config(dims: ParallelDims) -> dict[str, Any]:
    """`TransformerConfig` arguments that follow from the parallel dims."""
    # The interleaved schedule with variable lengths runs only with overlapped point-to-point
    # communication: upstream swaps shapes, or deadlocks, with batched sends and receives.
    interleaved = dims.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": dims.tensor_parallel,
        "pipeline_model_parallel_size": dims.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": dims.virtual_pipeline if interleaved else None,
        "context_parallel_size": dims.context_parallel,
        "expert_model_parallel_size": dims.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": dims.sequence_parallel,
        "microbatch_group_size_per_vp_stage": dims.microbatch_group_size,
        "variable_seq_lengths": True,
        # Also without experts: with varying lengths `TransformerConfig` refuses its own default.
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def build_model(
    config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    spec: Callable[[TransformerConfig], Any] | None = None,
    ddp: DistributedDataParallelConfig | None = None,
    wrap: bool = True,
    hybrid_layer_pattern: str | None = None,
    **options: Any,
) -> list[Any]:
    """This rank's model chunks, one per virtual pipeline stage, in the data-parallel wrapper.

    They are of a `GPTModel`, or of a `HybridModel` where there is a pattern of layers. In half
    precision Megatron's `Float16Module` comes in between.

    Args:
        vocab_size: padded vocabulary, in entries.
        max_sequence_length: longest sequence, in tokens.
        spec: from the configuration to the layer spec; None: `packed_layer_spec`, or
            ``packed_hybrid_stack_spec`` for a pattern.
        ddp: data-parallel settings; None: Megatron's defaults, gradients reduced in float32.
        wrap: False gives bare chunks, for inference alone.
        hybrid_layer_pattern: as ``--hybrid-layer-pattern``; from Megatron-LM 0.18 on.
        options: further arguments of the model.

    Raises:
        DynamicBatchArgumentError: a pattern, where Megatron-LM has no `HybridModel`.
    """
    options = {
        "vocab_size": vocab_size,
        "max_sequence_length": max_sequence_length,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    } | options
    model: Any = GPTModel
    if hybrid_layer_pattern is None:
        options["transformer_layer_spec"] = (spec or packed_layer_spec)(config)
    elif not compat.has_hybrid_model():
        raise DynamicBatchArgumentError(NO_HYBRID_MODEL)
    else:
        options["hybrid_stack_spec"] = spec(config) if spec else hybrid_spec()
        options["hybrid_layer_pattern"] = hybrid_layer_pattern
        model = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    chunks = _bare_chunks(config, model, options)
    if not wrap:
        return chunks
    return _wrapped(config, chunks, ddp or DistributedDataParallelConfig(grad_reduce_in_fp32=True))


def _bare_chunks(config: TransformerConfig, model: Any, options: dict[str, Any]) -> list[Any]:
    virtual = config.virtual_pipeline_model_parallel_size or 1
    chunks: list[Any] = []
    for stage in range(virtual):
        at = {"vp_stage": stage if virtual > 1 else None}
        further = {}
        if model is GPTModel:
            layer = options["transformer_layer_spec"]
            further["mtp_block_spec"] = packed_mtp_block_spec(config, layer, **at)
        chunk = model(
            config=config,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=virtual == 1, **at),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=virtual == 1, **at),
            vp_stage=at["vp_stage"],
            **options | further,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk.cuda(torch.cuda.current_device()))
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    # As megatron.training does: the optimizer marks parameters that all tensor-parallel ranks hold
    # from parts by these attributes.
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def _wrapped(
    config: TransformerConfig, chunks: list[Any], ddp: DistributedDataParallelConfig
) -> list[Any]:
    """The chunks in Megatron's data-parallel wrapper; `train_step` sets the hooks of ``config``."""
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp,
            module=chunk,
            # As megatron.training does: only the first chunk's gradients are reduced in buckets
            # while the backward pass still runs.
            disable_bucketing=stage > 0,
        )
        for stage, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
