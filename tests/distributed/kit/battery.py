"""Faults that end processes, or that a job goes on through: a table of `FAULTS.md`.

Each row is a job of its own, on each of its layouts, of three steps of training, with ranks of its
own; how they ended is what comes back. Nobody ends the others when one rank ends, as torchrun
would. With torchrun's store the rank at fault, the last, stays alive after it has caught its error,
as a script may, until all others have ended. Without an agent rank 0 is at fault, hosts the store,
and ends at once.
"""

# ruff: noqa: F401, names in cells of the table are seen by them alone
from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bootstrap import initialize_model_parallel, initialize_process_group
from megatron.core import parallel_state

from kit.calls import Calls, loss_with, read_faults
from kit.faults import listed_pass
from kit.harness import launch, processes_of
from kit.objective import packed_objective
from kit.ranks import Fork, fork_ranks
from kit.samples import make_samples, take
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron import plan
from mcore_batching.megatron.exchange import SampleMoves
from mcore_batching.megatron.job import JobConsensus, job_of
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import ParallelDims

JOBS_AT_A_TIME = 5
JOB_SECONDS = 120.0
CONNECT_SECONDS = 100.0
"""Of Megatron's groups, too: an error that came by a time-out would come after this."""
STOPPED_SECONDS = 15
LAYOUTS: dict[str, dict[str, int]] = {
    "DP2": {"data_parallel": 2},
    "TP2": {"tensor_parallel": 2},
    "CP2": {"context_parallel": 2},
    "DP2 shared": {"data_parallel": 2},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP2 PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "CP2 shared": {"context_parallel": 2},
    "TP2 no agent": {"tensor_parallel": 2},
    "CP2 no agent": {"context_parallel": 2},
    "DP2 no agent": {"data_parallel": 2},
    "PP2 no agent": {"pipeline_parallel": 2},
}
_SETS = {"all": [*LAYOUTS][:6], "no agent": [*LAYOUTS][7:]}


def raises(*unused: Any, **also_unused: Any) -> Any:
    # Longer than what a job's store takes.
    raise torch.OutOfMemoryError("out of memory, on purpose" + 9_000_000 * ".")


def after_the_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises from its second call on."""
    calls = iter(range(1000))
    return lambda *given, **options: original(*given, **options) if next(calls) == 0 else raises()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    wake = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def killed_later(schedule: MicroBatchSchedule, ticket: Any = None) -> Any:
    """`plan_next_step`, but for later steps."""
    return kill() if schedule.steps else _plan_next_step(schedule, ticket)


_plan_next_step = plan.plan_next_step


def step_in_sharing(calls: Calls) -> Any:
    alone = dist.get_world_size() == parallel_state.get_data_parallel_world_size()
    calls.data = take(make_samples(), []) if alone else None
    return calls.patched("step", dist, "broadcast", raises)


def step_without_replica_group(calls: Calls) -> Any:
    calls.data = None
    return calls.patched("step", JobConsensus, "_replica_group", property(raises))


def step_that_warns(calls: Calls) -> Any:
    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return logits.float().sum(), {"policy": logits.new_zeros(()), "kl": logits.new_zeros(())}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return calls.step(loss)


def step_recorded(calls: Calls, full: bool = False) -> Any:
    folder = tempfile.mkdtemp()
    calls.args.dynamic_batch_record = folder
    if full:
        # Python ignores SIGXFSZ: writing raises, to the standard error as well.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calls.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(*(each.message for each in caught), sep="\n", file=sys.stderr)
    return found


HEADER = "| fault | layouts | call | others | error | text | ends |"
FAULTS = {
    fault.name: fault._replace(
        layouts=[each for name in fault.layouts for each in _SETS.get(name, [name])],
        text=fault.text.replace("MEMORY", "torch.OutOfMemoryError: out of memory, on purpose"),
    )
    for fault in read_faults(HEADER, globals(), others="calls.step()")
}


def always_on(fault: str) -> str:
    """The layout on which a fault runs without ``--long``; "" if there is none."""
    return next((name.strip("*") for name in FAULTS[fault].layouts if "*" in name), "")


def layouts_of(fault: str) -> list[str]:
    return [*dict.fromkeys(name.strip("*") for name in FAULTS[fault].layouts)]


def run_battery(chosen: list[tuple[str, str]], scratch: Path) -> dict[tuple[str, str], list[Any]]:
    """Run faults on layouts, a few at a time: how each of their ranks ended (`_Running.ends`)."""
    (scratch / "chosen.json").write_text(json.dumps(chosen))
    seconds = len(chosen) * (JOB_SECONDS + 5)
    launched = launch("kit.battery", str(scratch), nproc=4, folder=scratch, seconds=seconds)
    ends = scratch / "ends.json"
    assert ends.exists(), launched.stderr[-3000:]
    found = json.loads(ends.read_text())
    ends_of = [[SimpleNamespace(**end) for end in ranks] for ranks in found]
    return dict(zip(chosen, ends_of, strict=True))


def main() -> None:
    """Fork the ranks of a few jobs at a time: most of their time they wait."""
    scratch = Path(sys.argv[1])
    chosen = json.loads((scratch / "chosen.json").read_text())
    waiting, running, ends = [*enumerate(chosen)], list[_Running](), {}
    while waiting or running:
        if waiting and len(running) < JOBS_AT_A_TIME:
            number, (fault, layout) = waiting.pop(0)
            folder = scratch / str(number)
            folder.mkdir()
            fork = fork_ranks(processes_of(LAYOUTS[layout]), agent="no agent" not in layout)
            if fork.rank is not None:
                sys.exit(_rank(fault, layout, fork.rank, folder))
            running.append(_Running(number, folder, fork))
        for each in [*running]:
            each.look()
            if len(each.codes) == len(each.fork.ranks):
                ends[each.number] = each.ends()
                each.fork.kill()
                running.remove(each)
        time.sleep(0.02)
    (scratch / "ends.json").write_text(
        json.dumps([ends[number] for number, _ in enumerate(chosen)])
    )


def _rank(fault: str, layout: str, rank: int, folder: Path) -> int:
    """Train with the fault on this rank, and return its exit code."""
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(JOB_SECONDS)
    torch.manual_seed(0)
    initialize_process_group(CONNECT_SECONDS)
    dims = ParallelDims(**LAYOUTS[layout])
    initialize_model_parallel(dims, timeout_seconds=CONNECT_SECONDS)
    result: dict[str, Any]
    try:
        result = {"value": train(dims, fault, layout, folder)}
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error), "at": time.time()}
    path = folder / f"rank{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").rename(path)
    if "error" not in result:
        dist.barrier()
        dist.destroy_process_group()
        return 0
    stays = "no agent" not in layout and rank == dist.get_world_size() - 1
    while stays and not (folder / "released").exists():
        time.sleep(0.05)
    return 1


def train(dims: ParallelDims, fault: str, layout: str, folder: Path) -> list[Any]:
    """What came of three steps, each planned anew, with the fault in the second."""
    planner: dict[str, Any] = {}
    if "shared" in layout:
        # The longest sample is cut over both ranks; others are not.
        planner["dynamic_batch_context_parallel"] = 2
    if "later step" in fault:
        planner["global_batch_size"] = 5
    calls = Calls(dims, **planner)
    found = [calls.step()]
    faulty = 0 if "no agent" in layout or "rank 0" in fault else dist.get_world_size() - 1
    if fault not in FAULTS:  # of undisturbed steps
        found.append(calls.step())
    elif dist.get_rank() == faulty:
        (folder / "fault").write_text(repr(time.time()))
        found.append(FAULTS[fault].call(calls))
    else:
        found.append(FAULTS[fault].others(calls))
    return [*found, calls.step()]


@dataclasses.dataclass
class _Running:
    """A job with forked ranks, seen from their parent."""

    number: int
    folder: Path
    fork: Fork
    given_up: float = dataclasses.field(default_factory=lambda: time.monotonic() + JOB_SECONDS)
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
        """How each rank ended: the ``exit_code`` of its process (minus a signal; None: it had to be
        killed here), the ``value`` that `train` returned or the ``error`` and ``message`` that it
        raised, else what it wrote, and the ``seconds`` from the fault to that."""
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
