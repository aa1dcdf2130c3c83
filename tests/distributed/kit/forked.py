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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.harness import Job, environment
from kit.ranks import fork_ranks

START_SECONDS = 120.0
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
    """Run jobs one after the other.

    Args:
        jobs: their functions get ``folder`` beside the parameters, and call `at_fault` with it.
        scratch: folder for results.

    Returns:
        for each job's name the ends of its ranks.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    log = scratch / "log.txt"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "kit.forked", str(scratch)],
            env=environment(max(job.nproc for job in jobs)),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server.wait(START_SECONDS + sum(job.seconds + 5 for job in jobs))
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
    ends = scratch / "ends.json"
    assert ends.exists(), log.read_text()[-3000:]
    return {
        name: [End(**end) for end in ranks] for name, ranks in json.loads(ends.read_text()).items()
    }


def at_fault(folder: str) -> None:
    """Says that the fault happens now, on this rank."""
    path = Path(folder) / "fault"
    path.write_text(repr(time.time()))


def main() -> None:
    """Fork the ranks of one job after the other."""
    scratch = Path(sys.argv[1])
    # Before the forks, or each would import it.
    importlib.import_module("kit.battery")
    ends = {}
    for job in json.loads((scratch / "jobs.json").read_text()):
        folder = scratch / job["name"]
        folder.mkdir()
        fork = fork_ranks(job["nproc"], agent=job["agent"])
        if fork.rank is not None:
            sys.exit(_rank(job, fork.rank, folder))
        ends[job["name"]] = _ends(fork.ranks, job["seconds"], folder)
        fork.kill()
    (scratch / "ends.json").write_text(json.dumps(ends))


def _rank(job: dict[str, Any], rank: int, folder: Path) -> int:
    """What a rank does, and its exit code."""
    from mcore_batching.megatron.standalone.bootstrap import (
        initialize_model_parallel,
        initialize_process_group,
    )
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


def _ends(ranks: dict[int, int], limit: float, folder: Path) -> list[dict[str, Any]]:
    codes: dict[int, tuple[int | None, float]] = {}
    begun = time.monotonic()
    while len(codes) < len(ranks):
        for pid, rank in ranks.items():
            if rank not in codes and (waited := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = (os.waitstatus_to_exitcode(waited[1]), time.time())
            elif rank not in codes and time.monotonic() - begun > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = (None, time.time())
        if len(codes) >= len(ranks) - 1:
            (folder / "released").touch()
        time.sleep(0.02)
    fault = folder / "fault"
    since = float(fault.read_text()) if fault.exists() else float("nan")
    return [_end(folder / f"rank{rank}.json", *codes[rank], since) for rank in sorted(codes)]


def _end(path: Path, code: int | None, ended: float, since: float) -> dict[str, Any]:
    result = json.loads(path.read_text()) if path.exists() else {}
    return {
        "exit_code": code,
        "value": result.get("value"),
        "error": result.get("error", ""),
        "message": result.get("message") or path.with_suffix(".txt").read_text(errors="replace"),
        "seconds": result.get("at", ended) - since,
    }


if __name__ == "__main__":
    main()
