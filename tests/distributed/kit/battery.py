"""Faults that end a job, or that it lives through, in the second of three steps of training.

Each row is a job of its own, on each of its layouts: processes end. The rank at fault is the last
or, without an agent, rank 0, which then hosts the job's store as under srun, and ends at once.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import mcore_batching
from kit import planned_framework
from kit.calls import Calls
from kit.forked import at_fault
from kit.objective import packed_objective
from kit.samples import make_samples, take
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron.consensus import JobConsensus
from mcore_batching.megatron.exchange import SampleMoves
from mcore_batching.megatron.iterator import Rollout
from mcore_batching.megatron.job import job_of

STOPPED_SECONDS = 15
SLOW_SECONDS = 30

Call = Callable[[Calls], Any]


def raises(*unused: Any, **also_unused: Any) -> Any:
    # Longer than what a job's store takes.
    raise torch.OutOfMemoryError("out of memory, on purpose" + 9_000_000 * ".")


def _broken(owner: Any, name: str, value: Any = raises) -> Call:
    """A step with this in place of something."""

    def step(calls: Calls) -> Any:
        with mock.patch.object(owner, name, value):
            return calls.step()

    return step


def _in_layer(happens: Callable[[], Any]) -> Call:
    """A step in which this happens once, in the second micro-batch or in the next pass."""

    def step(calls: Calls) -> Any:
        calls.before_layer(happens)
        return calls.step()

    return step


def _in_backward(calls: Calls) -> Any:
    calls.layer.register_forward_hook(lambda *call: call[2][0].register_hook(raises) and None)
    return calls.step()


def _in_optimizer(calls: Calls) -> Any:
    calls.optimizer.step = raises
    return calls.step()


def _in_scheduler(calls: Calls) -> Any:
    calls.scheduler = SimpleNamespace(step=raises)
    return calls.step()


def _after_the_first(original: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1000))
    return lambda *given, **options: original(*given, **options) if next(calls) == 0 else raises()


def _killed_at_later_step(calls: Calls) -> Any:
    planned = Rollout.planned

    def killed(self: Rollout, step: Any = None) -> Any:
        if step:
            os.kill(os.getpid(), signal.SIGKILL)
        return planned(self, step)

    return _broken(Rollout, "planned", killed)(calls)


def _in_sharing(calls: Calls) -> Any:
    """What is sent does not fit into memory: the samples, or of a replica alone their fields."""
    alone = dist.get_world_size() == parallel_state.get_data_parallel_world_size()
    calls.data = take(make_samples(), []) if alone else None
    return _broken(dist, "broadcast_object_list")(calls)


def _in_replica_group(calls: Calls) -> Any:
    """The group in which a replica's samples travel cannot be made."""
    calls.data = None
    return _broken(JobConsensus, "_replica_group", property(raises))(calls)


def _in_row_groups(calls: Calls) -> Any:
    """Groups of ranks that share rows cannot be made; the others go on by theirs."""
    job_of(calls.args).memory.row_groups.clear()
    return _broken(dist, "all_gather_object")(calls)


def _returning(calls: Calls) -> Any:
    """What comes back from other ranks does not fit into memory."""
    with mock.patch.object(SampleMoves, "returned", raises):
        return calls.forward()


def _loss(*given: Any) -> Any:
    """Not finite."""
    share, metrics = packed_objective(*given)
    return share * float("nan"), metrics


def _warned(calls: Calls) -> Any:
    """A loss that never reads the step's totals, where warnings are errors."""

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        del totals
        return logits.float().sum(), {"policy": logits.new_zeros(()), "kl": logits.new_zeros(())}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return calls.step(loss)


def _other_settings(calls: Calls) -> Any:
    calls.args.max_tokens_per_gpu += 8
    return calls.step()


def _no_data(calls: Calls) -> Any:
    calls.data = {}
    return calls.step()


def _framework_forward(fails: bool) -> Call:
    """A pass of a framework whose rollout manager plans."""

    def forward(calls: Calls) -> Any:
        samples = [*range(len(calls.data["tokens"]))]
        rollout = {**calls.data, "micro_batch_indices": [samples, []]}
        calls.args.use_dynamic_batch_size, calls.args.collects_outputs = True, False
        if fails:
            calls.before_layer(raises)

        def f(logits: torch.Tensor, *, total_lengths: list[int], **unused: Any) -> Any:
            return logits.new_zeros(0), {"log_probs": [logits[0, 0] for _ in total_lengths]}

        with mcore_batching.hook(planned_framework):
            iterators = planned_framework.get_data_iterator(rollout)
            return planned_framework.forward_only(f, calls.args, calls.model, iterators, [2])

    return forward


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    wake = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def _record(full: bool) -> Call:
    """A step that rank 0 writes down, on a disk that is full."""

    def step(calls: Calls) -> Any:
        calls.args.dynamic_batch_record = calls.folder
        if dist.get_rank() == 0:
            # Python ignores SIGXFSZ: writing raises, to the standard error as well.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = calls.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        print(*(each.message for each in caught), sep="\n", file=sys.stderr)
        return found

    return step


LAYOUTS: dict[str, dict[str, int]] = {
    "DP2": {"data_parallel": 2},
    "TP2": {"tensor_parallel": 2},
    "CP2": {"context_parallel": 2},
    "DP2 shared": {"data_parallel": 2},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "DP2 PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "TP2, no agent": {"tensor_parallel": 2},
    "CP2, no agent": {"context_parallel": 2},
    "DP2, no agent": {"data_parallel": 2},
    "PP2, no agent": {"pipeline_parallel": 2},
}
ALONE = tuple(name for name in LAYOUTS if "no agent" in name)
ALL = tuple(name for name in LAYOUTS if name not in ALONE)
SHARED = {"dynamic_batch_context_parallel": 2}
PLANNER = {
    "DP2 shared": SHARED,
    "row groups": SHARED,
    "later steps": {"global_batch_size": 5},
    "later, SIGKILL": {"global_batch_size": 5},
}
"""Of layouts and faults. The longest sample is cut over both ranks; others are not."""

_PIPELINE, _FORWARD = "PipelineFailedError", "ForwardFailedError"
_MEMORY = "OutOfMemoryError: out of memory, on purpose"
_REPORTED = f"torch.{_MEMORY}"


@dataclasses.dataclass(frozen=True)
class Ending:
    """What one rank does instead of a step, and how all ranks end.

    Attributes:
        call: on the rank at fault.
        error: type that every rank raises; "": all go on, with the results of undisturbed steps.
        text: in what every rank raises, or rank 0 prints where all go on.
        layouts: of jobs with this fault.
        others: what the other ranks call.
        exit_code: of the rank at fault.
        seconds: least that it takes.
        always: the layout on which it runs without ``--long``.
    """

    call: Call
    error: str
    text: str
    layouts: tuple[str, ...] = ALL
    others: Call = Calls.step
    exit_code: int = 1
    seconds: float = 0.0
    always: str = ""


ENDINGS = {
    "layer, forward": Ending(
        _in_layer(raises), _PIPELINE, f"train_step: {_REPORTED}", ALL + ALONE, always="DP2 PP2"
    ),
    "layer, backward": Ending(_in_backward, _PIPELINE, f"train_step: {_REPORTED}"),
    "optimizer": Ending(
        _in_optimizer, _PIPELINE, f"train_step, after the pipeline: {_REPORTED}", always="DP2"
    ),
    "scheduler": Ending(_in_scheduler, _PIPELINE, f"train_step, after the pipeline: {_REPORTED}"),
    "exchange": Ending(
        _broken(torch, "empty_like"), _PIPELINE, f"exchanging samples: {_REPORTED}", always="DP2"
    ),
    "later steps": Ending(
        _broken(torch, "empty_like", _after_the_first(torch.empty_like)),
        _PIPELINE,
        f"exchanging samples: {_REPORTED}",
    ),
    # The others see its connections close, wherever they are.
    "later, SIGKILL": Ending(_killed_at_later_step, "", "", exit_code=-signal.SIGKILL),
    "sharing": Ending(_in_sharing, _PIPELINE, f"sharing data: {_REPORTED}", always="DP2"),
    "group of a replica": Ending(
        _in_replica_group, _PIPELINE, f"sharing data: {_REPORTED}", ("DP2", "TP2"), always="TP2"
    ),
    "gathering": Ending(
        _broken(RankMessages, "gather"),
        _PIPELINE,
        f"reading settings and samples: {_REPORTED}",
        always="TP2",
    ),
    "broadcast of the plan": Ending(
        _broken(dist, "broadcast"), _PIPELINE, f"broadcasting the plan: {_REPORTED}", always="DP2"
    ),
    # Megatron has all groups of rows but those on one of CP2's ranks.
    "row groups": Ending(
        _in_row_groups,
        _PIPELINE,
        f"making groups of ranks that share rows: {_REPORTED}",
        ("CP2",),
        always="CP2",
    ),
    "returning outputs": Ending(
        _returning,
        _PIPELINE,
        f"forward_only, returning outputs: {_REPORTED}",
        ("DP2", "DP2 shared", "DP2 PP2"),
        Calls.forward,
        always="DP2",
    ),
    "a framework's forward pass": Ending(
        _framework_forward(True),
        _PIPELINE,
        f"forward_only: {_REPORTED}",
        ("DP2", "TP2", "DP2 PP2"),
        _framework_forward(False),
        always="DP2",
    ),
    "a warning": Ending(
        _warned, _PIPELINE, "train_step: UserWarning: the loss", ("DP2", "DP2 PP2"), always="DP2"
    ),
    "loss": Ending(
        lambda calls: calls.step(raises), _FORWARD, _MEMORY, ("DP2", "PP2 VPP2", "DP2 PP2")
    ),
    # A loss that communicates leaves the ranks waiting that share its rows.
    "loss of shared rows": Ending(
        lambda calls: calls.step(raises),
        _PIPELINE,
        f"train_step: {_REPORTED}",
        ("TP2", "CP2", "DP2 shared"),
        always="TP2",
    ),
    # Functions of the output run on the last stage alone, which rank 0 of a pipeline is not.
    "loss, no agent": Ending(lambda calls: calls.step(raises), "", _MEMORY, ALONE[:-1]),
    "function, no agent": Ending(
        lambda calls: calls.forward(raises), "", _MEMORY, ALONE[:-1], Calls.forward, always=ALONE[0]
    ),
    "loss is NaN": Ending(lambda calls: calls.step(_loss), "NonFiniteError", ": the loss of micro"),
    "other settings": Ending(_other_settings, "PlanMismatchError", "max_tokens_per_gpu is "),
    "no data": Ending(_no_data, "PlanningFailedError", "KeyError: 'rollout_data lacks "),
    "SIGKILL": Ending(_in_layer(_kill), _PIPELINE, "", exit_code=-signal.SIGKILL, always="DP2"),
}
SURVIVED = {
    "SIGSTOP": Ending(_in_layer(_stop), "", "", seconds=STOPPED_SECONDS - 1),
    "slow": Ending(_in_layer(lambda: time.sleep(SLOW_SECONDS)), "", "", seconds=SLOW_SECONDS - 1),
    "disk full": Ending(_record(True), "", "no more steps are recorded", others=_record(False)),
}
UNDISTURBED = Ending(Calls.step, "", "")


def train(
    dims: dict[str, Any],
    reference: str,
    fault: str,
    folder: str,
    planner: dict[str, Any],
    faulty: int,
) -> list[Any]:
    """What came of three steps, each planned anew, with the fault in the second on rank
    ``faulty``."""
    calls = Calls(dims, reference, **planner)
    calls.folder = folder
    row = (ENDINGS | SURVIVED).get(fault, UNDISTURBED)
    found = [calls.step()]
    if dist.get_rank() == faulty:
        at_fault(folder)
        found.append(row.call(calls))
    else:
        found.append(row.others(calls))
    return [*found, calls.step()]
