"""Process groups that outlive a job, for the next one to have in place of new ones.

Megatron makes about a hundred for every job and leaves them open. To connect so many takes longer
than most jobs.
"""

from __future__ import annotations

import collections
import datetime
import functools
import inspect
from typing import Any

import torch.distributed as dist
from bootstrap import initialize_model_parallel
from megatron.core import parallel_state

from mcore_batching.megatron import job
from mcore_batching.planning import ParallelDims

_TIMEOUT = datetime.timedelta(seconds=60)

_new_group, _destroy_process_group = dist.new_group, dist.destroy_process_group
_signature = inspect.signature(_new_group)
_made: dict[tuple[str, ...], list[Any]] = collections.defaultdict(list)
_taken: collections.Counter[tuple[str, ...]] = collections.Counter()


@functools.wraps(_new_group)
def new_group(*arguments: Any, **options: Any) -> Any:
    """A group that no job has, as `torch.distributed.new_group` makes them.

    All ranks take the same ones, since they make the same ones in the same order.
    """
    asked = _signature.bind(*arguments, **options).arguments
    asked.pop("group_desc", None)
    kind = tuple(f"{name}={value}" for name, value in sorted(asked.items()))
    if _taken[kind] == len(_made[kind]):
        _made[kind].append(_new_group(*arguments, **options))
    _taken[kind] += 1
    return _made[kind][_taken[kind] - 1]


@functools.wraps(_destroy_process_group)
def destroy_process_group(group: Any = None) -> None:
    """Megatron destroys a few of its groups, which are kept; all of them at the end."""
    if group is None:
        _destroy_process_group()


def keep_groups() -> None:
    """From now on `torch.distributed.new_group` hands out groups of finished jobs first."""
    dist.new_group, dist.destroy_process_group = new_group, destroy_process_group
    job.new_group = new_group


def abandon_groups() -> None:
    """Hand out none of those made so far: messages lie in them that nobody received, or they are
    destroyed."""
    _made.clear()
    _taken.clear()


class _KeptGroup(dist.ProcessGroup):
    """Stands for a group of Megatron's that its framework destroys, and makes anew in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())


def keep_data_parallel_group(kept: Any = None) -> Any:
    """Let Megatron's group of the data-parallel ranks be an object that outlives it."""
    kept = kept or _KeptGroup(parallel_state.get_data_parallel_group())
    for name in ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"):  # of 0.19
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, kept)
    return kept


def remake_groups(dims: ParallelDims, number: int) -> None:
    """Destroy all groups and make them anew, for the so-manieth time, as slime does where it
    offloads a model."""
    kept = parallel_state.get_data_parallel_group()
    store = dist.distributed_c10d._get_default_store()
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    dist.barrier()
    dist.destroy_process_group()
    abandon_groups()
    again = dist.PrefixStore(f"remade {number}", store)
    dist.init_process_group("gloo", store=again, timeout=_TIMEOUT, **place)
    parallel_state.destroy_model_parallel()
    initialize_model_parallel(dims, timeout_seconds=_TIMEOUT.total_seconds())
    keep_data_parallel_group(kept)


def release_groups() -> None:
    """Take back the groups of a finished job."""
    _taken.clear()
    forget_job()


def forget_job() -> None:
    """Let the next call begin a new job, though its groups be the same objects."""
    if job._memory is not None:
        job._memory.disconnect()
    job._memory = None
