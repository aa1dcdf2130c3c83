"""What a launch starts: forks the ranks, which do the jobs of a folder and write the results."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bootstrap import (
    initialize_model_parallel,
    initialize_process_group,
)
from megatron.core import parallel_state

from kit.groups import keep_groups, release_groups
from kit.patience import MOST_SLOWNESS, is_up
from kit.ranks import fork_ranks
from mcore_batching.planning import ParallelDims

SECONDS_FOR_ALL_STACKS = 2.0


def main() -> None:
    """Start the ranks; as under torchrun, the first to fail ends all."""
    folder, nproc = Path(sys.argv[1]), int(sys.argv[2])
    for module in {_function(job)[0] for job in _jobs(folder)}:
        importlib.import_module(module)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the ranks alone, see `_end_late`
    fork = fork_ranks(nproc)
    if fork.rank is None:
        sys.exit(fork.first_failure())
    _work(folder, fork.rank)


def _jobs(folder: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads((folder / "jobs.json").read_text())
    return jobs


def _function(job: dict[str, Any]) -> tuple[str, str]:
    """The module and the name in it."""
    module, function = job["function"].split(":")
    return module, function


def _work(folder: Path, rank: int) -> None:
    """Run every job; the first that raises ends the process."""
    stacks = (folder / f"stacks.rank{rank}.txt").open("w")
    faulthandler.enable(file=stacks)  # of a process lost to a signal, at its end too
    faulthandler.register(signal.SIGUSR1, file=stacks)
    initialize_process_group(timeout_seconds=60.0)
    keep_groups()
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
    dist.destroy_process_group()


def _end_late(seconds: float, done: threading.Event) -> None:
    """End the process with the stacks of all ranks, unless the job is done in time."""
    if is_up(seconds, done.wait):
        os.killpg(0, signal.SIGUSR1)
        # Every rank dumps before the first exits: the others are ended as soon as one does.
        if not done.wait(SECONDS_FOR_ALL_STACKS):
            os._exit(17)


def _do(job: dict[str, Any]) -> Any:
    module, function = _function(job)
    torch.manual_seed(0)
    if job["dims"] is not None:
        initialize_model_parallel(ParallelDims(**job["dims"]), timeout_seconds=60.0)
    value = getattr(importlib.import_module(module), function)(**job["parameters"])
    if job["dims"] is not None:
        parallel_state.destroy_model_parallel()
        release_groups()
    return value
