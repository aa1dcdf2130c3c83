"""Three steps of training, and a fault in the second, on the last rank or on rank 0."""

from __future__ import annotations

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

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.forked import at_fault
from kit.model import adam
from kit.objective import packed_objective
from kit.samples import make_samples, take
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron import forward_only, get_data_iterator, train_step
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout.rollout import Rollout
from mcore_batching.planning import ParallelDims

STOPPED_SECONDS = 15
SLOW_SECONDS = 30


class _Job:
    """What a fault may change; the hooks of a layer run on every rank, and must be set there."""

    def __init__(
        self, dims: dict[str, Any], reference: str, folder: str, planner: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.model = small_model(dims, reference)
        self.args = arguments(ParallelDims(**dims), **planner)
        self.data: dict[str, list[Any]] | None = my_samples(dims)
        self.optimizer = adam(self.model, distributed=False)
        self.loss: Callable[..., Any] = packed_objective
        self.outputs: Callable[..., Any] = log_probs_of
        self.scheduler: Any = None

    @property
    def layer(self) -> torch.nn.Module:
        layer: torch.nn.Module = unwrap_model(self.model[-1]).decoder.layers[-1]
        return layer

    def raises(self, *unused: Any, **also_unused: Any) -> Any:
        at_fault(self.folder)
        # Longer than what a job's store takes.
        raise torch.OutOfMemoryError("out of memory, on purpose" + 9_000_000 * ".")

    def before_layer(self, happens: Callable[[], Any]) -> None:
        """Once, in the second micro-batch or, where there is one alone, in the first."""
        calls = iter(range(1000))

        def hook(module: torch.nn.Module, inputs: Any) -> None:
            if next(calls) == 1:
                at_fault(self.folder)
                happens()

        self.layer.register_forward_pre_hook(hook)


def _forward(job: _Job) -> None:
    job.before_layer(job.raises)


def _backward(job: _Job) -> None:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        output[0].register_hook(job.raises)

    job.layer.register_forward_hook(hook)


def _optimizer(job: _Job) -> None:
    job.optimizer.step = job.raises


def _scheduler(job: _Job) -> None:
    job.scheduler = SimpleNamespace(step=job.raises)


def _exchange(job: _Job) -> None:
    """What arrives does not fit into memory."""
    torch.empty_like = job.raises


def _later_steps(job: _Job) -> None:
    """What arrives of a later step does not fit into memory."""
    empty_like, calls = torch.empty_like, iter(range(1000))

    def after_the_first(*given: Any, **options: Any) -> Any:
        return empty_like(*given, **options) if next(calls) == 0 else job.raises()

    torch.empty_like = after_the_first


def _killed_later(job: _Job) -> None:
    planned = Rollout.planned

    def killed(self: Rollout, step: Any = None) -> Any:
        if step:
            at_fault(job.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return planned(self, step)

    Rollout.planned = killed  # type: ignore[method-assign]


def _sharing(job: _Job) -> None:
    """What is sent does not fit into memory: the samples, or of a replica alone their fields."""
    alone = dist.get_world_size() == parallel_state.get_data_parallel_world_size()
    job.data = take(make_samples(), []) if alone else None
    dist.broadcast_object_list = job.raises


def _gathering(job: _Job) -> None:
    """This rank is lost between an agreement and the gather after it."""
    RankMessages.gather = job.raises  # type: ignore[method-assign]


def _row_groups(job: _Job) -> None:
    """Groups of ranks that share rows cannot be made; the others go on by theirs."""
    job_of(job.args).memory.row_groups.clear()
    dist.all_gather_object = job.raises


def _loss(job: _Job) -> None:
    job.loss = job.raises


def _function(job: _Job) -> None:
    job.outputs = job.raises


def _not_finite(job: _Job) -> None:
    def loss(*given: Any) -> Any:
        at_fault(job.folder)
        share, metrics = packed_objective(*given)
        return share * float("nan"), metrics

    job.loss = loss


def _settings(job: _Job) -> None:
    at_fault(job.folder)
    job.args.max_tokens_per_gpu += 8


def _no_data(job: _Job) -> None:
    at_fault(job.folder)
    job.data = {}


def _killed(job: _Job) -> None:
    job.before_layer(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _stopped(job: _Job) -> None:
    def stop() -> None:
        wake = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)

    job.before_layer(stop)


def _slow(job: _Job) -> None:
    job.before_layer(lambda: time.sleep(SLOW_SECONDS))


FAULTS: dict[str, Callable[[_Job], None]] = {
    "layer, forward": _forward,
    "layer, backward": _backward,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "exchange": _exchange,
    "later steps": _later_steps,
    "later, SIGKILL": _killed_later,
    "sharing": _sharing,
    "gathering": _gathering,
    "row groups": _row_groups,
    "loss": _loss,
    "function": _function,
    "loss is NaN": _not_finite,
    "other settings": _settings,
    "no data": _no_data,
    "SIGKILL": _killed,
    "SIGSTOP": _stopped,
    "slow": _slow,
}


def train(
    dims: dict[str, Any],
    reference: str,
    fault: str,
    folder: str,
    planner: dict[str, Any] | None = None,
    faulty: int = -1,
) -> list[Any]:
    """The metrics of three steps, each planned anew, with the fault in the second.

    ``fault`` may also be "none", or "disk full": on rank 0, which records. ``faulty`` is the rank
    at fault, -1 the last.
    """
    job = _Job(dims, reference, folder, planner or {})
    if fault == "disk full":
        job.args.dynamic_batch_record = folder
    found = []
    warned: list[str] = []
    for step in range(3):
        if step == 1 and fault in FAULTS and dist.get_rank() == faulty % dist.get_world_size():
            FAULTS[fault](job)
        if step == 1 and fault == "disk full" and dist.get_rank() == 0:
            # Python ignores SIGXFSZ: writing raises, to the standard error as well.
            warnings.showwarning = lambda message, *unused, **options: warned.append(str(message))
            warnings.simplefilter("always")
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        iterators, counts = get_data_iterator(job.args, job.model, job.data)
        if fault == "function":
            forward_only(job.outputs, job.args, job.model, iterators, counts)
        result = train_step(
            job.loss,
            job.args,
            job.model,
            iterators,
            counts,
            job.optimizer,
            job.scheduler,
            step=len(counts) - 1,  # of one, where the batch size does not cut it
            increment=1,
        )
        found.append({**result.metrics, "grad_norm": result.grad_norm})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print("\n".join(warned), file=sys.stderr)
    return found
