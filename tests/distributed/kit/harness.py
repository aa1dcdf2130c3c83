"""Launches jobs, once for many, and brings back what every rank returned.

A job is a function of some module, a layout and parameters. All selected jobs that need the same
number of processes share one launch, since starting processes costs more than most jobs. A job
that crashes or hangs ends its launch; the jobs after it get a new one.

A hang fails with the stacks of all ranks: each rank dumps its own after the job's time is up, then
exits; the launch as a whole has a hard limit, after which its process group is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kit.patience import is_up, patience

REPOSITORY = Path(__file__).resolve().parents[3]
JOB_SECONDS = 90.0
START_SECONDS = 120.0
MODULES = ("kit.worker", "kit.ranks")
"""That a server has imported; others bring one of their own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Something for every rank to do."""

    name: str  # names the result
    function: str  # ``module:function``, called as ``function(**parameters)``
    nproc: int
    dims: dict[str, Any] | None = None  # of `ParallelDims`; None: Megatron's groups are not set up
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)  # JSON values
    seconds: float = JOB_SECONDS  # after which the job counts as hanging

    @classmethod
    def of(cls, name: str, function: str, dims: dict[str, Any], /, **parameters: Any) -> Job:
        """A job of every rank of a layout, whose function gets ``dims`` as well."""
        return cls(name, function, processes_of(dims), dims, {"dims": dims, **parameters})

    def __str__(self) -> str:
        return self.name


def processes_of(dims: dict[str, Any]) -> int:
    """As many as these arguments of `ParallelDims` need."""
    sizes = ("data_parallel", "pipeline_parallel", "context_parallel", "tensor_parallel")
    return math.prod(dims.get(size, 1) for size in sizes)


class JobFailedError(AssertionError):
    """A job raised, hung or died; the message holds what every rank left behind."""


def run_jobs(
    jobs: list[Job], scratch: Path, worker: str = "kit.worker"
) -> dict[str, list[Any] | JobFailedError]:
    """Run jobs that need the same number of processes, in this order, on ranks of a worker module.

    Returns:
        for each job's name what its ranks returned, in the order of ranks, or the failure.
    """
    outcomes: dict[str, list[Any] | JobFailedError] = {}
    waiting = list(jobs)
    while waiting:
        folder = scratch / f"launch{len(outcomes)}"
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in waiting]))
        nproc, seconds = waiting[0].nproc, sum(job.seconds for job in waiting)
        done = launch(worker, str(folder), str(nproc), nproc=nproc, folder=folder, seconds=seconds)
        for job in waiting:
            outcome = _outcome(job, folder, done.stdout + done.stderr)
            if outcome is None:
                break
            outcomes[job.name] = outcome
        waiting = [job for job in waiting if job.name not in outcomes]
    return outcomes


def results(outcome: list[Any] | JobFailedError) -> list[Any]:
    if isinstance(outcome, JobFailedError):
        raise outcome
    return outcome


def environment(nproc: int) -> dict[str, str]:
    """Variables of the worker processes; the CPU stand-in where there are too few GPUs."""
    variables = dict(os.environ)
    variables.pop("PYTEST_CURRENT_TEST", None)  # else every test would have a server of its own
    variables["OMP_NUM_THREADS"] = "1"
    variables["PYTHONWARNINGS"] = "ignore"  # megatron-core warns of every optional package
    variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    folders = ("batch", "distributed", "device", "benchmarks", "integrations")
    paths = [str(REPOSITORY), *(str(REPOSITORY / "tests" / folder) for folder in folders)]
    paths.append(str(REPOSITORY / "examples" / "grpo"))
    variables["PYTHONPATH"] = os.pathsep.join([*paths, variables.get("PYTHONPATH", "")])
    shares_gpu = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.device_count()
    if torch.cuda.device_count() < nproc and not shares_gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["MCORE_BATCHING_CPU"] = "1"
        # The stand-in sets it too, but megatron-core, imported before, would load the compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def launch(
    module: str, *arguments: str, nproc: int, folder: Path, seconds: float = 0.0
) -> subprocess.CompletedProcess[str]:
    """Run the `main` of a module in a process forked off a server, and end all that it started.

    ``arguments`` are in `sys.argv`, the folder gets what it prints; beside the start it may take
    so many seconds.
    """
    server: Any = _server(module, tuple(environment(nproc).items()))
    output, errors = folder / "stdout.txt", folder / "stderr.txt"
    request = {"module": module, "arguments": arguments, "output": str(output)}
    server.stdin.write(json.dumps(request | {"errors": str(errors)}).encode() + b"\n")
    process = int(server.stdout.readline() or "-1")
    assert process > 0, f"the server of {module} has ended"

    def ends_within(limit: float) -> bool:
        return bool(select.select([server.stdout], [], [], limit)[0])

    limit = START_SECONDS + seconds
    try:
        late = is_up(limit, ends_within)
    finally:
        # What ranks started may outlive them, such as the processes that write checkpoints.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        code = int(server.stdout.readline())
    said = f"\nkilled after {limit:.0f} s\n" if late else ""
    texts = [path.read_text(errors="replace") for path in (output, errors)]
    return subprocess.CompletedProcess(arguments, code, texts[0], texts[1] + said)


def torchrun(launcher: str, *words: str, nproc: int, folder: Path, paths: tuple[Path, ...]) -> str:
    """What a launcher of this text prints in processes that first look for modules in ``paths``."""
    file, variables = folder / "launch.py", environment(nproc)
    file.write_text(launcher)
    variables["PYTHONPATH"] = os.pathsep.join([*map(str, paths), variables["PYTHONPATH"]])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    done = subprocess.run(
        [sys.executable, *command, str(file), *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@functools.cache
def _server(module: str, variables: tuple[tuple[str, str], ...]) -> subprocess.Popen[bytes]:
    """The process that forks launches of a module; it ends when this one closes its input."""
    modules = MODULES if module in MODULES else (module,)
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "kit.server", *modules],
        bufsize=0,  # `select` sees all that has come
        env=dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _outcome(job: Job, folder: Path, log: str) -> list[Any] | JobFailedError | None:
    """What became of a job; None if the launch ended before it began."""
    started = [folder / f"{job.name}.rank{rank}.started" for rank in range(job.nproc)]
    results = [folder / f"{job.name}.rank{rank}.json" for rank in range(job.nproc)]
    if all(path.exists() for path in results):
        read = [json.loads(path.read_text()) for path in results]
        if all("error" not in result for result in read):
            return [result["value"] for result in read]
    elif not any(path.exists() for path in started) and any(folder.glob("*.started")):
        return None
    texts = [f"job {job.name} failed on {job.nproc} processes"]
    for rank, path in enumerate(results):
        if path.exists():
            texts.append(f"rank {rank}: {json.loads(path.read_text()).get('error', 'finished')}")
        stacks = folder / f"stacks.rank{rank}.txt"
        if stacks.exists() and stacks.read_text():
            texts.append(f"stacks of rank {rank}:\n{stacks.read_text()}")
    texts.append(f"end of the log:\n{log[-3000:]}")
    return JobFailedError("\n".join(texts))
