"""Jobs that end processes: each has ranks of its own, and how they ended is what it brings back.

Nobody ends the others when one rank ends, as torchrun would. With torchrun's store the rank at
fault, the last, stays alive after it has caught its error, as a script may, until all others have
ended. Without an agent rank 0 is at fault, hosts the store, and ends at once.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.harness import Job, launch
from kit.ranks import Fork, fork_ranks

JOBS_AT_A_TIME = 5
CONNECT_SECONDS = 100.0
"""Of Megatron's groups, too: an error that came by a time-out would come after this."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        exit_code: of its process; minus the signal that killed it; None: it had to be killed.
        value: what the job's function returned, None if it raised.
        error: type of what it raised; "" if it returned, or ended otherwise.
        message: of what it raised, else what it wrote to the standard error.
        seconds: from the fault to the error, or to the end of the process.
    """

    exit_code: int | None
    value: Any
    error: str
    message: str
    seconds: float


def run_forked(jobs: list[Job], scratch: Path) -> dict[str, list[End]]:
    """Run jobs, a few at a time: for each one's name the ends of its ranks.

    Their functions get ``folder`` beside the parameters, and call `at_fault` with it.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    launched = launch(
        *("kit.forked", str(scratch)),
        nproc=max(job.nproc for job in jobs),
        folder=scratch,
        seconds=sum(job.seconds + 5 for job in jobs),
    )
    ends = scratch / "ends.json"
    assert ends.exists(), launched.stderr[-3000:]
    return {
        name: [End(**end) for end in ranks] for name, ranks in json.loads(ends.read_text()).items()
    }


def at_fault(folder: str) -> None:
    """Says that the fault happens now, on this rank."""
    Path(folder, "fault").write_text(repr(time.time()))


def main() -> None:
    """Fork the ranks of a few jobs at a time: most of their time they wait."""
    scratch = Path(sys.argv[1])
    # Before the forks, or each would import it.
    importlib.import_module("kit.battery")
    waiting = json.loads((scratch / "jobs.json").read_text())
    running: list[_Running] = []
    ends = {}
    while waiting or running:
        if waiting and len(running) < JOBS_AT_A_TIME:
            job = waiting.pop(0)
            folder = scratch / job["name"]
            folder.mkdir()
            fork = fork_ranks(job["nproc"], agent=job["agent"])
            if fork.rank is not None:
                sys.exit(_rank(job, fork.rank, folder))
            running.append(_Running(folder, fork, time.monotonic() + job["seconds"]))
        for each in [*running]:
            each.look()
            if len(each.codes) == len(each.fork.ranks):
                ends[each.folder.name] = each.ends()
                each.fork.kill()
                running.remove(each)
        time.sleep(0.02)
    (scratch / "ends.json").write_text(json.dumps(ends))


def _rank(job: dict[str, Any], rank: int, folder: Path) -> int:
    """What a rank does, and its exit code."""
    from bootstrap import initialize_model_parallel, initialize_process_group

    from mcore_batching.planning import ParallelDims

    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job["seconds"])
    torch.manual_seed(0)
    initialize_process_group(CONNECT_SECONDS)
    initialize_model_parallel(ParallelDims(**job["dims"]), timeout_seconds=CONNECT_SECONDS)
    module, function = job["function"].split(":")
    work = getattr(importlib.import_module(module), function)
    result: dict[str, Any]
    try:
        result = {"value": work(folder=str(folder), **job["parameters"])}
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error), "at": time.time()}
    path = folder / f"rank{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").rename(path)
    if "error" not in result:
        dist.barrier()
        dist.destroy_process_group()
        return 0
    stays = job["agent"] and rank == job["nproc"] - 1
    while stays and not (folder / "released").exists():
        time.sleep(0.05)
    return 1


@dataclasses.dataclass
class _Running:
    """A job whose ranks have been forked, seen from their parent."""

    folder: Path
    fork: Fork
    given_up: float
    codes: dict[int, tuple[int | None, float]] = dataclasses.field(default_factory=dict)

    def look(self) -> None:
        """Note which ranks have ended, and kill those that are late."""
        for pid, rank in self.fork.ranks.items():
            if rank in self.codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[rank] = (os.waitstatus_to_exitcode(status), time.time())
            elif time.monotonic() > self.given_up:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = (None, time.time())
        if len(self.codes) >= len(self.fork.ranks) - 1:
            (self.folder / "released").touch()

    def ends(self) -> list[dict[str, Any]]:
        """How each rank ended: the values of an `End`."""
        fault, found = self.folder / "fault", []
        since = float(fault.read_text()) if fault.exists() else float("nan")
        for rank, (code, ended) in sorted(self.codes.items()):
            path, log = self.folder / f"rank{rank}.json", self.folder / f"rank{rank}.txt"
            result = json.loads(path.read_text()) if path.exists() else {}
            message = result.get("message") or log.read_text(errors="replace")
            seconds = result.pop("at", ended) - since
            usual = {"value": None, "error": ""} | result
            found.append(usual | {"exit_code": code, "message": message, "seconds": seconds})
        return found
