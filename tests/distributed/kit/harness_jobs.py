"""Jobs for the harness's own tests: one that hangs, one that dies, one that stays."""

from __future__ import annotations

import os
import threading
import time

import torch.distributed as dist


def lingers() -> int:
    """Returns at once, in a process that does not end by itself; its number."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return os.getpid()


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
