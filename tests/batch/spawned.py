"""Reports of a function that runs in several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from kit.patience import is_up

SECONDS = 150  # a rank that waits for another gives up after 60


def reports_of(
    run: Callable[..., None], size: int, folder: Path, seconds: float = SECONDS
) -> list[Any]:
    """What each rank's ``run(rank, size, store, results)`` saved to ``results.rank``."""
    multiprocessing.set_forkserver_preload(["torch.distributed", "mcore_batching.rl"])
    context = multiprocessing.start_processes(
        run,
        args=(size, str(folder / "store"), str(folder / "results")),
        nprocs=size,
        join=False,
        start_method="forkserver",  # imports what takes seconds once for all
    )
    try:
        assert not is_up(seconds, context.join), f"not done after {seconds} seconds"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"results.{rank}", weights_only=False) for rank in range(size)]
