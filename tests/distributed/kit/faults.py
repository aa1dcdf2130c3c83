"""Faults that a job lives through: a table of `FAULTS.md`, whose rows are called one by one."""

# ruff: noqa: F401, names in cells of the table are seen by them alone
from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gathered
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_model_config, unwrap_model

from kit import cpu_kernels
from kit.calls import Calls, Function, f_with, loss_with, read_faults
from kit.hooking import Listed, listed_forward_only, listed_iterators
from kit.model import arguments, named_parameters, small_model
from kit.objective import log_probs_by_lengths, log_probs_of, packed_objective
from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.integrations import skyrl
from mcore_batching.integrations.slime import trainer
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.megatron import add_fields, get_data_iterator, response_log_probs
from mcore_batching.megatron.plan import Planner
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import ParallelDims, plan_step
from mcore_batching.planning.worker import PlanRequest, serialize

SHARED = {"dynamic_batch_context_parallel": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replica": ({"data_parallel": 2, "pipeline_parallel": 2}, {}),
    "shared-rows": ({"data_parallel": 2, "pipeline_parallel": 2}, SHARED),
    "cp2": ({"data_parallel": 2, "context_parallel": 2}, SHARED),
    "tp2": ({"tensor_parallel": 2}, {}),
    "hooked": ({"data_parallel": 2}, {}),
    "hooked-stages": ({"pipeline_parallel": 2}, {}),
    "prefixes": ({"data_parallel": 2}, {"dynamic_batch_share_prefixes": True}),
}
"""Parallel dims and flags of each layout."""


def lists(change: Callable[[list[Any], int], list[Any]]) -> Function:
    """f, with the list of each output changed, from the first micro-batch with samples (0) on."""
    return f_with(lambda made, number: {n: change(values, number) for n, values in made.items()})


def outputs(change: Function) -> Function:
    return lists(lambda values, number: [*map(change, values)])


def metric(change: Function) -> Function:
    """The loss function, with a metric that is made of the loss."""
    return loss_with(lambda loss, metrics, number: (loss, metrics | {"kl": change(loss)}))


class Unreadable:
    """A value that goes out and cannot be read where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("no such file on this rank")


class Stretched(torch.nn.Module):
    """Rotary embeddings of another package."""


def by_lengths(logits: torch.Tensor, total_lengths: Any) -> Any:
    return {"tokens": [logits.new_zeros(n) for n in total_lengths]}


class OwnAttention(SelfAttention):  # type: ignore[misc]
    """Attention of another package."""


def mixer() -> Any:
    """Megatron's Mamba mixer, whose parameters nothing reads."""
    cpu_kernels.stand_in_for_kernels()
    made = object.__new__(cpu_kernels.mamba_mixer.MambaMixer)
    torch.nn.Module.__init__(made)
    return made


def plan_of_another(calls: Calls, part: str = "", **changes: Any) -> Any:
    """With another model, of which a part of the whole, or "", has these attributes."""
    model = small_model(calls.dims)
    for name, value in changes.items():
        setattr(unwrap_model(model[0]).get_submodule(part), name, value)
    return get_data_iterator(calls.args, model, calls.data)


def train_beside(calls: Calls, differs: bool = True) -> Any:
    """With a field of each token that differs, or not, where samples share tokens."""
    planned = calls.plan()
    values = [torch.full((total,), total * differs) for total in calls.data["total_lengths"]]
    add_fields(planned[0], {"beside": values})
    return calls.train_planned(planned)


def forward_of_another(calls: Calls, mask: AttnMaskType = AttnMaskType.causal) -> Any:
    """A pass of another model than it was planned with, whose first layer has this mask."""
    model = small_model(calls.dims)
    unwrap_model(model[0]).decoder.layers[0].self_attention.attn_mask_type = mask
    return calls.forward(model=model)


def fails(*unused: Any, **also: Any) -> Any:
    raise MemoryError("on purpose")


def damaged(request: PlanRequest, data: bytes) -> Any:
    """A plan of which the last byte is lost."""
    return _read(request, data[:-1])


_read = PlanRequest.read


def plan_beyond_cap(planner: Planner, job: Any, request: Any, ticket: Any) -> bytes:
    config = dataclasses.replace(request.config, max_tokens_per_gpu=1000)
    step = plan_step(request.lengths, request.dims, config, request.cost_model)
    return serialize(dataclasses.replace(step, config=request.config))


def slime_plan(calls: Calls, data: Any = None, **flags: Any) -> Any:
    args = arguments(calls.dims, **{"use_dynamic_batch_size": True} | flags)
    given = DEFAULT_SCHEMA, Listed, fails, args, calls.model
    return trainer.planned_iterators(*given, data or calls.data)


def slime_pass(calls: Calls, iterators: Any, counts: Any, f: Any = log_probs_by_lengths) -> Any:
    args = arguments(calls.dims, use_dynamic_batch_size=True, collects_outputs=True)
    return listed_forward_only(f, args, calls.model, iterators, counts)


class Framework:
    """Holds a model as verl's engine and SkyRL's Megatron worker do, and calls what is hooked; the
    model overlaps communication or not."""

    def __init__(self, calls: Calls, overlaps: bool = False) -> None:
        self.module = self.actor_module = small_model(calls.dims)
        self.tf_config = get_model_config(self.module[0])
        self.tf_config.tp_comm_overlap = overlaps
        self.engine_config = SimpleNamespace(use_remove_padding=True)
        self.model = SimpleNamespace(remove_microbatch_padding=True)

    def verl(self) -> Any:
        group = parallel_state.get_data_parallel_group()
        return micro_batches.rearrange_micro_batches(None, None, 1, group)

    def skyrl(self) -> Any:
        return skyrl._sync_num_microbatches(None, SimpleNamespace(_alignment=(1, 1)))

    def miles(self, calls: Calls) -> Any:
        args = arguments(calls.dims, use_dynamic_batch_size=True)
        given = DEFAULT_SCHEMA, fails, args, self.module, {"micro_batch_indices": []}
        return trainer.miles_iterators(*given)


def listed_pass(
    calls: Calls,
    change: Function = lambda made: made,
    begins: int = 0,
    *,
    lists: Function = lambda listed: listed,
    fewer: int = 0,
    collected: bool = True,
    model: Any = None,
) -> Any:
    """A pass over the five micro-batches of each rank that a rollout manager listed.

    ``change`` is made to what f returns for the micro-batch ``begins`` and later ones, ``lists`` to
    the listed samples; the number of micro-batches is too small by ``fewer``. Outputs are
    collected, as miles does, or taken for losses. ``model`` may be another one.
    """
    numbers = itertools.count()

    def f(logits: torch.Tensor, *, non_loss_data: bool = False, **keywords: Any) -> Any:
        made = log_probs_by_lengths(logits, **keywords)
        made = change(made) if next(numbers) >= begins else made
        return made if non_loss_data else (logits.new_zeros(0), made)

    samples = range(len(calls.data["tokens"]))
    listed = [[*samples[first : first + 4]] for first in range(0, 16, 4)]
    listed.insert(1, [])
    rollout = {**calls.data, "micro_batch_indices": lists(listed)}
    args = arguments(calls.dims, use_dynamic_batch_size=True, collects_outputs=collected)
    iterators = listed_iterators(rollout)
    return listed_forward_only(f, args, model or calls.model, iterators, [5 - fewer])


def each_list(change: Callable[[list[Any]], list[Any]]) -> Function:
    return lambda made: {name: change(values) for name, values in made.items()}


dp_rank = parallel_state.get_data_parallel_rank
FAULTS = read_faults("| layout | fault | rank | call | others | error | text |", globals())


def table_of(layout: str) -> list[Any]:
    return [fault for fault in FAULTS if layout in fault.layouts]


def faults(dims: ParallelDims, layout: str) -> dict[str, Any]:
    """What this rank raises for each fault of a layout; what a right step then comes to."""
    calls = Calls(dims, **LAYOUTS[layout][1])
    before = {name: p.detach().clone() for name, p in named_parameters(calls.model)}
    report = []
    for fault in table_of(layout):
        begun, raised = time.monotonic(), None
        is_at_fault = fault.where in ("all", str(dist.get_rank()))
        call = fault.call if is_at_fault else fault.others
        try:
            call(calls)
        except Exception as error:
            raised = error
        cause = getattr(raised, "__cause__", None)
        said = {"type": type(raised).__name__, "message": str(raised)}
        said["cause"] = "" if cause is None else type(cause).__name__
        report.append(said | {"seconds": time.monotonic() - begun})
    unchanged = all(torch.equal(p, before[name]) for name, p in named_parameters(calls.model))
    return {"faults": report, "unchanged": unchanged, "grad_norm": calls.train().grad_norm}
