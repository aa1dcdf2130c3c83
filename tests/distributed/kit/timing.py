"""A job that times the parts of a step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from kit.exactness import arguments, counted_tokens, log_probs_of
from kit.model import adam, named_parameters, quick_model, transformer_config
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.batch import sample_mean, token_mean
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job.failure_watch import NO_WATCH
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.megatron.step.prepare import prepare
from mcore_batching.planning import ParallelDims


def rollouts(num_samples: int, median_tokens: int, seed: int) -> dict[str, list[Any]]:
    """Random samples of log-normal length (σ 1), half of each a response."""
    generator = random.Random(seed)
    totals = [
        max(2, min(8 * median_tokens, round(median_tokens * generator.lognormvariate(0, 1))))
        for _ in range(num_samples)
    ]
    responses = [total // 2 for total in totals]
    return {
        "tokens": [torch.randint(VOCABULARY, (total,)) for total in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "advantages": [torch.rand(response) - 0.5 for response in responses],
        "rollout_log_probs": [torch.full((response,), -4.0) for response in responses],
        "ref_log_probs": [torch.full((response,), -4.0) for response in responses],
    }


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """The time in which the failure watch is out of the way: its thread waits for an event."""
    consensus = job_of().consensus
    watch, consensus.watch = consensus.watch, NO_WATCH
    try:
        yield
    finally:
        consensus.watch = watch


def step_share(
    dims: dict[str, Any], hidden_size: int, num_samples: int, median_tokens: int, repeats: int
) -> list[dict[str, float]]:
    """Seconds of planning, collating, the forward-only pass and the training step, each repeat.

    Planning and collating include the collectives in which ranks compare notes. The training step
    is taken twice, with and without the failure watch, in turns which of them first.
    """
    shape = ParallelDims(**dims)
    settings = {"hidden_size": hidden_size, "ffn_hidden_size": 4 * hidden_size}
    config = transformer_config("dense", **pipeline_config(shape), **settings)
    model = build_model(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=8 * median_tokens,
    )
    optimizer = adam(model, distributed=False)
    args = arguments(shape, max_tokens_per_gpu=8 * median_tokens)
    timed = []
    for repeat in range(repeats + 1):
        seed = 1000 * repeat + parallel_state.get_data_parallel_rank()
        data = rollouts(num_samples // shape.data_parallel, median_tokens, seed)
        torch.distributed.barrier()
        times = [time.perf_counter()]
        iterators, counts = get_data_iterator(args, model, data)
        times.append(time.perf_counter())
        # Done once more inside each of the two passes below.
        prepare(job_of(args), model, "timing", 0, lambda planned=iterators: schedule_of(planned))
        times.append(time.perf_counter())
        forward_only(log_probs_of, args, model, iterators, counts)
        times.append(time.perf_counter())
        steps = ["train_step", "train_step, unwatched"]
        for name in reversed(steps) if repeat % 2 else steps:
            with unwatched() if name != "train_step" else contextlib.nullcontext():
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            times.append(time.perf_counter())
        names = ["plan", "collate", "forward_only", *steps[:: -1 if repeat % 2 else 1]]
        timed.append(dict(zip(names, (b - a for a, b in itertools.pairwise(times)), strict=True)))
    return timed[1:]  # the first repeat warms up


def planned_rollouts(
    dims: dict[str, Any], planner: dict[str, Any], steps: int, a_step: int, first_step: float
) -> dict[str, list[list[float]]]:
    """Seconds of `get_data_iterator` on rollouts of several steps, and of the wait for later ones.

    Args:
        dims: of the job.
        planner: flags.
        steps: of a rollout.
        a_step: samples, over all ranks.
        first_step: seconds that its devices take: the main thread sleeps.

    Returns:
        by way ("ahead", "not ahead"), of each of three rollouts: the call; the wait.
    """
    shape = ParallelDims(**dims)
    model = quick_model(shape, 1024)
    found: dict[str, list[list[float]]] = {"not ahead": [], "ahead": []}
    for rollout in range(3):
        for way, timed in found.items():
            args = arguments(
                shape,
                max_tokens_per_gpu=1024,
                global_batch_size=a_step,
                dynamic_batch_no_plan_ahead=way == "not ahead",
                **planner,
            )
            seed = 1000 * rollout + parallel_state.get_data_parallel_rank()
            data = rollouts(steps * a_step // shape.data_parallel, 128, seed)
            torch.distributed.barrier()
            times = [time.perf_counter()]
            iterators, _ = get_data_iterator(args, model, data)
            times.append(time.perf_counter())
            time.sleep(first_step)
            times.append(time.perf_counter())
            schedule_of(iterators)
            times.append(time.perf_counter())
            timed.append([times[1] - times[0], times[3] - times[2]])
    return found


def shared_prefixes(
    trajectories: list[list[tuple[int, int]]], max_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Training steps on turns apart, in shared segments, and merged into a sample a trajectory.

    Args:
        trajectories: prompt and response tokens of each turn.
        max_tokens: of a micro-batch.
        repeats: of each step, in turns.

    Returns:
        by way ``samples``, ``tokens`` that the model got, ``micro_batches``, ``seconds`` of
        processor time of each step, and for the ``sample`` and the ``token`` mean how far the
        gradient is from that of turns apart, over its norm, and the cosine between the two.
    """
    model = build_model(
        transformer_config("dense", hidden_size=64, ffn_hidden_size=256),
        vocab_size=VOCABULARY,
        max_sequence_length=max_tokens,
    )
    before = [parameter.detach().clone() for _, parameter in named_parameters(model)]
    apart, merged = _turns(trajectories)
    ways = {"apart": (apart, False), "shared": (apart, True), "merged": (merged, False)}
    means = {"sample": sample_mean, "token": token_mean}
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
    gradients: dict[str, torch.Tensor] = {}
    for mean in ("token", *["sample"] * repeats):
        for way, (data, shares) in ways.items():
            args = arguments(
                ParallelDims(),
                max_tokens_per_gpu=max_tokens,
                dynamic_batch_share_prefixes=shares,
            )
            iterators, counts = get_data_iterator(args, model, data)
            optimizer = adam(model, distributed=False)
            loss = functools.partial(_policy_loss, mean=means[mean])
            with counted_tokens(model) as seen:
                started = time.process_time()
                done = train_step(loss, args, model, iterators, counts, optimizer)
                seconds = time.process_time() - started
            assert done.grad_norm is not None
            # Clipped to a norm of 1.
            flat = [parameter.main_grad.flatten() for _, parameter in named_parameters(model)]
            gradients[way] = torch.cat(flat) * max(1.0, done.grad_norm)
            with torch.no_grad():
                for (_, parameter), value in zip(named_parameters(model), before, strict=True):
                    parameter.copy_(value)
            own, reference = gradients[way], gradients["apart"]
            found[way] |= {
                mean: (
                    float((own - reference).norm() / reference.norm()),
                    float(torch.cosine_similarity(own, reference, dim=0)),
                ),
                "samples": len(data["tokens"]),
                "tokens": sum(seen),
                "micro_batches": counts[0],
            }
            if mean == "sample":
                found[way]["seconds"].append(seconds)
    return found


def _turns(trajectories: list[list[tuple[int, int]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples with random advantages, one for each turn; the same merged, one a trajectory."""
    names = ("tokens", "total_lengths", "response_lengths", "loss_masks", "advantages")
    apart, merged = ({name: [] for name in names} for _ in range(2))

    def add(data: dict[str, list[Any]], *values: Any) -> None:
        tokens, mask, advantages = values
        both = (tokens, len(tokens), len(mask), mask, advantages)
        for name, value in zip(names, both, strict=True):
            data[name].append(value)

    for turns in trajectories:
        whole = torch.randint(VOCABULARY, (max(map(sum, turns)),))
        first = turns[0][0]
        masks, advantages = torch.zeros(2, len(whole) - first)
        for prompt, response in turns:
            place = slice(prompt - first, prompt - first + response)
            masks[place], advantages[place] = 1.0, torch.rand(1) - 0.5
            end = prompt + response
            add(apart, whole[:end].clone(), masks[place].clone(), advantages[place].clone())
        add(merged, whole, masks, advantages)
    return apart, merged


def _policy_loss(logits: torch.Tensor, row: Any, totals: Any, mean: Any) -> Any:
    log_probs = response_log_probs(logits, row)
    values = [-a.to(p) * p for a, p in zip(row["advantages"], log_probs, strict=True)]
    return mean(values, row, totals), {}
