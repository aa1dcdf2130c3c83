"""What a job calls, on a small model: planning, forward passes, training, each with changes.

`Fault` is a row of the tables of faults: a call that is wrong on one rank, what the other ranks
call meanwhile, and what every rank raises.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config, unwrap_model

from kit.exactness import arguments, log_probs_of
from kit.model import adam, named_parameters, sharded_model
from kit.objective import packed_objective
from kit.samples import make_samples, share, take
from mcore_batching.megatron import add_fields, forward_only, get_data_iterator, train_step
from mcore_batching.planning import ParallelDims

Function = Callable[..., Any]


def small_model(dims: dict[str, Any], reference: str, **settings: Any) -> list[Any]:
    """The test model in Megatron's data-parallel wrapper."""
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return sharded_model(
        ParallelDims(**dims), settings.pop("kind", "dense"), weights, ddp, **settings
    )


def my_samples(dims: dict[str, Any], spread: str = "uneven") -> dict[str, list[Any]]:
    """The samples of this rank's replica."""
    samples = make_samples()
    ranks = dims.get("data_parallel", 1)
    mine = share(samples, spread, parallel_state.get_data_parallel_rank(), ranks)
    return take(samples, mine)


class Calls:
    """A model, a plan of its samples, and calls with something of them changed."""

    def __init__(
        self,
        dims: dict[str, Any],
        reference: str,
        spread: str = "uneven",
        model: dict[str, Any] | None = None,
        **planner: Any,
    ) -> None:
        self.dims, self.planner = ParallelDims(**dims), planner
        self.model = small_model(dims, reference, **(model or {}))
        self.args = arguments(self.dims, **planner)
        self.data: Any = my_samples(dims, spread)
        self.iterators, self.counts = get_data_iterator(self.args, self.model, self.data)
        self.optimizer = adam(self.model, distributed=False)
        self.scheduler: Any = None
        self.folder = ""  # for results

    def forward(self, f: Any = log_probs_of, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        return forward_only(f, self.args, self.model, **given)

    def train(self, loss: Any = packed_objective, step: int = 0, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        given = {"args": self.args, "model": self.model, "optimizer": self.optimizer, **given}
        return train_step(loss, **given, step=step)

    def step(self, loss: Any = packed_objective) -> dict[str, Any]:
        """Metrics of a step that is planned, too."""
        self.iterators, self.counts = get_data_iterator(self.args, self.model, self.data)
        done = train_step(
            loss,
            self.args,
            self.model,
            self.iterators,
            self.counts,
            self.optimizer,
            self.scheduler,
            step=len(self.counts) - 1,  # of one, where the batch size does not cut it
            increment=1,
        )
        return {**done.metrics, "grad_norm": done.grad_norm}

    def plan(self, **fields: Any) -> Any:
        return get_data_iterator(self.args, self.model, self.data | fields)

    def planned_with(self, **options: Any) -> Any:
        return get_data_iterator(self.args, self.model, self.data, **options)

    def planned(self, **flags: Any) -> Any:
        args = arguments(self.dims, **self.planner | flags)
        return get_data_iterator(args, self.model, self.data)

    def add(self, **fields: Any) -> None:
        add_fields(self.iterators, fields)

    @property
    def layer(self) -> torch.nn.Module:
        layer: torch.nn.Module = unwrap_model(self.model[-1]).decoder.layers[-1]
        return layer

    def before_layer(self, happens: Callable[[], Any]) -> None:
        """In the second micro-batch from now on, if there is one, this happens in a layer."""
        calls = iter(range(1000))

        def hook(module: torch.nn.Module, inputs: Any) -> None:
            if next(calls) == 1:
                happens()

        self.layer.register_forward_pre_hook(hook)

    @contextlib.contextmanager
    def kept_weights(self) -> Iterator[None]:
        """Weights are the same again at the end."""
        before = {name: p.detach().clone() for name, p in named_parameters(self.model)}
        yield
        with torch.no_grad():
            for name, parameter in named_parameters(self.model):
                parameter.copy_(before[name])

    @contextlib.contextmanager
    def mean_over_micro_batches(self) -> Iterator[None]:
        config = get_model_config(self.model[0])
        with mock.patch.object(config, "calculate_per_token_loss", False):
            yield


class Fault(NamedTuple):
    """A call that is wrong on one rank, what others call meanwhile, and what every rank raises."""

    call: Callable[[Calls], Any]
    others: Callable[[Calls], Any]
    error: str
    text: str
    rank: int | None = None  # None: that of the layout


def run(table: dict[str, Fault], at_fault: int, calls: Calls) -> dict[str, dict[str, Any]]:
    """What this rank raises for each fault of a table, one after the other."""
    report: dict[str, dict[str, Any]] = {}
    for name, fault in table.items():
        rank = at_fault if fault.rank is None else fault.rank
        begun, raised = time.monotonic(), None
        try:
            (fault.call if dist.get_rank() == rank else fault.others)(calls)
        except Exception as error:
            raised = error
        cause = getattr(raised, "__cause__", None)
        report[name] = {
            "type": "" if raised is None else type(raised).__name__,
            "message": str(raised),
            "cause": "" if cause is None else type(cause).__name__,
            "seconds": time.monotonic() - begun,
        }
    return report


def f_with(change: Function) -> Function:
    """The usual f, with ``change(outputs, number)`` for what it returns of real samples."""
    numbers = iter(range(1000))

    def f(logits: torch.Tensor, *, micro_batch: Any) -> Any:
        number = 0 if micro_batch.is_placeholder else next(numbers)
        return change(log_probs_of(logits, micro_batch=micro_batch), number)

    return f


def loss_with(change: Function) -> Function:
    """The usual loss function, with ``change(loss, metrics, number)`` for what it returns."""
    numbers = iter(range(1000))

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return change(*packed_objective(logits, row, totals), next(numbers))

    return loss
