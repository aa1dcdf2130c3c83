"""Calls that are wrong on one rank alone, one after the other in one job."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_model_config

from kit.collectives import stock_step
from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.model import adam, named_parameters
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS
from mcore_batching.integrations.skyrl import iterator
from mcore_batching.integrations.slime.model_checks import checking_model
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    train_step,
)
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout.planning_protocol import plan_rollout
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.topology import first_guess, is_last_stage
from mcore_batching.planning import ParallelDims, PlannerConfig, plan_step

Function = Callable[..., Any]


class _Calls:
    """A model, its iterators, and the two calls with something of them changed."""

    def __init__(self, dims: dict[str, Any], reference: str, spread: str) -> None:
        self.dims = ParallelDims(**dims)
        self.model = small_model(dims, reference)
        self.args = arguments(self.dims)
        self.data = my_samples(dims, spread)
        self.iterators, self.counts = get_data_iterator(self.args, self.model, self.data)
        self.optimizer = adam(self.model, distributed=False)
        self.another, _ = self.exchanged()

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

    def exchanged(self) -> tuple[Any, Any]:
        args = arguments(self.dims, dynamic_batch_exchange=True)
        return get_data_iterator(args, self.model, self.data)

    def forward_exchanged(self, f: Any = log_probs_of) -> Any:
        iterators, counts = self.exchanged()
        return self.forward(f, data_iterator=iterators, num_microbatches=counts)

    def train_of_two(self, step: int) -> Any:
        places = np.arange(len(self.data["tokens"]))
        iterators, counts = self.planned_with(steps=[places[::2], places[1::2]])
        return self.train(step=step, data_iterator=iterators, num_microbatches=counts)

    def train_masked(self, first: float) -> Any:
        """With this weight of every sample's first response token."""
        masks = [torch.ones(n) for n in self.data["response_lengths"]]
        for mask in masks:
            mask[:1] = first
        iterators, counts = self.plan(loss_masks=masks)
        return self.train(data_iterator=iterators, num_microbatches=counts)

    def train_with_mean(self) -> Any:
        config = get_model_config(self.model[0])
        config.calculate_per_token_loss = False
        try:
            return self.train()
        finally:
            config.calculate_per_token_loss = True


def _f_with(change: Function) -> Function:
    """The usual f, with ``change(outputs, row, number)`` for what it returns."""
    numbers = iter(range(1000))

    def f(logits: torch.Tensor, *, micro_batch: Any) -> Any:
        number = 0 if micro_batch.is_placeholder else next(numbers)
        return change(log_probs_of(logits, micro_batch=micro_batch), micro_batch, number)

    return f


def _loss_with(change: Function) -> Function:
    """The usual loss function, with ``change(loss, metrics, number)`` for what it returns."""
    numbers = iter(range(1000))

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return change(*packed_objective(logits, row, totals), next(numbers))

    return loss


def _with_unknown_token(calls: _Calls, token: int) -> list[torch.Tensor]:
    tokens = [each.clone() for each in calls.data["tokens"]]
    tokens[1][2] = token
    return tokens


def _loss_at(temperature: float) -> Function:
    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        log_probs = response_log_probs(logits, row, temperature=temperature)
        return -torch.cat(log_probs).sum() / totals.num_tokens, {}

    return loss


def _only_real(outputs: dict[str, Any], row: Any, number: int) -> dict[str, Any]:
    del number
    return {} if row.is_placeholder else outputs


def _more_for_placeholders(outputs: dict[str, Any], row: Any, number: int) -> dict[str, Any]:
    del number
    return outputs | ({"mine": outputs["log_probs"]} if row.is_placeholder else {})


def _later_more(outputs: dict[str, Any], row: Any, number: int) -> dict[str, Any]:
    del row
    return outputs | ({"mine": outputs["log_probs"]} if number else {})


def _renamed(outputs: dict[str, Any], row: Any, number: int) -> dict[str, Any]:
    del row, number
    return {"mine": outputs["log_probs"]}


_WRONG: dict[str, Callable[[_Calls], Any]] = {
    "f adds a name later": lambda calls: calls.forward(_f_with(_later_more)),
    "f has other names": lambda calls: calls.forward(_f_with(_renamed)),
    "f has more names for placeholders": lambda calls: calls.forward(
        _f_with(_more_for_placeholders)
    ),
    "f is None": lambda calls: calls.forward(None),
    "f returns None": lambda calls: calls.forward(_f_with(lambda *unused: None)),
    "f returns a number": lambda calls: calls.forward(_f_with(lambda *unused: {"log_probs": 5})),
    "f divides by a text": lambda calls: calls.forward(
        lambda logits, *, micro_batch: response_log_probs(logits, micro_batch, temperature="1")
    ),
    "f gives no logits": lambda calls: calls.forward(
        lambda logits, *, micro_batch: response_log_probs(None, micro_batch)
    ),
    "f exchanged is sparse": lambda calls: calls.forward_exchanged(
        _f_with(lambda *made: {"log_probs": [each.to_sparse() for each in made[0]["log_probs"]]})
    ),
    "f exchanged is nowhere": lambda calls: calls.forward_exchanged(
        _f_with(lambda *made: {"log_probs": [each.to("meta") for each in made[0]["log_probs"]]})
    ),
    "no iterators": lambda calls: calls.forward(data_iterator=None),
    "no counts": lambda calls: calls.train(num_microbatches=None),
    "too few counts": lambda calls: calls.train(num_microbatches=[]),
    "no optimizer": lambda calls: calls.train(optimizer=None),
    "no wrapped model": lambda calls: calls.train(model=[calls.model[0].module]),
    "metrics differ later": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | ({"mine": loss} if n else {})))
    ),
    "metrics differ": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {"mine": loss}))
    ),
    "metric is a vector": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {"kl": torch.ones(2)}))
    ),
    "metric is a float": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {"kl": 1.0}))
    ),
    "loss is a vector": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (torch.stack((loss, loss)), metrics))
    ),
    "loss is a float": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (float(loss), metrics))
    ),
    "loss is an integer": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (torch.tensor(0), metrics))
    ),
    "metric has no name": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {1: loss}))
    ),
    "metric is nowhere": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {"kl": loss.to("meta")}))
    ),
    "metric is complex": lambda calls: calls.train(
        _loss_with(lambda loss, metrics, n: (loss, metrics | {"kl": loss.detach() * 1j}))
    ),
    # Can be stacked and sent, but not added up in double precision.
    "metric is quantised": lambda calls: calls.train(
        _loss_with(
            lambda loss, metrics, n: (
                loss,
                metrics | {"kl": torch.quantize_per_tensor(loss.detach(), 0.1, 0, torch.qint8)},
            )
        )
    ),
    "loss alone": lambda calls: calls.train(_loss_with(lambda loss, metrics, n: loss)),
    "loss function is None": lambda calls: calls.train(None),
    "step out of range": lambda calls: calls.train(step=7),
    "step of another number": lambda calls: calls.train_of_two(1),
    "other shapes": lambda calls: calls.train(
        args=arguments(calls.dims, dynamic_batch_no_planned_shapes=True)
    ),
    "other output layer": lambda calls: calls.train(
        args=arguments(calls.dims, dynamic_batch_fuse_output_layer=True)
    ),
    "other increment": lambda calls: calls.train(increment=7),
    "data is a list": lambda calls: get_data_iterator(calls.args, calls.model, [1]),
    "data is nowhere": lambda calls: calls.plan(
        advantages=[values.to("meta") for values in calls.data["advantages"]]
    ),
    "data has no lengths": lambda calls: calls.plan(total_lengths=None),
    "data has no length": lambda calls: calls.plan(
        total_lengths=[None for _ in calls.data["tokens"]]
    ),
    "data has another batch size": lambda calls: calls.plan(dynamic_global_batch_size=50),
    "data with a token of no rank": lambda calls: calls.plan(
        tokens=_with_unknown_token(calls, VOCABULARY)
    ),
    "data with a negative token": lambda calls: calls.plan(tokens=_with_unknown_token(calls, -1)),
    "field with a token of no rank": lambda calls: add_fields(
        calls.iterators, {"tokens": _with_unknown_token(calls, VOCABULARY)}
    ),
    "data in steps of a number": lambda calls: calls.planned_with(steps=5),
    "data in one flat step": lambda calls: calls.planned_with(
        steps=list(range(len(calls.data["tokens"])))
    ),
    "data with a cost model's path": lambda calls: calls.planned_with(cost_model="cost.json"),
    "data with a dict of kinds": lambda calls: calls.planned_with(schema={"tokens": "tokens"}),
    "mask of another sum": lambda calls: calls.train_masked(0.0),
    "mean over micro-batches": lambda calls: calls.train_with_mean(),
    "loss at another temperature": lambda calls: calls.train(_loss_at(0.5)),
    "f at another temperature": lambda calls: calls.forward(
        lambda logits, *, micro_batch: {
            "log_probs": response_log_probs(logits, micro_batch, temperature=0.5)
        }
    ),
    "no fields": lambda calls: add_fields(calls.iterators, None),
    # The others' fields stay on their ranks, those of this one would move.
    "field of another batch": lambda calls: add_fields(calls.another, {}),
    "field is a number": lambda calls: add_fields(
        calls.iterators, {"tokens": calls.data["tokens"], "advantages": 5}
    ),
    "train_step against forward_only": lambda calls: calls.train(),
    "add_fields against train_step": lambda calls: add_fields(calls.iterators, {}),
    "exchange": lambda calls: get_data_iterator(
        arguments(ParallelDims(), dynamic_batch_exchange=True), calls.model, calls.data
    ),
}


def _right(name: str, calls: _Calls) -> Any:
    """What the ranks that are not at fault call meanwhile."""
    if name == "exchange" or name.startswith("data "):
        return calls.plan()
    if name.startswith("f exchanged"):
        return calls.forward_exchanged()
    if name == "step of another number":
        return calls.train_of_two(0)
    if name == "mask of another sum":
        return calls.train_masked(1.0)
    if name == "no fields" or name.startswith("field "):
        return add_fields(calls.iterators, {})
    if name.startswith(("f ", "no iterators", "train_step against")):
        return calls.forward()
    return calls.train(_loss_at(1.0)) if name.startswith("loss at") else calls.train()


def wrong_calls(
    dims: dict[str, Any], reference: str, spread: str, at_fault: int, names: list[str]
) -> dict[str, Any]:
    """What every rank raises for calls that are wrong on rank ``at_fault``; then a right one."""
    calls = _Calls(dims, reference, spread)
    before = {name: p.detach().clone() for name, p in named_parameters(calls.model)}
    report: dict[str, Any] = {}
    for name in names:
        begun = time.monotonic()
        try:
            if dist.get_rank() == at_fault:
                _WRONG[name](calls)
            else:
                _right(name, calls)
            report[name] = {"type": None}
        except Exception as error:
            report[name] = {
                "type": type(error).__name__,
                "message": str(error),
                "seconds": time.monotonic() - begun,
            }
    unchanged = all(torch.equal(p, before[name]) for name, p in named_parameters(calls.model))
    return {"cases": report, "unchanged": unchanged, "grad_norm": calls.train().grad_norm}


def returns_less(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """Outputs of a function that returns nothing for placeholders; metrics in another order."""
    calls = _Calls(dims, reference, "empty")
    outputs = calls.forward(_f_with(_only_real))
    usual = calls.forward()
    reverse = dist.get_rank() == dist.get_world_size() - 1
    turned = _loss_with(
        lambda loss, metrics, n: (loss, dict(reversed(metrics.items())) if reverse else metrics)
    )
    before = {name: p.detach().clone() for name, p in named_parameters(calls.model)}
    metrics = []
    for loss in (packed_objective, turned):
        metrics.append(calls.train(loss).metrics)
        with torch.no_grad():
            for name, parameter in named_parameters(calls.model):
                parameter.copy_(before[name])
    return {
        "last_stage": is_last_stage(),
        "counts": {name: len(values) for name, values in outputs.items()},
        "equal": all(
            torch.equal(a, b)
            for name, values in usual.items()
            for a, b in zip(values, outputs[name], strict=True)
        ),
        "samples": len(calls.data["tokens"]),
        "metrics": metrics,
    }


def wrong_timeouts(dims: dict[str, Any], reference: str) -> tuple[dict[str, str], int]:
    """What planning says where the last rank, or every rank, has a time-out that is none; the
    failure watches that run once it has succeeded."""
    model, data = small_model(dims, reference), my_samples(dims)
    last, found = dist.get_world_size() - 1, {}
    for given in (0, -1, float("nan"), float("inf"), "soon"):
        for at_fault in ((last,), range(last + 1)):
            # What one at fault meets the others with: `kit.groups` tells groups by their options.
            seconds = given if dist.get_rank() in at_fault else DEFAULT_TIMEOUT_SECONDS
            args = arguments(ParallelDims(**dims), dynamic_batch_consensus_timeout_seconds=seconds)
            try:
                get_data_iterator(args, model, data)
            except Exception as error:
                found[f"{given} on {len(at_fault)}"] = f"{type(error).__name__}: {error}"
    get_data_iterator(arguments(ParallelDims(**dims)), model, data)
    watches = [each for each in threading.enumerate() if each.name == "failure watch"]
    return found, len(watches)


def stages_read_other_samples(dims: dict[str, Any], reference: str) -> str:
    """What a stock script's step raises where the last stage has a token more than the first."""
    model, samples = small_model(dims, reference), my_samples(dims)
    if dist.get_rank() == dist.get_world_size() - 1:
        samples["tokens"][0] = torch.nn.functional.pad(samples["tokens"][0], (0, 1))
    try:
        args = arguments(ParallelDims(**dims), padded_vocab_size=VOCABULARY)
        stock_step(args, model, samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fields_differ_in_one_step(dims: dict[str, Any], reference: str) -> str:
    """What planning says where samples are packed with the first agreement, as in a stock script,
    and the last rank has a field more."""
    model, samples = small_model(dims, reference), my_samples(dims)
    if dist.get_rank() == dist.get_world_size() - 1:
        samples["mine"] = [0.5 for _ in samples["tokens"]]
    args = arguments(ParallelDims(**dims))
    try:
        plan_rollout(RolloutRequest(job_of(args), model, DEFAULT_SCHEMA, one_step=True), samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def experts_on_tensor_parallel_ranks(dims: dict[str, Any], reference: str) -> str:
    """What planning says to a model whose experts all tensor-parallel ranks hold."""
    model = small_model(dims, reference, kind="moe")
    try:
        get_data_iterator(arguments(ParallelDims(**dims)), model, my_samples(dims))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def multimodal_positions(dims: dict[str, Any], reference: str) -> str:
    """What planning says to a model with multimodal rotary embeddings."""
    model = small_model(dims, reference, kind="mrope", mrope_section=[2, 1, 1])
    try:
        get_data_iterator(arguments(ParallelDims(**dims)), model, my_samples(dims))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def framework_shows_model(dims: dict[str, Any], reference: str) -> list[str]:
    """What a hooked call says of a right model, then of one that is wrong on the last rank."""

    def get_data_iterator(args: Any, model: Any, rollout_data: Any) -> str:
        return "its own"

    hooked = checking_model(get_data_iterator, get_data_iterator)
    args = arguments(ParallelDims(**dims), use_dynamic_batch_size=True)
    said = []
    for overlaps in (False, dist.get_rank() == dist.get_world_size() - 1):
        model = small_model(dims, reference)
        get_model_config(model[0]).tp_comm_overlap = overlaps
        for data in ({}, {"micro_batch_indices": []}):  # its own plan, the manager's
            try:
                said.append(hooked(args, model, rollout_data=data))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


_LENGTHS, _CAP = [494, 876, 530, 141, 365, 623, 597, 514, 410], 1000
"""Planned otherwise by the default costs."""


class _Framework:
    """Holds a model as verl's engine and SkyRL's Megatron worker do, and calls what is hooked."""

    def __init__(self, chunks: list[Any]) -> None:
        self.module = self.actor_module = chunks
        self.tf_config = get_model_config(chunks[0])
        self.engine_config = SimpleNamespace(use_remove_padding=True)
        self.model = SimpleNamespace(remove_microbatch_padding=True)

    def verl(self) -> Any:
        mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
        batch = {"input_ids": mask.long(), "attention_mask": mask}
        group = parallel_state.get_data_parallel_group()
        return micro_batches.rearrange_micro_batches(None, None, batch, _CAP, group)[1]

    def skyrl(self) -> Any:
        data = SimpleNamespace(_token_counts=_LENGTHS, _max_tokens_per_microbatch=_CAP)
        iterator._sync_num_microbatches(data)
        return data._microbatches


def framework_holds_model(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """What hooked calls give for a right model, then for one that is wrong on the last rank."""
    micro_batches._select = lambda batch, samples: samples  # verl's, which is not here
    report: dict[str, Any] = {}
    for name in ("verl", "skyrl"):
        said = []
        for overlaps in (False, dist.get_rank() == dist.get_world_size() - 1):
            model = small_model(dims, reference)
            get_model_config(model[0]).tp_comm_overlap = overlaps
            try:
                said.append(getattr(_Framework(model), name)())
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        report[name] = said
    config = get_model_config(model[0])
    step = plan_step(
        _LENGTHS,
        ParallelDims(**dims),
        PlannerConfig(max_tokens_per_gpu=_CAP),
        first_guess(VOCABULARY, config),
        owners=[0] * len(_LENGTHS),
    )
    return report | {"plan": [list(samples) for samples in step.micro_batches[0]]}


def averaged_loss(dims: dict[str, Any], reference: str) -> list[int]:
    """Warnings of a step whose loss is the mean over each micro-batch, and of one of shares."""
    calls = _Calls(dims, reference, "fewer")

    def mean(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        log_probs = torch.cat(response_log_probs(logits, row))
        weights = torch.cat(row["loss_masks"]).to(log_probs)
        return -(log_probs * weights).sum() / weights.sum().clamp(min=1), {}

    counts = []
    for loss in (mean, packed_objective):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls.train(loss)
        counts.append(sum("never reads the step's totals" in str(w.message) for w in caught))
    return counts


def gathered_logits(dims: dict[str, Any], reference: str) -> list[str]:
    """Errors where a script gathers the vocabulary before it asks for log-probabilities."""
    calls = _Calls(dims, reference, "uneven")
    gather = tensor_parallel.gather_from_tensor_model_parallel_region

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return packed_objective(gather(logits), row, totals)

    found = []
    for call in (
        lambda: calls.forward(
            lambda logits, *, micro_batch: log_probs_of(gather(logits), micro_batch=micro_batch)
        ),
        lambda: calls.train(loss),
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def all_ranks_wrong(dims: dict[str, Any], reference: str) -> list[str]:
    """Errors where every rank makes the same wrong call."""
    calls = _Calls(dims, reference, "uneven")
    found = []
    for call in (
        lambda: calls.train(step=7),
        lambda: calls.train(step=-1),
        lambda: calls.forward(None),
        lambda: get_data_iterator(calls.args, calls.model, {"tokens": []}),
        # Lost all samples before.
        lambda: calls.plan(dynamic_global_batch_size=-4),
        lambda: get_data_iterator(
            arguments(calls.dims, use_dynamic_batch_size=False, micro_batch_size=-1),
            calls.model,
            calls.data,
        ),
        lambda: get_data_iterator(
            arguments(
                calls.dims,
                dynamic_batch_context_parallel=2,
                dynamic_batch_forward_only_plan="own",
            ),
            calls.model,
            calls.data,
        ),
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
