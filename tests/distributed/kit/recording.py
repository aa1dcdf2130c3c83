"""A job that trains a few steps with ``--dynamic-batch-record``."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from kit.exactness import arguments
from kit.model import adam, transformer_config
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from kit.timing import rollouts
from mcore_batching.megatron import PlanningFailedError, get_data_iterator, train_step
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.planning import ParallelDims


def record(dims: dict[str, Any], directory: str, steps: int, cost_model: str | None) -> str:
    """Train; what was raised, "" if nothing."""
    shape = ParallelDims(**dims)
    model = build_model(
        transformer_config("dense", **pipeline_config(shape)),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    )
    optimizer = adam(model, distributed=False)
    args = arguments(
        shape,
        dynamic_batch_record=directory,
        dynamic_batch_cost_model=cost_model,
        global_batch_size=8,
    )
    data = rollouts(4 * steps, 16, seed=parallel_state.get_data_parallel_rank())
    try:
        iterators, counts = get_data_iterator(args, model, data)
    except PlanningFailedError as error:
        return str(error)
    for step in range(steps):
        train_step(packed_objective, args, model, iterators, counts, optimizer, step=step)
    return ""
