"""Groups of ranks that share a row whose context-parallel size was planned for it.

    4 data-parallel ranks, rows on up to 4 of them
    rank 2 is in    [2]    [2 3]    [0 1 2 3]

Blocks of one size are disjoint, and a larger one is made of smaller ones, so each rank is in one
group of every size. Every rank makes its own, all in ascending order of sizes, and keeps them for
the life of the process. NCCL connects a group where its first row is run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_batching.batch import PackedMicroBatch

DEFAULT_TIMEOUT_MINUTES = 10

_current: tuple[Any, dict[int, dist.ProcessGroup]] | None = None
"""Megatron's group of the ranks, and the groups among them by size."""


def make_row_groups(args: Any, sizes: Sequence[int]) -> None:
    """Make the groups that are not there yet. A collective over all ranks.

    Args:
        args: Megatron's arguments, for ``--distributed-timeout-minutes``.
        sizes: context-parallel sizes that rows may have, ascending; each divides the number of
            data-parallel ranks. The same on every rank.
    """
    global _current
    among = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if _current is None or _current[0] is not among:
        _current = (among, {})
    ranks, own = dist.get_process_group_ranks(among), among.rank()
    minutes = getattr(args, "distributed_timeout_minutes", None) or DEFAULT_TIMEOUT_MINUTES
    for size in sizes:
        if size not in _current[1]:
            first = own // size * size
            # Ranks of other blocks need not wait: a job of 1000 makes some 2000 groups.
            _current[1][size] = dist.new_group(
                ranks[first : first + size],
                timeout=datetime.timedelta(minutes=minutes),
                use_local_synchronization=True,
            )


def row_group(context_parallel_size: int) -> dist.ProcessGroup | None:
    """The ranks that share a row with this one, in the order of their slices.

    None before any groups are made: rows then have Megatron's own context-parallel group. From then
    on every row has one, also of one rank: Transformer Engine keeps the last row's.

    Args:
        context_parallel_size: of the row.
    """
    if _current is None:
        return None
    among = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return _current[1].get(context_parallel_size) if _current[0] is among else None


def context_parallel_group(row: PackedMicroBatch) -> dist.ProcessGroup | None:
    """The ranks that share a row, in the order of their slices; None where it is on one.

    What `gather_response` takes as its group. Under ``--dynamic-batch-context-parallel`` rows
    differ in it; without, it is Megatron's context-parallel group.

    Args:
        row: the micro-batch.
    """
    group = row_group(row.context_parallel_size) or parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None
