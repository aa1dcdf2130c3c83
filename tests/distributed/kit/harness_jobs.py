"""Jobs for the harness's own tests: one that hangs, one that dies, one that returns."""

from __future__ import annotations

import time

import torch.distributed as dist


def hangs() -> None:
    """The last rank never comes to the barrier that the others wait in."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3600)
    dist.barrier()


def dies() -> None:
    """The last rank raises while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("on purpose")
    dist.barrier()


def returns_rank() -> int:
    """This rank."""
    return dist.get_rank()
