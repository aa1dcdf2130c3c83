"""Runs a job drawn at random through the engine, and compares all it gives with the reference."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from bootstrap import initialize_model_parallel
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer import multi_latent_attention as latent
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kit.blocking_p2p import blocking_p2p
from kit.model import ROUTING
from kit.random_comparison import Comparison
from kit.random_reference import RandomReference
from kit.random_run import RandomRun, Samples
from kit.samples import ALLOWED, VOCABULARY, multimodal_positions, rollout_of
from kit.shared_rows import mixed_sizes
from kit.worker import release_groups
from kit.workers import FAULTS, is_planning_rank, worker_with
from mcore_batching.megatron import CollectiveError, PipelineFailedError, compat, cpu_emulation
from mcore_batching.planning import MCoreBatchingError, ParallelDims

REFUSAL = "DynamicBatchArgumentError"
"""Of settings, alone or beside the samples that there are."""


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Run a drawn job, and the reference of it on the first rank.

    Returns:
        ``refused``, by what error; or ``failed``, likewise; or ``not built``, why not; or
        ``differences``: of how many times what rounding may make of it each value was off, the
        largest under each name; ``wrong``: what had to be equal and was not; ``gap``: the smallest
        by which a router chose its experts; ``counts`` of slots.
    """
    if why := _why_not_built(job["model"]):
        return {"not built": why}
    with _layout(ParallelDims(data_parallel=job["nproc"])):
        reference = RandomReference(job) if dist.get_rank() == 0 else None
        weights = _from_first(lambda: reference and reference.weights)
    rollouts = [_samples(job, number) for number in range(len(job["rollouts"]))]
    shape = ParallelDims(**job["dims"])
    with _layout(shape):
        run = RandomRun(job, shape, weights)
        try:
            with contextlib.ExitStack() as conditions:
                conditions.enter_context(_clock(job))
                if job["blocking"]:
                    conditions.enter_context(blocking_p2p())
                shapes = conditions.enter_context(_exchanged_shapes())
                planned = conditions.enter_context(worker_with(job["worker"]))
                if job["mixed_sizes"]:
                    conditions.enter_context(mixed_sizes())
                for number, samples in enumerate(rollouts):
                    run.train(samples, job["rollouts"][number])
        except PipelineFailedError:
            raise  # nothing communicates any more
        except (CollectiveError, MCoreBatchingError):  # on every rank
            said = traceback.format_exc()[-3000:]
            return {"refused" if REFUSAL in said else "failed": said}
    with _layout(ParallelDims(data_parallel=job["nproc"])):
        rows = _all_ranks([each["rows"] for each in run.seen])
        made = _from_first(
            lambda: reference and _reference_of(job, reference, rollouts, run.seen, rows)
        )
    compared = Comparison(job, rollouts, run.seen, rows, made["made"])
    exchanged = job["planner"]["dynamic_batch_no_planned_shapes"] and shape.pipeline_parallel > 1
    if bool(shapes) != exchanged:
        compared.wrong.append(f"stages exchange {len(shapes)} shapes")
    compared.wrong += _wrong_with_worker(job["worker"], planned, run.seen) + run.wrong_records()
    return {
        "differences": compared.differences,
        "wrong": compared.wrong,
        "gap": made["gap"],
        "counts": [event.get("slots") for event in run.seen],
    }


def _why_not_built(model: dict[str, Any]) -> str:
    """What this version of Megatron lacks for a model; "": nothing."""
    settings = model["settings"]
    if model["kind"] == "mla" and latent.HAVE_TE and not isinstance(latent.TELinear, type):
        return "0.16 makes no such layers without Transformer Engine"
    if settings.get("mtp_num_layers") and not compat.modules_with_multi_token_losses():
        return "0.16 runs no multi-token prediction on packed rows"
    if "hybrid_layer_pattern" in model["options"] and not compat.has_hybrid_model():
        return "HybridModel is there from 0.18 on"
    is_known = settings.keys() <= TransformerConfig.__dataclass_fields__.keys()
    return "" if is_known else "a setting of later versions"


@contextlib.contextmanager
def _exchanged_shapes() -> Iterator[list[Tensor]]:
    """Shapes that this rank sends and receives meanwhile: integers, as hidden states are not.

    Megatron posts them in batches, hidden states in batches or one by one.
    """
    shapes: list[Tensor] = []
    batch, one_by_one = dist.batch_isend_irecv, p2p_communication._p2p_ops

    def batched(operations: list[dist.P2POp]) -> Any:
        shapes.extend(each.tensor for each in operations if not each.tensor.is_floating_point())
        return batch(operations)

    def posted(**options: Any) -> Any:
        tensors = [v for n, v in options.items() if n.startswith("tensor_") and v is not None]
        shapes.extend(each for each in tensors if not each.is_floating_point())
        return one_by_one(**options)

    with (
        mock.patch.object(dist, "batch_isend_irecv", batched),
        mock.patch.object(p2p_communication, "_p2p_ops", posted),
    ):
        yield shapes


@contextlib.contextmanager
def _layout(dims: ParallelDims) -> Iterator[None]:
    """Megatron's groups for these dims."""
    initialize_model_parallel(dims, timeout_seconds=60.0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        _forget_losses_of_experts()
        release_groups()


def _wrong_with_worker(
    fault: str | None, planned: Mapping[str, Any], seen: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What is said where later steps' plans come late or not at all, by the rank that plans."""
    if not is_planning_rank():
        return [f"planned here: {planned}"] if any(planned.values()) else []
    steps = collections.Counter(event["rollout"] for event in seen if event["kind"] == "step")
    is_lost = fault in FAULTS and max(steps.values(), default=0) > 1
    if is_lost == bool(planned["said"]) and all(
        "the planning worker" in s for s in planned["said"]
    ):
        return []
    return [f"the worker {fault}, and it says {planned['said']}"]


def _from_first(make: Callable[[], Any]) -> Any:
    """What the first rank makes, on all ranks; tensors as arrays, which are unpickled faster."""
    made = [tree_map_only(Tensor, Tensor.numpy, make()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return tree_map_only(np.ndarray, torch.from_numpy, made[0])


def _all_ranks(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _samples(job: Mapping[str, Any], number: int) -> Samples:
    """The samples of a rollout over all ranks, numbered through."""
    stream = f"{job['seed']} turns {number}"
    generator = torch.Generator(device="cpu").manual_seed(1000 * job["seed"] + number)
    uniform = functools.partial(torch.rand, generator=generator, device="cpu")
    lengths = [(total, response) for total, response, _ in job["rollouts"][number]["samples"]]
    entries = ALLOWED if job["banned"] else VOCABULARY
    samples: Samples = rollout_of(lengths, entries, generator)
    samples["sample_indices"] = list(range(len(lengths)))
    masks = {
        "some": lambda response: (uniform(response) > 0.3).int(),
        "all 0": lambda response: torch.full((response,), int(uniform(1) > 0.6)),
        "weights": lambda response: (uniform(response) * 3).floor() / 2,
    }
    if job["loss_masks"] in masks:
        samples["loss_masks"] = [masks[job["loss_masks"]](response) for _, response in lengths]
    if job["objective"]["page"] is not None:  # samples of each lie on any ranks, in any steps
        samples["uids"] = [i % 3 for i in range(len(lengths))]
        samples["trajectory_ids"] = [i % 2 for i in range(len(lengths))]
    if job["fields"]:
        samples["source"] = [float(i) for i in range(len(lengths))]
        samples["image"] = [{"pixels": torch.full((i % 4, 2), i)} for i in range(len(lengths))]
    if job["turns"]:
        _begin_others(samples["tokens"], stream, lengths)
    if job["model"]["options"]["position_embedding_type"] == "mrope":
        samples["position_ids"] = [multimodal_positions(total) for total, _ in lengths]
    if job["model"]["kind"] == "replay":
        layers, experts = job["model"]["settings"]["num_layers"], ROUTING["experts"]
        samples["rollout_routed_experts"] = [
            uniform(max(total - 1, 0), layers, experts)
            .topk(ROUTING["top_k"])
            .indices.to(torch.int16)
            for total, _ in lengths
        ]
        if job["turns"]:
            _begin_others(samples["rollout_routed_experts"], stream, lengths)
    return samples


def _begin_others(values: list[Tensor], stream: str, lengths: Sequence[tuple[int, int]]) -> None:
    """Let some samples begin like another: whole turns of trajectories, and branches at any place,
    within prompts and within responses. By one stream the same samples begin the same others."""
    drawn = random.Random(stream)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i][0])
    for place, turn in enumerate(order):
        total = lengths[turn][0]
        if place and drawn.random() < 0.8:
            begun = values[drawn.choice(order[:place])]
            common = total if drawn.random() < 0.4 else drawn.randint(0, total)
            common = min(common, len(values[turn]))
            values[turn] = torch.cat((begun[:common], values[turn][common:]))


def _reference_of(
    job: Mapping[str, Any],
    reference: RandomReference,
    rollouts: Sequence[Samples],
    seen: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[Sequence[Sequence[int]]]],
) -> dict[str, Any]:
    """The engine's passes and steps again, each of the samples that the engine's holds."""
    made: list[Any] = []
    given: dict[int, Samples] = {}
    for event, of_ranks in zip(seen, zip(*rows, strict=True), strict=True):
        number = event["rollout"]
        samples = rollouts[number]
        if event["kind"] == "step":
            # Ranks of a row, and stages, hold the same one.
            distinct = {tuple(row) for of_rank in of_ranks for row in of_rank}
            made.append(reference.step(given[number], sorted(distinct)))
            continue
        outputs = reference.outputs(samples, is_trained_next=number not in given)
        made.append(outputs)
        if number not in given:
            behaviour = samples["rollout_log_probs"]
            if job["objective"]["forward_only"] != "none":
                behaviour = [log_probs for log_probs, _ in outputs]
            given[number] = samples | {"behaviour": behaviour}
    return {"made": made, "gap": reference.smallest_gap}


def _forget_losses_of_experts() -> None:
    """Megatron adds them up by layer, of which the next job may have more."""
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # before 0.18
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


@contextlib.contextmanager
def _clock(job: Mapping[str, Any]) -> Iterator[None]:
    """Let passes be timed by a clock that lies, each rank's in its own way."""
    stream = random.Random(f"{job['seed']} clock {dist.get_rank()}")
    speed, offset = 10 ** stream.uniform(-4, 4), stream.uniform(-1e6, 1e6)
    ahead = 0.0

    def noisy() -> float:
        nonlocal ahead
        ahead += stream.lognormvariate(-9, 3)
        return ahead

    clocks: dict[str, Callable[[], float]] = {
        "true": time.perf_counter,
        "skewed": lambda: offset + speed * time.perf_counter(),
        "noisy": noisy,
        "stalled": lambda: 1.0,
        "backwards": lambda: -time.perf_counter(),
        "absurd": lambda: stream.choice([math.nan, math.inf, -math.inf, -1e30, 1e300, 0.0]),
    }
    clock = SimpleNamespace(perf_counter=clocks[job["clock"]])
    with mock.patch.object(cpu_emulation, "time", clock):
        yield
