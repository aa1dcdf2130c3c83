"""Calls that are wrong on one rank alone, as a table: one after the other in one job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.model import adam, named_parameters
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.planning import ParallelDims

Function = Callable[..., Any]


class Calls:
    """A model, its iterators, and the calls with something of them changed."""

    def __init__(self, dims: dict[str, Any], reference: str, spread: str, **planner: Any) -> None:
        self.dims, self.planner = ParallelDims(**dims), planner
        self.model = small_model(dims, reference)
        self.args = arguments(self.dims, **planner)
        self.data = my_samples(dims, spread)
        self.iterators, self.counts = get_data_iterator(self.args, self.model, self.data)
        self.optimizer = adam(self.model, distributed=False)
        self.another, _ = self.planned(dynamic_batch_balance="cost")

    def forward(self, f: Any = log_probs_of, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        return forward_only(f, self.args, self.model, **given)

    def train(self, loss: Any = packed_objective, step: int = 0, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        given = {"args": self.args, "model": self.model, "optimizer": self.optimizer, **given}
        return train_step(loss, **given, step=step)

    def plan(self, **fields: Any) -> Any:
        return get_data_iterator(self.args, self.model, self.data | fields)

    def planned_with(self, **options: Any) -> Any:
        return get_data_iterator(self.args, self.model, self.data, **options)

    def planned_in(self, *empty: list[int]) -> Any:
        """In one step, and empty ones."""
        return self.planned_with(steps=[range(len(self.data["tokens"])), *empty])

    def planned(self, **flags: Any) -> Any:
        args = arguments(self.dims, **self.planner | flags)
        return get_data_iterator(args, self.model, self.data)

    def add(self, **fields: Any) -> None:
        add_fields(self.iterators, fields)

    def forward_exchanged(self, f: Any = log_probs_of) -> Any:
        iterators, counts = self.planned()
        return self.forward(f, data_iterator=iterators, num_microbatches=counts)

    def forward_changed(self, tokens: slice = slice(None)) -> Any:
        """The first sample's tokens are cut once they are planned."""
        iterators, counts = self.plan(tokens=[*self.data["tokens"]])
        held = schedule_of(iterators).rollout_data["tokens"]
        held[0] = held[0][tokens]
        return self.forward(data_iterator=iterators, num_microbatches=counts)

    def train_of_two(self, step: int = 0) -> Any:
        places = np.arange(len(self.data["tokens"]))
        iterators, counts = self.planned_with(steps=[places[::2], places[1::2]])
        return self.train(step=step, data_iterator=iterators, num_microbatches=counts)

    def train_masked(self, first: float = 1.0) -> Any:
        """With this weight of every sample's first response token."""
        masks = [torch.ones(n) for n in self.data["response_lengths"]]
        for mask in masks:
            mask[:1] = first
        iterators, counts = self.plan(loss_masks=masks)
        return self.train(data_iterator=iterators, num_microbatches=counts)

    def train_at(self, temperature: float = 1.0) -> Any:
        def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
            log_probs = response_log_probs(logits, row, temperature=temperature)
            return -torch.cat(log_probs).sum() / totals.num_tokens, {}

        return self.train(loss)

    def train_with_mean(self) -> Any:
        config = get_model_config(self.model[0])
        config.calculate_per_token_loss = False
        try:
            return self.train()
        finally:
            config.calculate_per_token_loss = True

    def train_failing_in_shared_rows(self) -> Any:
        """Of data that one stage of one replica alone has to be sent."""

        def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
            if row.context_parallel_size > 1:
                raise ZeroDivisionError("in the loss")
            return packed_objective(logits, row, totals)

        data = self.data if dist.get_rank() != 2 else None
        iterators, counts = get_data_iterator(self.args, self.model, data)
        return self.train(loss, data_iterator=iterators, num_microbatches=counts)


def _f_with(change: Function) -> Function:
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


def _detached_loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
    with torch.no_grad():
        return packed_objective(logits, row, totals)


def _with_unknown_token(calls: Calls, token: int) -> list[torch.Tensor]:
    tokens = [each.clone() for each in calls.data["tokens"]]
    tokens[1][2] = token
    return tokens


class Wrong(NamedTuple):
    """A call that one rank makes, what the others make meanwhile, and what all raise."""

    call: Callable[[Calls], Any]
    right: Callable[[Calls], Any]
    error: str
    text: str


def _f(text: str, change: Function) -> Wrong:
    """What f returns is wrong."""
    wrong = "ForwardFailedError", text
    return Wrong(lambda calls: calls.forward(_f_with(change)), Calls.forward, *wrong)


def _exchanged(text: str, change: Function) -> Wrong:
    """An output, which goes back to other ranks."""

    def changed(outputs: dict[str, Any], number: int) -> dict[str, Any]:
        return {"log_probs": [change(each) for each in outputs["log_probs"]]}

    wrong = "ForwardFailedError", text
    return Wrong(
        lambda calls: calls.forward_exchanged(_f_with(changed)), Calls.forward_exchanged, *wrong
    )


def _loss(text: str, change: Function) -> Wrong:
    """What the loss function returns is wrong."""
    wrong = "ForwardFailedError", text
    return Wrong(lambda calls: calls.train(loss_with(change)), Calls.train, *wrong)


def _metric(text: str, change: Function) -> Wrong:
    return _loss(text, lambda loss, metrics, n: (loss, metrics | {"kl": change(loss)}))


def _train(error: str, text: str, **changes: Any) -> Wrong:
    return Wrong(lambda calls: calls.train(**changes), Calls.train, error, text)


def _plan(error: str, text: str, change: Callable[[Calls], dict[str, Any]]) -> Wrong:
    """Fields of the batch are wrong."""
    return Wrong(lambda calls: calls.plan(**change(calls)), Calls.plan, error, text)


def _unplanned(text: str, **options: Any) -> Wrong:
    wrong = "PlanningFailedError", text
    return Wrong(lambda calls: calls.planned_with(**options), Calls.plan, *wrong)


def _flags(error: str, text: str, **flags: Any) -> Wrong:
    return Wrong(lambda calls: calls.planned(**flags), Calls.plan, error, text)


def _fields(error: str, text: str, call: Callable[[Calls], Any]) -> Wrong:
    return Wrong(call, Calls.add, error, text)


_PLANNING, _COLLATION = "PlanningFailedError", "CollationFailedError"
_MISMATCH = "PlanMismatchError"
_CHANGED = Wrong(
    lambda calls: calls.forward_changed(slice(0)),
    Calls.forward_changed,
    _COLLATION,
    "rank 2: SchemaError: field 'tokens'",
)
_LACKING = _plan(_PLANNING, "rank 2: KeyError", lambda calls: {"total_lengths": None})
_MORE_FIELDS = _plan(
    _MISMATCH,
    "'teacher_log_probs'",
    lambda calls: {"teacher_log_probs": calls.data["ref_log_probs"]},
)

# Data-parallel rank 1 has one sample, rank 0 the others: global rank 2 has several rows.
ON_ONE_REPLICA = {
    "f adds a name later": _f(
        "['log_probs', 'mine'] for one micro-batch",
        lambda outputs, n: outputs | ({"mine": outputs["log_probs"]} if n else {}),
    ),
    "f has other names": _f(
        "rank 3: names that f returned is ['log_probs'], on rank 2 it is ['mine']",
        lambda outputs, n: {"mine": outputs["log_probs"]},
    ),
    "f returns None": _f("rank 2: OrderError: f must return a dict", lambda outputs, n: None),
    "f returns a name that is none": _f(
        "rank 2: OrderError: f returned the key 3; name outputs by texts",
        lambda outputs, n: {3: outputs["log_probs"]},
    ),
    "f returns floats": _f(
        "rank 2: OrderError: f returned a float for a sample's 'log_probs'; return a tensor",
        lambda outputs, n: {"log_probs": [float(each.sum()) for each in outputs["log_probs"]]},
    ),
    "f returns a number": _f(
        "returned 5 for 'log_probs' in a micro-batch", lambda outputs, n: {"log_probs": 5}
    ),
    "f divides by zero": _f("rank 2: ZeroDivisionError: ", lambda outputs, n: n / 0),
    "f is None": Wrong(
        lambda calls: calls.forward(None),
        Calls.forward,
        _COLLATION,
        "rank 2: TypeError: f must be a function",
    ),
    "f divides by a text": Wrong(
        lambda calls: calls.forward(
            lambda logits, *, micro_batch: response_log_probs(logits, micro_batch, temperature="1")
        ),
        Calls.forward,
        "ForwardFailedError",
        "temperature must be a positive number",
    ),
    "f gives no logits": Wrong(
        lambda calls: calls.forward(
            lambda logits, *, micro_batch: response_log_probs(None, micro_batch)
        ),
        Calls.forward,
        "ForwardFailedError",
        "rank 2: BatchError: expected logits of shape",
    ),
    # Raised where outputs were flattened to be sent back, on this rank alone.
    "f exchanged is sparse": _exchanged(
        "rank 2: OrderError: f returned a Tensor of torch.float32, torch.sparse_coo, cpu for",
        lambda each: each.to_sparse(),
    ),
    "f exchanged is nowhere": _exchanged(
        "torch.strided, meta for 'log_probs'", lambda each: each.to("meta")
    ),
    "no iterators": Wrong(
        lambda calls: calls.forward(data_iterator=None),
        Calls.forward,
        _COLLATION,
        "rank 2: TypeError: data_iterator must be",
    ),
    "no counts": _train(
        _COLLATION, "num_microbatches says nothing of it, it is None", num_microbatches=None
    ),
    "too few counts": _train(
        _COLLATION, "says nothing of it, it is []; pass on what", num_microbatches=[]
    ),
    "counts of another plan": Wrong(
        lambda calls: calls.forward(num_microbatches=[calls.counts[0] + 1]),
        Calls.forward,
        _COLLATION,
        "rank 2: ValueError: step 0 was planned with ",
    ),
    "no optimizer": _train(
        _COLLATION, "rank 2: TypeError: optimizer must be Megatron's", optimizer=None
    ),
    "no wrapped model": Wrong(
        lambda calls: calls.train(model=[calls.model[0].module]),
        Calls.train,
        _COLLATION,
        "rank 2: TypeError: model must be wrapped",
    ),
    "metrics differ later": _loss(
        "rank 2: ValueError: the loss function",
        lambda loss, metrics, n: (loss, metrics | ({"mine": loss} if n else {})),
    ),
    "metrics differ": _loss(
        "names of metrics is ['kl', 'loss', 'policy']",
        lambda loss, metrics, n: (loss, metrics | {"mine": loss}),
    ),
    "metric is a vector": _metric(
        "'kl' must be a tensor of one value, got shape", lambda loss: torch.ones(2)
    ),
    "metric is a float": _metric("'kl' must be a tensor of one value, got float", lambda loss: 1.0),
    "metric is nowhere": _metric(
        "got Tensor of torch.float32, torch.strided, m", lambda loss: loss.to("meta")
    ),
    "metric is complex": _metric(
        "metric 'kl' must be a dense tensor of a real number, got Tensor of torch.complex64",
        lambda loss: loss.detach() * 1j,
    ),
    # Can be stacked and sent, but not added up in double precision.
    "metric is quantised": _metric(
        "got Tensor of torch.qint8",
        lambda loss: torch.quantize_per_tensor(loss.detach(), 0.1, 0, torch.qint8),
    ),
    "metric has no name": _loss(
        "rank 2: TypeError: the loss function",
        lambda loss, metrics, n: (loss, metrics | {1: loss}),
    ),
    "loss is a vector": _loss(
        "the loss must be a tensor of one value",
        lambda loss, metrics, n: (torch.stack((loss, loss)), metrics),
    ),
    "loss is a float": _loss(
        "the loss must be a tensor of one value", lambda loss, metrics, n: (float(loss), metrics)
    ),
    # Had no backward pass, and the stages before waited for one.
    "loss is an integer": _loss(
        "the loss must be of a floating-point type, got torch.int64",
        lambda loss, metrics, n: (torch.tensor(0), metrics),
    ),
    # Trained nothing, and momentum moved the weights.
    "loss is detached": _loss(
        "rank 2: ValueError: the loss is detached from the logits",
        lambda loss, metrics, n: (loss.detach(), metrics),
    ),
    "loss is detached everywhere": Wrong(
        *[lambda calls: calls.train(_detached_loss)] * 2,
        "ForwardFailedError",
        "rank 2: ValueError: the loss is detached from the logits",
    ),
    "loss divides by zero": _loss("rank 2: ZeroDivisionError: ", lambda *made: made[2] / 0),
    "loss alone": _loss(
        "rank 2: TypeError: the loss function must return", lambda loss, metrics, n: loss
    ),
    "loss function is None": _train(_COLLATION, "loss_function must be a function", loss=None),
    "step out of range": _train(_COLLATION, "rank 2: IndexError: step must be 0 to 0", step=7),
    "step of another number": Wrong(
        lambda calls: calls.train_of_two(1),
        Calls.train_of_two,
        _MISMATCH,
        "rank 2: stage is 'planning', on rank 0 it is",
    ),
    # The ranks' messages did not fit together: an abort or a hang.
    "other shapes": Wrong(
        lambda calls: calls.train(args=arguments(calls.dims, dynamic_batch_no_planned_shapes=True)),
        Calls.train,
        _MISMATCH,
        "rank 2: --dynamic-batch-no-planned-shapes is True",
    ),
    "other output layer": Wrong(
        lambda calls: calls.train(args=arguments(calls.dims, dynamic_batch_fuse_output_layer=True)),
        Calls.train,
        _MISMATCH,
        "rank 2: --dynamic-batch-fuse-output-layer is",
    ),
    # Learning rates would part.
    "other increment": _train(_MISMATCH, "increment is 7, on rank 0 it is None", increment=7),
    # One rank added up the tokens of all in a collective that the others did not make.
    "mean over micro-batches": Wrong(
        Calls.train_with_mean,
        Calls.train,
        _MISMATCH,
        "rank 2: calculate_per_token_loss is False, on rank 0 it is True",
    ),
    "data is a list": Wrong(
        lambda calls: get_data_iterator(calls.args, calls.model, [1]),
        Calls.plan,
        _PLANNING,
        "rank 2: TypeError: rollout_data must be a dict",
    ),
    "data is nowhere": _plan(
        _PLANNING,
        "field 'advantages', sample 0: expected values, not a tensor on the meta device",
        lambda calls: {"advantages": [each.to("meta") for each in calls.data["advantages"]]},
    ),
    "data has no lengths": _LACKING,
    "data has no length": _plan(
        _PLANNING,
        "field 'total_lengths', sample 0: expected an integer of 0 or more",
        lambda calls: {"total_lengths": [None for _ in calls.data["tokens"]]},
    ),
    "data has another batch size": _plan(
        _MISMATCH,
        "rank 2: global_batch_size is 50, on rank 0 it is None",
        lambda calls: {"dynamic_global_batch_size": 50},
    ),
    "data has a field that is not declared": _plan(
        _PLANNING,
        "rank 2: SchemaError: field 'my_scores'",
        lambda calls: {"my_scores": [torch.zeros(3, 2) for _ in calls.data["tokens"]]},
    ),
    "data has a field more": _MORE_FIELDS,
    "data has longer samples": _plan(
        _MISMATCH,
        "lengths of all samples (sha256)",
        lambda calls: {
            "tokens": [torch.cat((each, each[-1:])) for each in calls.data["tokens"]],
            "total_lengths": [length + 1 for length in calls.data["total_lengths"]],
        },
    ),
    "data changed before collating": _CHANGED,
    "data in steps of a number": _unplanned("such as [[0, 1], [2, 3]], got 5", steps=5),
    "data in one flat step": Wrong(
        lambda calls: calls.planned_with(steps=list(range(len(calls.data["tokens"])))),
        Calls.plan,
        _PLANNING,
        "steps must be one list of sample indices",
    ),
    "data in a step more": Wrong(
        lambda calls: calls.planned_in([]),
        Calls.planned_in,
        _MISMATCH,
        "rank 2: number of steps (given too few, add []) is 2, on rank 0 it is 1",
    ),
    "data with a cost model's path": _unplanned(
        "cost_model must be a CostModel or", cost_model="cost.json"
    ),
    "data with a dict of kinds": _unplanned(
        "schema must be a Schema, such as", schema={"tokens": "tokens"}
    ),
    "another cap": _flags(
        _MISMATCH,
        "max_tokens_per_gpu is 56, on rank 0 it is 48",
        max_tokens_per_gpu=56,
    ),
    "no cost model": _flags(
        _PLANNING,
        "DynamicBatchArgumentError: --dynamic-batch-cost-model /nowhere/cost.json: ",
        dynamic_batch_cost_model="/nowhere/cost.json",
    ),
    "exchange": _flags(
        _MISMATCH,
        "samples stay on their rank is True, on rank 0 it is False",
        dynamic_batch_exchange=False,
    ),
    "no fields": _fields(
        _PLANNING,
        "rank 2: TypeError: fields must be a dict of lists",
        lambda calls: add_fields(calls.iterators, None),
    ),
    # Some sent, the others went on to their next agreement.
    "field of another batch": _fields(
        _MISMATCH, "rank 2: plan (sha256) is", lambda calls: add_fields(calls.another, {})
    ),
    "field is a number": _fields(
        _PLANNING,
        "rank 2: SchemaError: field 'advantages': expected one value for each of the 12 samples",
        lambda calls: calls.add(tokens=calls.data["tokens"], advantages=5),
    ),
    # The rank that runs a sample checks its values, which came from the rank that brought it.
    "field is too short": Wrong(
        lambda calls: calls.add(log_probs=[torch.ones(1) for _ in calls.data["tokens"]]),
        lambda calls: calls.add(log_probs=[torch.ones(n) for n in calls.data["response_lengths"]]),
        _PLANNING,
        "SchemaError: field 'log_probs', sample",
    ),
    "field is not declared": Wrong(
        *[lambda calls: calls.add(mine=[each[:2, None] for each in calls.data["tokens"]])] * 2,
        _PLANNING,
        "SchemaError: field 'mine': expected a declared field",
    ),
    "field of one rank": _fields(
        _PLANNING,
        "field 'weights': expected values of all data-parallel ranks' samples, found none of ranks",
        lambda calls: calls.add(weights=[1.0 for _ in calls.data["tokens"]]),
    ),
    "train_step against forward_only": Wrong(
        Calls.train,
        Calls.forward,
        _MISMATCH,
        "rank 2: stage is 'train_step, collating', on rank 0 it is 'forward_only'",
    ),
    "add_fields against train_step": Wrong(
        Calls.add, Calls.train, _MISMATCH, "rank 2: stage is 'adding fields"
    ),
    # Of the replica that holds the sample both ranks say so.
    "sample over the cap": Wrong(
        *[lambda calls: calls.planned(dynamic_batch_on_oversize="error")] * 2,
        _PLANNING,
        "set max_tokens_per_gpu (--max-tokens-per-gpu) to 200 or more, or "
        "on_oversize='own-bin' (--dynamic-batch-on-oversize own-bin)",
    ),
}
ON_ONE_RANK_OF_SHARED_ROWS = {
    "data has no lengths": _LACKING,
    "data has a field more": _MORE_FIELDS,
    "data changed before collating": _CHANGED,
    # On both ranks that share the row: on one alone it ends the job.
    "loss divides in shared rows": Wrong(
        *[Calls.train_failing_in_shared_rows] * 2,
        "ForwardFailedError",
        "rank 2: ZeroDivisionError: in the loss\n  rank 3: ZeroDivisionError: in the loss",
    ),
}
ON_ONE_TENSOR_PARALLEL_RANK = {
    # Trained as zeros: each rank masks what is not of its part of the vocabulary.
    "data with a token of no rank": _plan(
        _PLANNING,
        "rank 1: SchemaError: field 'tokens', sample 1: expected token ids of 0 to 63 (use the "
        "model's tokenizer, or build it with vocab_size=65), found 64 at",
        lambda calls: {"tokens": _with_unknown_token(calls, VOCABULARY)},
    ),
    "data with a negative token": _plan(
        _PLANNING,
        "found -1 at place 2",
        lambda calls: {"tokens": _with_unknown_token(calls, -1)},
    ),
    "field with a token of no rank": _fields(
        _PLANNING,
        "sample 1: expected token ids of 0 to",
        lambda calls: calls.add(tokens=_with_unknown_token(calls, VOCABULARY)),
    ),
    "mask of another sum": Wrong(
        lambda calls: calls.train_masked(0.0),
        Calls.train_masked,
        _MISMATCH,
        "rank 1: num_tokens is ",
    ),
    "mean over micro-batches": Wrong(
        Calls.train_with_mean, Calls.train, _MISMATCH, "rank 1: calculate_per_token_loss is False"
    ),
    "loss at another temperature": Wrong(
        lambda calls: calls.train_at(0.5),
        Calls.train_at,
        "ForwardFailedError",
        "rank 1: temperature is [0.5], on rank 0 it is [1.0]",
    ),
    "f at another temperature": Wrong(
        lambda calls: calls.forward(
            lambda logits, *, micro_batch: {
                "log_probs": response_log_probs(logits, micro_batch, temperature=0.5)
            }
        ),
        Calls.forward,
        "ForwardFailedError",
        "rank 1: temperature is [0.5], on rank 0",
    ),
}
WRONG = {
    "replica": ON_ONE_REPLICA,
    "shared-rows": ON_ONE_RANK_OF_SHARED_ROWS,
    "tp2": ON_ONE_TENSOR_PARALLEL_RANK,
}


def wrong_calls(
    dims: dict[str, Any], reference: str, table: str, at_fault: int, planner: dict[str, Any]
) -> dict[str, Any]:
    """What every rank raises for calls that are wrong on rank ``at_fault``; then a right one."""
    calls = Calls(dims, reference, "uneven", **planner)
    before = {name: p.detach().clone() for name, p in named_parameters(calls.model)}
    report: dict[str, Any] = {}
    for name, case in WRONG[table].items():
        begun = time.monotonic()
        try:
            (case.call if dist.get_rank() == at_fault else case.right)(calls)
            report[name] = {"type": None}
        except Exception as error:
            report[name] = {
                "type": type(error).__name__,
                "message": str(error),
                "cause": "" if error.__cause__ is None else type(error.__cause__).__name__,
                "seconds": time.monotonic() - begun,
            }
    unchanged = all(torch.equal(p, before[name]) for name, p in named_parameters(calls.model))
    return {"cases": report, "unchanged": unchanged, "grad_norm": calls.train().grad_norm}
