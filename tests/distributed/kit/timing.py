"""A job that times the parts of a step."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from kit.exactness import arguments, log_probs_of
from kit.model import adam, transformer_config
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
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
    memory = job_of().memory
    connection = memory.connection
    assert connection is not None
    world, consensus, watch = connection
    memory.connection, consensus._watch = (world, consensus, NO_WATCH), NO_WATCH
    try:
        yield
    finally:
        memory.connection, consensus._watch = connection, watch


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
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
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
