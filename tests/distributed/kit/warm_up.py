"""Jobs that train with rows at the cap run beforehand, and without."""

from __future__ import annotations

import importlib
import random
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import get_model_config, unwrap_model

from kit.exactness import arguments
from kit.faults import my_samples
from kit.model import adam, sharded_model
from kit.objective import packed_objective
from mcore_batching.megatron import compat, cost_learner, get_data_iterator, train_step
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.megatron.warm_up import warm_up_at_cap
from mcore_batching.planning import ParallelDims

NUM_STEPS = 2
# The function of that name hides the module.
train_step_module = importlib.import_module("mcore_batching.megatron.train_step")


class Watch:
    """What a warm-up does to a job, seen from outside.

    Attributes:
        passes: tokens of every forward pass of the warm-up, chunk by chunk.
        changed: what the passes have changed before it is given back.
        left: what is not as it was in the end.
        calls: of each function that reduces or gathers, True if Megatron would have called it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.passes: list[list[int]] = []
        self.changed: list[str] = []
        self.left: list[str] = []
        self.calls: list[bool] = []

    def __call__(self, args: Any, model: list[Any], schedule: Any, step: int, run: Any) -> None:
        """Stands in for `warm_up_at_cap`, which it calls."""
        before = state_of(model, self._optimizer)

        def watched(prepared: Any) -> Any:
            hooks = []
            for chunk in model:
                lengths: list[int] = []
                self.passes.append(lengths)
                hooks.append(
                    unwrap_model(chunk).register_forward_pre_hook(
                        lambda module, unnamed, named, to=lengths: to.append(
                            named["input_ids"].shape[1]
                        ),
                        with_kwargs=True,
                    )
                )
            failed = run(prepared)
            for hook in hooks:
                hook.remove()
            inside = state_of(model, self._optimizer)
            self.changed += differing(before, inside)
            self.calls += inside["configuration"]
            return failed

        warm_up_at_cap(args, model, schedule, step, watched)
        self.left += differing(before, state_of(model, self._optimizer))


def compare(
    dims: dict[str, Any],
    reference: str,
    kind: str,
    settings: dict[str, Any],
    planner: dict[str, Any],
    ddp: dict[str, Any],
) -> dict[str, Any]:
    """Train twice from the same start, with the warm-up and without.

    Returns:
        `Watch`'s attributes; ``differing``: what differs after the last step; ``passes_without``:
        passes of a warm-up that nobody asked for.
    """
    ends, watches = [], []
    for warm in (False, True):
        compat._moe_metrics().clear()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        distributed = bool(ddp.get("use_distributed_optimizer"))
        model = sharded_model(
            ParallelDims(**dims),
            kind,
            torch.load(reference, weights_only=True)["weights"],
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp),
            **settings,
        )
        if ddp.get("overlap_param_gather"):  # as stock training sets them, to align stages
            config = get_model_config(model[0])
            config.grad_sync_func = model[0].start_grad_sync
            config.param_sync_func = model[0].start_param_sync
        optimizer = adam(model, distributed, bool(ddp.get("overlap_param_gather")))
        args = arguments(ParallelDims(**dims), dynamic_batch_warm_up_at_cap=warm, **planner)
        watch = Watch(optimizer)
        metrics = []
        with mock.patch.object(train_step_module, "warm_up_at_cap", watch):
            for _ in range(NUM_STEPS):
                iterators, counts = get_data_iterator(args, model, my_samples(dims))
                made = train_step(packed_objective, args, model, iterators, counts, optimizer)
                metrics.append([made.metrics, made.grad_norm])
        ends.append(state_of(model, optimizer) | {"metrics": metrics})
        watches.append(watch)
    cold, watch = watches
    return {
        "differing": differing(*ends),
        "passes_without": cold.passes,
        "passes": watch.passes,
        "changed": watch.changed,
        "left": watch.left,
        "calls": watch.calls,
    }


def state_of(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """All that a step may read of those before it, as plain data."""
    config = get_model_config(model[0])
    groups = [
        group
        for chunk in model
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]
    functions = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
    return {
        "weights": plain([list(chunk.parameters()) for chunk in model]),
        "gradients": plain([[p.main_grad for p in chunk.parameters()] for chunk in model]),
        "buffers": plain([dict(chunk.named_buffers()) for chunk in model]),
        "optimizer": plain(_moments(optimizer)),
        "random numbers": plain(torch.get_rng_state()),
        "tracked random numbers": plain(get_cuda_rng_tracker().get_states()),
        "Python's random numbers": plain(random.getstate()),
        "NumPy's random numbers": plain(list(np.random.get_state())),
        "routers' records": plain(
            {name: compat._values_of(each) for name, each in compat._moe_metrics().items()}
        ),
        "reduction of gradients": [
            (group.is_last_microbatch, group.is_first_batch, len(group.per_param_grad_ready_counts))
            for group in groups
        ],
        "configuration": [getattr(config, name) is not None for name in functions],
        "learnt costs": (cost_learner()._is_warm, len(cost_learner()._unread)),
    }


def _moments(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        [each.optimizer.state[parameter] for parameter in group["params"]]
        for each in inner
        for group in each.optimizer.param_groups
    ]


def plain(value: Any) -> Any:
    """Tensors and arrays as their type and their numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names under which two states differ."""
    return [name for name in first if first[name] != second[name]]


def fails(dims: dict[str, Any], reference: str, what: str) -> dict[str, Any]:
    """The warm-up fails on one rank alone; what every rank raises."""
    model = sharded_model(
        ParallelDims(**dims),
        "dense",
        torch.load(reference, weights_only=True)["weights"],
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    )
    optimizer = adam(model, distributed=False)
    args = arguments(ParallelDims(**dims), dynamic_batch_warm_up_at_cap=True)
    at_fault = dist.get_rank() == dist.get_world_size() - 1
    config = get_model_config(model[0])
    iterators, counts = get_data_iterator(args, model, my_samples(dims))
    before = state_of(model, optimizer)

    def no_memory(*unused: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 158.00 GiB")

    if what == "fp8" and at_fault:
        config.fp8 = "hybrid"
    name = "response_log_probs" if what == "no memory" and at_fault else "_OPERATION"
    value = no_memory if name == "response_log_probs" else "train_step"
    with mock.patch.object(train_step_module, name, value):
        try:
            train_step(packed_objective, args, model, iterators, counts, optimizer)
        except Exception as error:
            return {
                "type": type(error).__name__,
                "message": str(error),
                "left": differing(before, state_of(model, optimizer)),
                "last_stage": is_last_stage(),
            }
    return {"type": None}
