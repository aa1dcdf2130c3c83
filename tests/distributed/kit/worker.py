"""What a launch starts: forks the ranks, which do the jobs of a folder and write the results.

Process groups outlive a job, for the next one to have in place of new ones: Megatron makes about a
hundred for every job and leaves them open, and to connect so many takes longer than most jobs.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bootstrap import initialize_model_parallel, initialize_process_group
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils

from kit.patience import MOST_SLOWNESS, is_up
from kit.ranks import fork_ranks
from mcore_batching.megatron import job as engine_job
from mcore_batching.planning import ParallelDims

SECONDS_FOR_ALL_STACKS = 2.0
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


def abandon_groups() -> None:
    """Hand out none of the groups made so far: messages lie in them that nobody received, or they
    are destroyed."""
    _made.clear()
    _taken.clear()


@contextlib.contextmanager
def layout(dims: ParallelDims) -> Iterator[None]:
    initialize_model_parallel(dims, timeout_seconds=60.0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        release_groups()


def release_groups() -> None:
    """Take back the groups of a finished job; the next call begins a new one with them.

    Megatron adds up the losses of experts by layer, of which the next job may have more.
    """
    _taken.clear()
    if engine_job._memory is not None:
        engine_job._memory.disconnect()
    engine_job._memory = None
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # before 0.18
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


def main() -> None:
    """Start the ranks; as under torchrun, the first to fail ends all."""
    folder, nproc = Path(sys.argv[1]), int(sys.argv[2])
    for job in _jobs(folder):
        call_of(job)  # imports the module before the forks, or each would
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the ranks alone, see `_end_late`
    fork = fork_ranks(nproc)
    if fork.rank is None:
        sys.exit(fork.first_failure())
    _work(folder, fork.rank)


def _jobs(folder: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads((folder / "jobs.json").read_text())
    return jobs


def call_of(job: dict[str, Any]) -> Callable[[], Any]:
    """The function of a job with its parameters, ``dims`` as `ParallelDims`."""
    module, function = job["function"].split(":")
    given = dict(job["parameters"])
    if "dims" in given:
        given["dims"] = ParallelDims(**given["dims"])
    return functools.partial(getattr(importlib.import_module(module), function), **given)


def _work(folder: Path, rank: int) -> None:
    """Run every job; the first that raises ends the process."""
    stacks = (folder / f"stacks.rank{rank}.txt").open("w")
    faulthandler.enable(file=stacks)  # of a process lost to a signal, at its end too
    faulthandler.register(signal.SIGUSR1, file=stacks)
    initialize_process_group(timeout_seconds=60.0)
    # From now on groups of finished jobs are handed out first.
    dist.new_group, dist.destroy_process_group = new_group, destroy_process_group
    engine_job.new_group = new_group
    for job in _jobs(folder):
        (folder / f"{job['name']}.rank{rank}.started").touch()
        # Where no thread of Python's gets to run.
        faulthandler.dump_traceback_later(job["seconds"] * MOST_SLOWNESS, file=stacks)
        done = threading.Event()
        threading.Thread(target=_end_late, args=(job["seconds"], done), daemon=True).start()
        result: dict[str, Any]
        try:
            result = {"value": _do(job)}
        except Exception:
            result = {"error": traceback.format_exc()}
        written = folder / f"{job['name']}.rank{rank}.tmp"
        written.write_text(json.dumps(result))
        # Whole or not at all: another rank may end this process at any time.
        written.rename(written.with_suffix(".json"))
        if "error" in result:
            os._exit(1)  # the others may be waiting for this rank: nothing can be taken down
        done.set()
        faulthandler.cancel_dump_traceback_later()
        # Else the collector goes over the modules, and what Megatron keeps, again and again.
        gc.collect()
        gc.freeze()
    # A rank that ends while another still connects to it fails that one.
    dist.barrier()
    dist.destroy_process_group()


def _end_late(seconds: float, done: threading.Event) -> None:
    """End the process with the stacks of all ranks, unless the job is done in time."""
    if is_up(seconds, done.wait):
        os.killpg(0, signal.SIGUSR1)
        # Every rank dumps before the first exits: the others are ended as soon as one does.
        if not done.wait(SECONDS_FOR_ALL_STACKS):
            os._exit(17)


def _do(job: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if job["dims"] is None:
        return call_of(job)()
    with layout(ParallelDims(**job["dims"])):
        return call_of(job)()
