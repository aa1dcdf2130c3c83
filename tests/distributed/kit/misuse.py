"""What is wrong in ways of its own, beside the table of `wrong_calls`."""

from __future__ import annotations

import argparse
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_model_config

from kit.collectives import stock_step
from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.model import named_parameters
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from kit.wrong_calls import Calls, loss_with
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS
from mcore_batching.integrations.megatron_lm import datasets_provider_for
from mcore_batching.integrations.megatron_lm.sft import add_sft_arguments
from mcore_batching.integrations.skyrl import iterator
from mcore_batching.integrations.slime.trainer import checking_model
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.megatron import (
    get_data_iterator,
    response_log_probs,
)
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.local import fill_local, least_count, pack_local


def returns_less(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """Outputs of a function that names placeholders' otherwise; metrics in another order."""
    calls = Calls(dims, reference, "empty")

    def of_placeholders(logits: torch.Tensor, *, micro_batch: Any) -> dict[str, Any]:
        made = log_probs_of(logits, micro_batch=micro_batch)
        return {"mine": made["log_probs"]} if micro_batch.is_placeholder else made

    outputs = calls.forward(of_placeholders)
    usual = calls.forward()
    reverse = dist.get_rank() == dist.get_world_size() - 1
    turned = loss_with(
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


def said_of_model(dims: dict[str, Any], reference: str, **settings: Any) -> str:
    """What planning says to a model of a kind."""
    model = small_model(dims, reference, **settings)
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
        return micro_batches.rearrange_micro_batches(None, batch, _CAP, group)[1]

    def skyrl(self) -> Any:
        data = SimpleNamespace(_token_counts=_LENGTHS, _max_tokens_per_microbatch=_CAP)
        iterator._sync_num_microbatches(None, data)
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
    problem = Problem.of(_LENGTHS, ParallelDims(**dims), PlannerConfig(max_tokens_per_gpu=_CAP))
    packed = pack_local(problem)
    plan = fill_local(problem, packed, least_count(problem, packed))
    return report | {"plan": [list(samples) for samples in plan]}


def data_that_few_read(dims: dict[str, Any], reference: str) -> list[str]:
    """What the datasets provider of a stock job says where tensor-parallel rank 0 finds no file,
    and where it finds one."""
    del dims
    flags = {"seq_length": 64, "split": "1,0,0", "seed": 1}
    parsed = vars(add_sft_arguments(argparse.ArgumentParser()).parse_args([]))
    said = []
    for path in (f"{reference}.absent", f"{reference}.jsonl"):
        given = parsed | flags | {"dynamic_batch_data": [path], "dynamic_batch_tokenizer": "bytes"}
        if path.endswith(".jsonl") and dist.get_rank() == 0:
            Path(path).write_text('{"prompt": "p", "completion": "c"}\n')
        provider = datasets_provider_for(SimpleNamespace(**given), lambda num_samples: None)
        try:
            train, *_ = provider((3, 0, 0))
            said.append(f"{None if train is None else len(train)} samples")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def averaged_loss(dims: dict[str, Any], reference: str) -> list[int]:
    """Warnings of a step whose loss is the mean over each micro-batch, and of one of shares."""
    calls = Calls(dims, reference, "fewer")

    def mean(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        log_probs = torch.cat(response_log_probs(logits, row))
        weights = torch.cat(row["loss_masks"]).to(log_probs)
        return -(log_probs * weights).sum() / weights.sum().clamp(min=1), {}

    counts = []
    for loss in (mean, packed_objective):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls.train(loss)
        told = [w.filename for w in caught if "never reads the step's totals" in str(w.message)]
        assert all(name.endswith("wrong_calls.py") for name in told)  # which calls `train_step`
        counts.append(len(told))
    return counts


def gathered_logits(dims: dict[str, Any], reference: str) -> list[str]:
    """Errors where a script gathers the vocabulary before it asks for log-probabilities."""
    calls = Calls(dims, reference, "uneven")
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
    calls = Calls(dims, reference, "uneven")
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
                dynamic_batch_forward_only_max_tokens_per_gpu=9,
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
