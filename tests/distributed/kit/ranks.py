"""Ranks forked off a process that has imported torch and Megatron for all of them.

Importing takes longer than most jobs. `main` runs a script on such ranks, as torchrun would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Fork:
    """What a process is after `fork_ranks`."""

    rank: int | None  # None in the process that forked the ranks
    ranks: dict[int, int]  # process to rank, of those started so far
    store: int | None  # process of the store, alone as torchrun's agent is; None: rank 0 hosts it

    def first_failure(self) -> int:
        """Wait for all ranks, 0, or for the exit code of the first that fails, which ends the
        others as under torchrun."""
        running, code = set(self.ranks), 0
        while running and not code:
            process, status = os.wait()
            running.discard(process)
            code = os.waitstatus_to_exitcode(status)
        self.kill()
        return code

    def kill(self) -> None:
        for process in (*self.ranks, *([] if self.store is None else [self.store])):
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def fork_ranks(nproc: int, *, agent: bool = True) -> Fork:
    """Start so many ranks, with the variables that torchrun would set. Returns in each of them.

    Without an agent rank 0 hosts the store, as under srun and mpirun.
    """
    store, port = _store() if agent else (None, _free_port())
    ranks: dict[int, int] = {}
    for rank in range(nproc):
        process = os.fork()
        if process == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": str(agent),
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            return Fork(rank, ranks, store)
        ranks[process] = rank
    return Fork(None, ranks, store)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _store() -> tuple[int, int]:
    """Process and port of a new store."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        while True:
            time.sleep(3600)
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port


def main() -> None:
    """Run the script of the second argument on as many ranks as the first one says."""
    nproc, script, *words = sys.argv[1:]
    fork = fork_ranks(int(nproc))
    if fork.rank is None:
        sys.exit(fork.first_failure())
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
