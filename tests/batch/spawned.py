"""Reports of a function that runs in several processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from kit.patience import patience

SECONDS = 150  # a rank that waits for another gives up after 60


def reports_of(
    run: Callable[..., None], size: int, folder: Path, seconds: float = SECONDS
) -> list[Any]:
    """What each rank's ``run(rank, size, store, results)`` saved to ``results.rank``."""
    context = multiprocessing.spawn(
        run,
        args=(size, str(folder / "store"), str(folder / "results")),
        nprocs=size,
        join=False,
    )
    deadline = time.monotonic() + patience(seconds)
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                deadline += patience(seconds) - seconds  # the load may have come since
                assert time.monotonic() < deadline, f"not done after {seconds} seconds"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"results.{rank}", weights_only=False) for rank in range(size)]
