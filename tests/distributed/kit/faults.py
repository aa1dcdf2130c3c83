"""Faults that a job lives through, as tables: what is wrong on one rank, and what all then raise.

The rows of a table are called one after the other in one job (`battery` has those that end it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

import mcore_batching
from kit import framework
from kit.calls import Calls, Fault, Function, f_with, loss_with, run
from kit.collectives import stock_step
from kit.exactness import arguments, log_probs_of
from kit.model import named_parameters
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.megatron import (
    add_fields,
    get_data_iterator,
    plan,
    response_log_probs,
    schedule_of,
)
from mcore_batching.megatron.plan import Planner
from mcore_batching.planning import plan_step

_PLANNING, _COLLATION = "PlanningFailedError", "CollationFailedError"
_FORWARD, _MISMATCH = "ForwardFailedError", "PlanMismatchError"


def _alike(error: str, text: str, call: Callable[[Calls], Any]) -> Fault:
    """All ranks make the same call."""
    return Fault(call, call, error, text)


def _f(text: str, change: Function) -> Fault:
    """What f returns is wrong."""
    return Fault(lambda calls: calls.forward(f_with(change)), Calls.forward, _FORWARD, text)


def _output(text: str, change: Function) -> Fault:
    """An output that goes back to another rank is wrong."""
    return _f(text, lambda made, number: {"log_probs": [*map(change, made["log_probs"])]})


def _forward(error: str, text: str, *f: Any, **changes: Any) -> Fault:
    return Fault(lambda calls: calls.forward(*f, **changes), Calls.forward, error, text)


def _loss(text: str, change: Function) -> Fault:
    """What the loss function returns is wrong."""
    return Fault(lambda calls: calls.train(loss_with(change)), Calls.train, _FORWARD, text)


def _metric(text: str, change: Function) -> Fault:
    return _loss(text, lambda loss, metrics, number: (loss, metrics | {"kl": change(loss)}))


def _train(error: str, text: str, **changes: Any) -> Fault:
    return Fault(lambda calls: calls.train(**changes), Calls.train, error, text)


def _train_with(text: str, **flags: Any) -> Fault:
    """Flags of this step differ."""
    return Fault(
        lambda calls: calls.train(args=arguments(calls.dims, **flags)), Calls.train, _MISMATCH, text
    )


def _plan(error: str, text: str, change: Callable[[Calls], dict[str, Any]]) -> Fault:
    """Fields of the batch are wrong."""
    return Fault(lambda calls: calls.plan(**change(calls)), Calls.plan, error, text)


def _planned_with(text: str, **options: Any) -> Fault:
    return Fault(lambda calls: calls.planned_with(**options), Calls.plan, _PLANNING, text)


def _flags(error: str, text: str, others: dict[str, Any] | None = None, **flags: Any) -> Fault:
    """Flags of planning are wrong; the other ranks have theirs."""
    return Fault(
        lambda calls: calls.planned(**flags),
        lambda calls: calls.planned(**(others or {})),
        error,
        text,
    )


def _fields(error: str, text: str, call: Callable[[Calls], Any]) -> Fault:
    """Fields that are added are wrong."""
    return Fault(call, Calls.add, error, text)


def _meanwhile(owner: Any, name: str, value: Any) -> Callable[[Calls], Any]:
    """Planning with something in another's place."""

    def planned(calls: Calls) -> Any:
        with mock.patch.object(owner, name, value):
            return calls.plan()

    return planned


def _planned_in(*empty: list[int]) -> Callable[[Calls], Any]:
    """In one step, and empty ones."""
    return lambda calls: calls.planned_with(steps=[range(len(calls.data["tokens"])), *empty])


def _forward_changed(tokens: slice) -> Callable[[Calls], Any]:
    """The first sample's tokens are cut once they are planned."""

    def forward(calls: Calls) -> Any:
        iterators, counts = calls.plan(tokens=[*calls.data["tokens"]])
        held = schedule_of(iterators).rollout_data["tokens"]
        held[0] = held[0][tokens]
        return calls.forward(data_iterator=iterators, num_microbatches=counts)

    return forward


def _train_of_two(step: int) -> Callable[[Calls], Any]:
    def train(calls: Calls) -> Any:
        places = np.arange(len(calls.data["tokens"]))
        iterators, counts = calls.planned_with(steps=[places[::2], places[1::2]])
        return calls.train(step=step, data_iterator=iterators, num_microbatches=counts)

    return train


def _train_masked(first: float) -> Callable[[Calls], Any]:
    """With this weight of every sample's first response token."""

    def train(calls: Calls) -> Any:
        masks = [torch.ones(n) for n in calls.data["response_lengths"]]
        for mask in masks:
            mask[:1] = first
        iterators, counts = calls.plan(loss_masks=masks)
        return calls.train(data_iterator=iterators, num_microbatches=counts)

    return train


def _train_at(temperature: float) -> Callable[[Calls], Any]:
    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        log_probs = response_log_probs(logits, row, temperature=temperature)
        return -torch.cat(log_probs).sum() / totals.num_tokens, {}

    return lambda calls: calls.train(loss)


def _train_with_mean(calls: Calls) -> Any:
    with calls.mean_over_micro_batches():
        return calls.train()


def _train_failing_in_shared_rows(calls: Calls) -> Any:
    """Of data that one stage of one replica alone has to be sent."""

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        if row.context_parallel_size > 1:
            raise ZeroDivisionError("in the loss")
        return packed_objective(logits, row, totals)

    data = calls.data if dist.get_rank() != 2 else None
    iterators, counts = get_data_iterator(calls.args, calls.model, data)
    return calls.train(loss, data_iterator=iterators, num_microbatches=counts)


def _train_detached(calls: Calls) -> Any:
    def loss(*given: Any) -> Any:
        with torch.no_grad():
            return packed_objective(*given)

    return calls.train(loss)


def _stock_step(longer: bool) -> Callable[[Calls], Any]:
    """Of a stock script, whose last stage reads a token more."""

    def step(calls: Calls) -> Any:
        tokens = [*calls.data["tokens"]]
        if longer:
            tokens[0] = torch.nn.functional.pad(tokens[0], (0, 1))
        args = arguments(calls.dims, padded_vocab_size=VOCABULARY)
        return stock_step(args, calls.model, {"tokens": tokens})

    return step


def _plan_without_replica(calls: Calls) -> Any:
    data = calls.data if parallel_state.get_data_parallel_rank() == 0 else None
    return get_data_iterator(calls.args, calls.model, data)


def _shared_prefixes(turned: bool) -> Callable[[Calls], Any]:
    """The tokens of a sample that others begin are turned round."""

    def planned(calls: Calls) -> Any:
        args = arguments(calls.dims, **calls.planner, dynamic_batch_share_prefixes=True)
        tokens = [*calls.data["tokens"]]
        if turned:
            tokens[9] = tokens[9].flip(0)
        return get_data_iterator(args, calls.model, calls.data | {"tokens": tokens})

    return planned


class _Unreadable:
    """A value that goes out and cannot be read where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("no such file on this rank")


def _plan_with_images(made: Callable[[], Any]) -> Callable[[Calls], Any]:
    schema = DEFAULT_SCHEMA.declare("image", Kind.METADATA)

    def planned(calls: Calls) -> Any:
        data = calls.data | {"image": [made() for _ in calls.data["tokens"]]}
        return get_data_iterator(calls.args, calls.model, data, schema=schema)

    return planned


def _longer(calls: Calls) -> dict[str, Any]:
    """Every sample has a token more."""
    return {
        "tokens": [torch.cat((each, each[-1:])) for each in calls.data["tokens"]],
        "total_lengths": [length + 1 for length in calls.data["total_lengths"]],
    }


def _with_token(token: int) -> Callable[[Calls], dict[str, Any]]:
    def tokens(calls: Calls) -> dict[str, Any]:
        made = [each.clone() for each in calls.data["tokens"]]
        made[1][2] = token
        return {"tokens": made}

    return tokens


def _plan_beyond_cap(planner: Planner, job: Any, request: Any, ticket: Any) -> Any:
    config = dataclasses.replace(request.config, max_tokens_per_gpu=1000)
    return plan_step(request.lengths, request.dims, config, request.cost_model)


def _cannot(*unused: Any) -> Any:
    raise MemoryError("on purpose")


def _damaged(data: bytes, *rest: Any, **options: Any) -> Any:
    return _read_plan(data[:-1], *rest, **options)


_read_plan = plan.plan_from_bytes

IN_TRANSIT = {
    # As many steps with either.
    "another global batch size": _flags(
        _MISMATCH,
        "global_batch_size is 8, on rank 0 it is 7",
        {"global_batch_size": 7},
        global_batch_size=8,
    ),
    "longer samples": _plan(_MISMATCH, "lengths of all samples (sha256)", _longer),
    "other beginning": Fault(
        _shared_prefixes(True),
        _shared_prefixes(False),
        _MISMATCH,
        "hosts of all samples (sha256)",
    ),
    "unreadable value": Fault(
        _plan_with_images(_Unreadable),
        _plan_with_images(lambda: None),
        _PLANNING,
        "OSError: no such file on this rank",
        rank=3,
    ),
    "the planning rank cannot plan": Fault(
        _meanwhile(Planner, "plan", _cannot), Calls.plan, _PLANNING, "rank 0: MemoryError", rank=0
    ),
    "the plan arrives damaged": Fault(
        _meanwhile(plan, "plan_from_bytes", _damaged), Calls.plan, _PLANNING, ": PlanFormatErr"
    ),
    "the plan is over the cap": Fault(
        _meanwhile(Planner, "plan", _plan_beyond_cap),
        Calls.plan,
        "InvariantError",
        "invariant 'cap' is broken",
        rank=0,
    ),
}
"""Of samples and plans on their way to other ranks."""

# Data-parallel rank 1 has one sample, rank 0 the others: global rank 2 has several rows.
_LACKING = _plan(_PLANNING, "rank 2: KeyError", lambda calls: {"total_lengths": None})
_CHANGED = Fault(
    _forward_changed(slice(0)),
    _forward_changed(slice(None)),
    _COLLATION,
    "rank 2: SchemaError: field 'tokens'",
)
_MORE_FIELDS = _plan(
    _MISMATCH,
    "'teacher_log_probs'",
    lambda calls: {"teacher_log_probs": calls.data["ref_log_probs"]},
)

FORWARD = {
    "f adds a name later": _f(
        "['log_probs', 'mine'] for one micro-batch",
        lambda made, number: made | ({"mine": made["log_probs"]} if number else {}),
    ),
    "f has other names": _f(
        "rank 3: names that f returned is ['log_probs'], on rank 2 it is ['mine']",
        lambda made, number: {"mine": made["log_probs"]},
    ),
    "f returns None": _f("rank 2: OrderError: f must return a dict", lambda made, number: None),
    "f returns a name that is none": _f(
        "rank 2: OrderError: f returned the key 3; name outputs by texts",
        lambda made, number: {3: made["log_probs"]},
    ),
    "f returns floats": _output(
        "rank 2: OrderError: f returned a float for a sample's 'log_probs'; return a tensor",
        lambda each: float(each.sum()),
    ),
    "f returns a number": _f(
        "returned 5 for 'log_probs' in a micro-batch", lambda made, number: {"log_probs": 5}
    ),
    "f divides by zero": _f("rank 2: ZeroDivisionError: ", lambda made, number: number / 0),
    "f is None": _forward(_COLLATION, "rank 2: TypeError: f must be a function", None),
    "f divides by a text": _forward(
        _FORWARD,
        "temperature must be a positive number",
        lambda logits, *, micro_batch: response_log_probs(logits, micro_batch, temperature="1"),
    ),
    "f gives no logits": _forward(
        _FORWARD,
        "rank 2: BatchError: expected logits of shape",
        lambda logits, *, micro_batch: response_log_probs(None, micro_batch),
    ),
    # Raised where outputs were flattened to be sent back, on this rank alone.
    "f returns what is sparse": _output(
        "rank 2: OrderError: f returned a Tensor of torch.float32, torch.sparse_coo, cpu for",
        lambda each: each.to_sparse(),
    ),
    "f returns what is nowhere": _output(
        "torch.strided, meta for 'log_probs'", lambda each: each.to("meta")
    ),
    "no iterators": _forward(
        _COLLATION, "rank 2: TypeError: data_iterator must be", data_iterator=None
    ),
    "counts of another plan": _forward(
        _COLLATION, "rank 2: ValueError: step 0 was planned with ", num_microbatches=[99]
    ),
    "data changed before collating": _CHANGED,
    "f is None everywhere": _alike(
        "TypeError",
        "f must be a function of the logits, got NoneType",
        lambda calls: calls.forward(None),
    ),
    "train_step against forward_only": Fault(
        Calls.train,
        Calls.forward,
        _MISMATCH,
        "rank 2: stage is 'train_step, collating', on rank 0 it is 'forward_only'",
    ),
}

TRAINING = {
    "no counts": _train(
        _COLLATION, "num_microbatches says nothing of it, it is None", num_microbatches=None
    ),
    "too few counts": _train(
        _COLLATION, "says nothing of it, it is []; pass on what", num_microbatches=[]
    ),
    "no optimizer": _train(
        _COLLATION, "rank 2: TypeError: optimizer must be Megatron's", optimizer=None
    ),
    "no wrapped model": Fault(
        lambda calls: calls.train(model=[calls.model[0].module]),
        Calls.train,
        _COLLATION,
        "rank 2: TypeError: model must be wrapped",
    ),
    "metrics differ later": _loss(
        "rank 2: ValueError: the loss function",
        lambda loss, metrics, number: (loss, metrics | ({"mine": loss} if number else {})),
    ),
    "metrics differ": _loss(
        "names of metrics is ['kl', 'loss', 'policy']",
        lambda loss, metrics, number: (loss, metrics | {"mine": loss}),
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
        lambda loss, metrics, number: (loss, metrics | {1: loss}),
    ),
    "loss is a vector": _loss(
        "the loss must be a tensor of one value",
        lambda loss, metrics, number: (torch.stack((loss, loss)), metrics),
    ),
    "loss is a float": _loss(
        "the loss must be a tensor of one value",
        lambda loss, metrics, number: (float(loss), metrics),
    ),
    # Had no backward pass, and the stages before waited for one.
    "loss is an integer": _loss(
        "the loss must be of a floating-point type, got torch.int64",
        lambda loss, metrics, number: (torch.tensor(0), metrics),
    ),
    # Trained nothing, and momentum moved the weights.
    "loss is detached": _loss(
        "rank 2: ValueError: the loss is detached from the logits",
        lambda loss, metrics, number: (loss.detach(), metrics),
    ),
    "loss is detached everywhere": _alike(
        _FORWARD, "rank 2: ValueError: the loss is detached from the logits", _train_detached
    ),
    "loss divides by zero": _loss("rank 2: ZeroDivisionError: ", lambda *made: made[2] / 0),
    "loss alone": _loss(
        "rank 2: TypeError: the loss function must return", lambda loss, metrics, number: loss
    ),
    "loss function is None": _train(_COLLATION, "loss_function must be a function", loss=None),
    "step out of range": _train(_COLLATION, "rank 2: IndexError: step must be 0 to 0", step=7),
    "step out of range everywhere": _alike(
        "IndexError", "step must be 0 to 0, got 7", lambda calls: calls.train(step=7)
    ),
    "step below 0 everywhere": _alike(
        "IndexError", "step must be 0 to 0, got -1", lambda calls: calls.train(step=-1)
    ),
    "step of another number": Fault(
        _train_of_two(1),
        _train_of_two(0),
        _MISMATCH,
        "rank 2: stage is 'planning', on rank 0 it is",
    ),
    # The ranks' messages did not fit together: an abort or a hang.
    "other shapes": _train_with(
        "rank 2: --dynamic-batch-no-planned-shapes is True", dynamic_batch_no_planned_shapes=True
    ),
    "other output layer": _train_with(
        "rank 2: --dynamic-batch-fuse-output-layer is", dynamic_batch_fuse_output_layer=True
    ),
    # Learning rates would part.
    "other increment": _train(_MISMATCH, "increment is 7, on rank 0 it is None", increment=7),
    # One rank added up the tokens of all in a collective that the others did not make.
    "mean over micro-batches": Fault(
        _train_with_mean,
        Calls.train,
        _MISMATCH,
        "rank 2: calculate_per_token_loss is False, on rank 0 it is True",
    ),
    "stages read other samples": Fault(
        _stock_step(True), _stock_step(False), _MISMATCH, "lengths of all samples (sha256)", rank=3
    ),
}

PLANNING = {
    "data is a list": Fault(
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
    "data has no lengths anywhere": _alike(
        "KeyError",
        "rollout_data lacks total_lengths, response_lengths",
        lambda calls: get_data_iterator(calls.args, calls.model, {"tokens": []}),
    ),
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
    # Lost all samples before.
    "data has a batch size below 0 everywhere": _alike(
        "ConfigError",
        "global_batch_size must be 0 or more, got -4",
        lambda calls: calls.plan(dynamic_global_batch_size=-4),
    ),
    "data has a field that is not declared": _plan(
        _PLANNING,
        "rank 2: SchemaError: field 'my_scores'",
        lambda calls: {"my_scores": [torch.zeros(3, 2) for _ in calls.data["tokens"]]},
    ),
    "data has a field more": _MORE_FIELDS,
    "data in steps of a number": _planned_with("such as [[0, 1], [2, 3]], got 5", steps=5),
    "data in one flat step": Fault(
        lambda calls: calls.planned_with(steps=[*range(len(calls.data["tokens"]))]),
        Calls.plan,
        _PLANNING,
        "steps must be one list of sample indices",
    ),
    "data in a step more": Fault(
        _planned_in([]),
        _planned_in(),
        _MISMATCH,
        "rank 2: number of steps (given too few, add []) is 2, on rank 0 it is 1",
    ),
    "data with a cost model's path": _planned_with(
        "cost_model must be a CostModel or", cost_model="cost.json"
    ),
    "data with a dict of kinds": _planned_with(
        "schema must be a Schema, such as", schema={"tokens": "tokens"}
    ),
    "data on no rank of a replica": _alike(
        _MISMATCH,
        "no rank of data-parallel rank 1 (global ranks [1, 3]) was given rollout_data: pass it on "
        "at least one",
        _plan_without_replica,
    ),
    "another cap": _flags(
        _MISMATCH, "max_tokens_per_gpu is 56, on rank 0 it is 48", max_tokens_per_gpu=56
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
    "micro-batches below 1 everywhere": _alike(
        "ConfigError",
        "micro_batch_size must be 1 or more, got -1",
        lambda calls: calls.planned(use_dynamic_batch_size=False, micro_batch_size=-1),
    ),
    "a forward plan of its own beside dynamic CP": _alike(
        "DynamicBatchArgumentError",
        "forward_only has no plan of its own",
        lambda calls: calls.planned(
            dynamic_batch_context_parallel=2, dynamic_batch_forward_only_max_tokens_per_gpu=9
        ),
    ),
    "no fields": _fields(
        _PLANNING,
        "rank 2: TypeError: fields must be a dict of lists",
        lambda calls: add_fields(calls.iterators, None),
    ),
    # Some sent, the others went on to their next agreement.
    "field of another batch": Fault(
        lambda calls: add_fields(calls.planned(dynamic_batch_balance="cost")[0], {}),
        lambda calls: (calls.planned(dynamic_batch_balance="cost"), calls.add()),
        _MISMATCH,
        "rank 2: plan (sha256) is",
    ),
    "field is a number": _fields(
        _PLANNING,
        "rank 2: SchemaError: field 'advantages': expected one value for each of the 12 samples",
        lambda calls: calls.add(tokens=calls.data["tokens"], advantages=5),
    ),
    # The rank that runs a sample checks its values, which came from the rank that brought it.
    "field is too short": Fault(
        lambda calls: calls.add(log_probs=[torch.ones(1) for _ in calls.data["tokens"]]),
        lambda calls: calls.add(log_probs=[torch.ones(n) for n in calls.data["response_lengths"]]),
        _PLANNING,
        "SchemaError: field 'log_probs', sample",
    ),
    "field is not declared": _alike(
        _PLANNING,
        "SchemaError: field 'mine': expected a declared field",
        lambda calls: calls.add(mine=[each[:2, None] for each in calls.data["tokens"]]),
    ),
    "field of one rank": _fields(
        _PLANNING,
        "field 'weights': expected values of all data-parallel ranks' samples, found none of ranks",
        lambda calls: calls.add(weights=[1.0 for _ in calls.data["tokens"]]),
    ),
    "add_fields against train_step": Fault(
        Calls.add, Calls.train, _MISMATCH, "rank 2: stage is 'adding fields"
    ),
    # Of the replica that holds the sample both ranks say so.
    "sample over the cap": _alike(
        _PLANNING,
        "set max_tokens_per_gpu (--max-tokens-per-gpu) to 200 or more, or "
        "on_oversize='own-bin' (--dynamic-batch-on-oversize own-bin)",
        lambda calls: calls.planned(dynamic_batch_on_oversize="error"),
    ),
}

SHARED_ROWS = {
    "data has no lengths": _LACKING,
    "data has a field more": _MORE_FIELDS,
    "data changed before collating": _CHANGED,
    # On both ranks that share the row: on one alone it ends the job.
    "loss divides in shared rows": _alike(
        _FORWARD,
        "rank 2: ZeroDivisionError: in the loss\n  rank 3: ZeroDivisionError: in the loss",
        _train_failing_in_shared_rows,
    ),
}


def _gathered(logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits)


# Summed over tensor-parallel ranks once more, such logits gave log-probs that were off by log 2.
_WHOLE = (
    "BatchError",
    "expected logits of this tensor-parallel rank's 32 entries of the vocabulary",
)
TENSOR_PARALLEL = {
    # Trained as zeros: each rank masks what is not of its part of the vocabulary.
    "data with a token of no rank": _plan(
        _PLANNING,
        "rank 1: SchemaError: field 'tokens', sample 1: expected token ids of 0 to 63 (use the "
        "model's tokenizer, or build it with vocab_size=65), found 64 at",
        _with_token(VOCABULARY),
    ),
    "data with a negative token": _plan(_PLANNING, "found -1 at place 2", _with_token(-1)),
    "field with a token of no rank": _fields(
        _PLANNING,
        "sample 1: expected token ids of 0 to",
        lambda calls: calls.add(**_with_token(VOCABULARY)(calls)),
    ),
    "mask of another sum": Fault(
        _train_masked(0.0), _train_masked(1.0), _MISMATCH, "rank 1: num_tokens is "
    ),
    "mean over micro-batches": Fault(
        _train_with_mean, Calls.train, _MISMATCH, "rank 1: calculate_per_token_loss is False"
    ),
    "loss at another temperature": Fault(
        _train_at(0.5),
        _train_at(1.0),
        _FORWARD,
        "rank 1: temperature is [0.5], on rank 0 it is [1.0]",
    ),
    "f at another temperature": _forward(
        _FORWARD,
        "rank 1: temperature is [0.5], on rank 0",
        lambda logits, *, micro_batch: {
            "log_probs": response_log_probs(logits, micro_batch, temperature=0.5)
        },
    ),
    "f of the whole vocabulary": _alike(
        *_WHOLE,
        lambda calls: calls.forward(
            lambda logits, *, micro_batch: log_probs_of(_gathered(logits), micro_batch=micro_batch)
        ),
    ),
    "loss of the whole vocabulary": _alike(
        *_WHOLE,
        lambda calls: calls.train(
            lambda logits, row, totals: packed_objective(_gathered(logits), row, totals)
        ),
    ),
}


def _hooked(call: Callable[[Calls], Any]) -> Callable[[Calls], Any]:
    def hooked(calls: Calls) -> Any:
        with mcore_batching.hook(framework):
            return call(calls)

    return hooked


def _framework_plan(calls: Calls, data: Any = None, **flags: Any) -> Any:
    args = arguments(calls.dims, **flags)
    return framework.get_data_iterator(args, calls.model, data or calls.data)


def _hooked_plan(**flags: Any) -> Callable[[Calls], Any]:
    return _hooked(lambda calls: _framework_plan(calls, **flags))


def _hooked_batch(*layout: Any) -> Callable[[Calls], Any]:
    return _hooked(
        lambda calls: framework.get_batch(_framework_plan(calls)[0][0], ["tokens"], *layout)
    )


def _framework_forward(calls: Calls) -> Any:
    args = arguments(calls.dims, custom_megatron_before_log_prob_hook_path="module.function")
    given = args, calls.model, *_framework_plan(calls)
    return framework.forward_only(framework.log_probs, *given)


def _hooked_plan_of(first: slice) -> Callable[[Calls], Any]:
    """Of so many of the first sample's tokens, none of them a response."""

    def plan(calls: Calls) -> Any:
        data = {name: [*values] for name, values in calls.data.items()}
        data["tokens"][0] = data["tokens"][0][first]
        data["total_lengths"][0], data["response_lengths"][0] = len(data["tokens"][0]), 0
        return _framework_plan(calls, data)

    return _hooked(plan)


_OWN = SimpleNamespace(rollout_data={}, get_next=None)
_REFUSED = "DynamicBatchArgumentError"
HOOKED = {
    "bshd": _alike(
        _REFUSED,
        "qkv_format='bshd' does not pack samples: set qkv_format=\"thd\"",
        _hooked_batch(1, "bshd"),
    ),
    "allgather": _alike(
        _REFUSED,
        "allgather_cp=True cuts whole rows, not samples, into pieces: set allgather_cp=False",
        _hooked_batch(1, "thd", True),
    ),
    "bshd planned": _alike(_REFUSED, "qkv_format='bshd'", _hooked_plan(qkv_format="bshd")),
    "allgather planned": _alike(_REFUSED, "allgather_cp=True", _hooked_plan(allgather_cp=True)),
    "exchange": _alike(
        _REFUSED, "unset dynamic_batch_exchange", _hooked_plan(dynamic_batch_exchange=True)
    ),
    "shared prefixes": _alike(
        _REFUSED,
        "unset dynamic_batch_share_prefixes",
        _hooked_plan(dynamic_batch_share_prefixes=True),
    ),
    "padded samples": _alike(
        _REFUSED, "unset dynamic_batch_pad_each_to", _hooked_plan(dynamic_batch_pad_each_to=8)
    ),
    "learnt costs": _alike(
        _REFUSED,
        "costs: set dynamic_batch_cost_model",
        _hooked_plan(dynamic_batch_cost_model="auto"),
    ),
    "rows over the cap": _alike(
        "ConfigError",
        "the least micro-batch takes 1024 tokens",
        _hooked_plan(data_pad_size_multiplier=1024),
    ),
    "a sample without tokens": Fault(
        _hooked_plan_of(slice(0)),
        _hooked_plan_of(slice(1)),
        _PLANNING,
        "rank 1: SchemaError: field 'total_lengths', sample 0: expected at least one token",
    ),
    "a batch of its own iterator": _alike(
        _REFUSED,
        "got SimpleNamespace: call get_data_iterator after mcore_batching.hook",
        _hooked(lambda calls: framework.get_batch(_OWN, ["tokens"])),
    ),
    "a pass of its own iterator": _alike(
        _REFUSED,
        "got SimpleNamespace: call get_data_iterator after mcore_batching.hook",
        _hooked(
            lambda calls: framework.forward_only(
                framework.log_probs, calls.args, calls.model, [_OWN], [1]
            )
        ),
    ),
    "a function to call before": _alike(
        _REFUSED,
        "custom_megatron_before_log_prob_hook_path: unset it, and call the func",
        _hooked(_framework_forward),
    ),
}
"""What a hooked framework cannot ask for."""

DP2, TP2 = {"data_parallel": 2}, {"tensor_parallel": 2}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
DP2_CP2 = {"data_parallel": 2, "context_parallel": 2}
SHARED = {"dynamic_batch_context_parallel": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], int, dict[str, Fault]]] = {
    "replica": (DP2_PP2, {}, 2, FORWARD | TRAINING | PLANNING | IN_TRANSIT),
    "shared-rows": (DP2_PP2, SHARED, 2, SHARED_ROWS | IN_TRANSIT),
    "shared-rows-cp2": (DP2_CP2, SHARED, 1, IN_TRANSIT),
    "tp2": (TP2, {}, 1, TENSOR_PARALLEL),
    "hooked": (DP2, {}, 1, HOOKED),
}
"""Parallel dims, flags, the rank at fault, and what goes wrong on it."""


def faults(dims: dict[str, Any], reference: str, layout: str) -> dict[str, Any]:
    """What this rank raises for each fault of a layout; what a right step then comes to."""
    _, planner, at_fault, table = LAYOUTS[layout]
    calls = Calls(dims, reference, **planner)
    before = {name: p.detach().clone() for name, p in named_parameters(calls.model)}
    report = run(table, at_fault, calls)
    unchanged = all(torch.equal(p, before[name]) for name, p in named_parameters(calls.model))
    return {"cases": report, "unchanged": unchanged, "grad_norm": calls.train().grad_norm}
