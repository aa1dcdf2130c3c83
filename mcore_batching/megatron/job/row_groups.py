"""Groups of ranks that share a row whose context-parallel size was planned for it.

    4 data- and context-parallel ranks, rows on up to 4 of them
    rank 2 is in    [2]    [2 3]    [0 1 2 3]

Blocks of one size are disjoint, and a larger one is made of smaller ones, so each rank is in one
group of every size. Of the model's context-parallel size and of all ranks it is Megatron's own; the
others are made by all ranks of the job in one order, and kept as long as the job. NCCL
connects a group where its first row is run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron.job.job import Job, present_memory


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
                    # By all ranks of the job, each block: PyTorch tells groups that only their
                    # ranks make by the number of others that these ranks are in, which may differ.
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
