"""The parallel dims of the running job and its model's costs, read from Megatron."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.job import Job, present_memory
from mcore_batching.planning import ConfigError, CostModel, ParallelDims
from mcore_batching.planning.costs import layers_of
from mcore_batching.planning.integers import as_integer


def current_dims(model: list[Any]) -> ParallelDims:
    """The `ParallelDims` of the process groups that are set up, and of this model's chunks."""
    config = get_model_config(model[0])
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return ParallelDims(
        data_parallel=parallel_state.get_data_parallel_world_size(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=virtual,
        context_parallel=parallel_state.get_context_parallel_world_size(),
        tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=bool(config.sequence_parallel),
        microbatch_group_size=config.microbatch_group_size_per_vp_stage if virtual > 1 else None,
        # The schedule without virtual stages always does.
        waits_for_sends=virtual == 1 or compat.waits_for_sends(config),
    )


def first_guess(vocabulary: int | None, config: Any, model: Any = None) -> CostModel:
    """The cost model of a model's layers and stages, before any pass of it was timed.

    Without a vocabulary the output layer is left out; of what is no transformer the costs are the
    default. ``model`` is any of its chunks, which has a hybrid model's pattern of layers.
    """
    if not isinstance(config, TransformerConfig):
        return CostModel()
    known = vars(config) | {"vocab_size": vocabulary or 0}
    pattern = getattr(model, "hybrid_layer_pattern", None)
    try:
        if pattern or getattr(config, "is_hybrid_model", False):
            known["hybrid_layer_pattern"] = pattern or "?"
        return layers_of.first_guess(known)
    except (ConfigError, TypeError):  # sizes that are lacking, or of another kind
        return CostModel()


def prediction_depths(config: Any) -> int:
    """Tokens after the next one that a model predicts as well (multi-token prediction)."""
    return getattr(config, "mtp_num_layers", None) or 0


def model_chunks(model: Any) -> list[Any]:
    """The model as a list of chunks: a module alone counts as one."""
    return list(model) if isinstance(model, Sequence) else [model]


def vocabulary_size(chunks: list[Any]) -> int | None:
    """Entries of the model's embedding, padding included; None for models without one."""
    return as_integer(getattr(unwrap_model(chunks[0]), "vocab_size", None))


def is_last_stage() -> bool:
    """True on ranks of the last pipeline stage: its last chunk makes the logits."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def make_row_groups(job: Job, sizes: Sequence[int]) -> None:
    """Make the groups of these sizes that are not there yet. A collective over all ranks."""
    among = parallel_state.get_data_parallel_group(with_context_parallel=True)
    own = parallel_state.get_context_parallel_group()
    # Megatron has two of them already: a NCCL communicator takes memory on the GPU.
    groups = job.memory.row_groups
    groups |= {among.size(): among, own.size(): own}
    minutes = job.options.distributed_timeout_minutes or 10  # Megatron's own default
    missing = [size for size in sizes if size not in groups]
    if not missing:
        return
    # NCCL's memory or a host's sockets may run out on one rank: the others wait for it here.
    with job.watch.reporting("making groups of ranks that share rows"):
        # The ranks of each group like `among`, of other stages and tensor-parallel ranks, too.
        gathered: list[Any] = [None] * dist.get_world_size()
        own_ranks = dist.get_process_group_ranks(among)
        dist.all_gather_object(gathered, tuple(own_ranks), group=job.consensus.group)
        for ranks in sorted(set(gathered)):
            for size in missing:
                for first in range(0, len(ranks), size):
                    block = list(ranks[first : first + size])
                    # All ranks of the job make each group: PyTorch names one that only its own
                    # ranks make by the number of groups that they are in, which may differ.
                    group = dist.new_group(block, timeout=datetime.timedelta(minutes=minutes))
                    if dist.get_rank() in block:
                        groups[size] = group


def row_group(context_parallel_size: int) -> dist.ProcessGroup | None:
    """The ranks that share a row of this size with this one, in the order of their slices.

    None before any groups are made: rows then have Megatron's own context-parallel group.
    """
    # Once there are groups every row has one, also of one rank: Transformer Engine keeps the last
    # row's otherwise.
    memory = present_memory()
    return None if memory is None else memory.row_groups.get(context_parallel_size)


def context_parallel_group(row: PackedMicroBatch) -> dist.ProcessGroup | None:
    """The ranks that share a row, in the order of their slices; None where it is on one.

    What `gather_response` takes as its group. Under ``--dynamic-batch-context-parallel`` rows
    differ in it; without, it is Megatron's context-parallel group.
    """
    group = row_group(row.context_parallel_size) or parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None
