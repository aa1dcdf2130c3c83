"""Reports of a function that runs in several processes."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from kit.patience import is_up

SECONDS = 150  # a rank that waits for another gives up before
TIMEOUT = datetime.timedelta(seconds=120)


def reports_of_group(report: Callable[[int, int], Any], size: int, folder: Path) -> list[Any]:
    """What ``report(rank, size)`` returns on each rank of a gloo group."""
    multiprocessing.set_forkserver_preload(
        ["torch.distributed", "mcore_batching.rl", "pytest", "hypothesis"]
    )
    context = multiprocessing.start_processes(
        _in_group,
        args=(report, size, folder),
        nprocs=size,
        join=False,
        start_method="forkserver",  # imports what takes seconds once for all
    )
    try:
        assert not is_up(SECONDS, context.join), f"not done after {SECONDS} seconds"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"results.{rank}", weights_only=False) for rank in range(size)]


def _in_group(rank: int, report: Callable[[int, int], Any], size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=TIMEOUT
    )
    torch.save(report(rank, size), folder / f"results.{rank}")
    dist.barrier()  # no rank leaves while another is still in the last collective
    dist.destroy_process_group()
