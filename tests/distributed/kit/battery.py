"""Faults that end a job, or that it goes on through: a table of `FAULTS.md`.

Each row is a job of its own, on each of its layouts, of three steps of training.
"""

# ruff: noqa: F401, names in cells of the table are seen by them alone
from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from kit.calls import Calls, read_faults
from kit.forked import at_fault
from kit.hooking import listed_forward_only, listed_iterators
from kit.objective import packed_objective
from kit.samples import make_samples, take
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron import plan
from mcore_batching.megatron.exchange import SampleMoves
from mcore_batching.megatron.job import JobConsensus, job_of
from mcore_batching.megatron.schedule import MicroBatchSchedule

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
_ALONE = [name for name in LAYOUTS if name.endswith("no agent")]
_SETS = {"all": [*LAYOUTS][:6], "no agent": _ALONE}


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


def nan_loss(*given: Any) -> Any:
    share, metrics = packed_objective(*given)
    return share * float("nan"), metrics


def step_in_backward(calls: Calls) -> Any:
    calls.layer.register_forward_hook(lambda *call: call[2][0].register_hook(raises) and None)
    return calls.step()


def step_in_sharing(calls: Calls) -> Any:
    alone = dist.get_world_size() == parallel_state.get_data_parallel_world_size()
    calls.data = take(make_samples(), []) if alone else None
    return calls.patched("step", dist, "broadcast", raises)


def step_without_replica_group(calls: Calls) -> Any:
    calls.data = None
    return calls.patched("step", JobConsensus, "_replica_group", property(raises))


def step_without_row_groups(calls: Calls) -> Any:
    """The others go on by theirs."""
    job_of(calls.args).memory.row_groups.clear()
    return calls.patched("step", dist, "all_gather_object", raises)


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


def framework_forward(calls: Calls, happens: Callable[..., Any] | None = None) -> Any:
    """A pass of a framework whose rollout manager plans; something happens in a layer."""
    samples = [*range(len(calls.data["tokens"]))]
    rollout = {**calls.data, "micro_batch_indices": [samples, []]}
    calls.args.use_dynamic_batch_size, calls.args.collects_outputs = True, False
    if happens is not None:
        calls.in_layer(happens)

    def f(logits: torch.Tensor, *, total_lengths: list[int], **unused: Any) -> Any:
        return logits.new_zeros(0), {"log_probs": [logits[0, 0] for _ in total_lengths]}

    iterators = listed_iterators(rollout)
    return listed_forward_only(f, calls.args, calls.model, iterators, [2])


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


def train(dims: dict[str, Any], fault: str, layout: str, folder: str) -> list[Any]:
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
        at_fault(folder)
        found.append(FAULTS[fault].call(calls))
    else:
        found.append(FAULTS[fault].others(calls))
    return [*found, calls.step()]
