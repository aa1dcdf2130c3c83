"""A job of many tiny optimizer steps, which looks every so often at what a process holds on to."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from kit.exactness import arguments, log_probs_of
from kit.model import adam, transformer_config
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.megatron import add_fields, forward_only, get_data_iterator, train_step
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.planning import ParallelDims

FORWARD_ONLY_EVERY = 5
MOST_SAMPLES = 2
MOST_TOKENS = 8


def soak(
    dims: dict[str, Any], steps: int, every: int, seed: int, minutes: float
) -> list[dict[str, int]]:
    """Train on random samples, none on some ranks in some steps.

    Args:
        dims: of the job.
        steps: optimizer steps.
        every: steps between two looks.
        seed: of the samples.
        minutes: after which it stops short.

    Returns:
        what `held` saw at step 0 and after every ``every`` steps, with the ``step`` and how many
        steps this rank had no samples in (``empty``).
    """
    shape = ParallelDims(**dims)
    config = transformer_config(
        "dense",
        **pipeline_config(shape)
        | {
            "num_layers": shape.pipeline_parallel,
            "hidden_size": 16,
            "ffn_hidden_size": 16,
            "num_attention_heads": 2,
        },
    )
    model = build_model(config, vocab_size=VOCABULARY, max_sequence_length=MOST_TOKENS)
    optimizer = adam(model, distributed=False)
    args = arguments(shape, max_tokens_per_gpu=2 * MOST_TOKENS)
    generator = random.Random(f"{seed}, {parallel_state.get_data_parallel_rank()}")
    gc.collect()
    gc.freeze()  # else every look goes over all modules
    looks = [{"step": 0, "empty": 0} | held()]
    empty = 0
    began = time.monotonic()
    for step in range(1, steps + 1):
        data = _samples(generator)
        empty += not data["tokens"]
        iterators, counts = get_data_iterator(args, model, data)
        if step % FORWARD_ONLY_EVERY == 0:
            outputs = forward_only(log_probs_of, args, model, iterators, counts, "ref_")
            add_fields(iterators, outputs)
        for number in range(len(counts)):
            result = train_step(
                packed_objective, args, model, iterators, counts, optimizer, step=number
            )
            assert result.update_successful
        if step % every == 0:
            looks.append({"step": step, "empty": empty} | held())
            seconds = torch.tensor(time.monotonic() - began)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if seconds > 60 * minutes:
                break
    return looks


def _samples(generator: random.Random) -> dict[str, list[Any]]:
    totals = [generator.randint(1, MOST_TOKENS) for _ in range(generator.randint(0, MOST_SAMPLES))]
    responses = [generator.randint(0, total) for total in totals]
    return {
        "tokens": [torch.randint(VOCABULARY, (total,)) for total in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "advantages": [torch.rand(response) - 0.5 for response in responses],
        "rollout_log_probs": [torch.full((response,), -4.0) for response in responses],
        "ref_log_probs": [torch.full((response,), -4.0) for response in responses],
    }


def held() -> dict[str, int]:
    """Resident bytes, open descriptors, threads, Python objects, and entries of our caches."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is free already counts as resident
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        # Those of gloo and of PyTorch, too, of which `threading` knows nothing.
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "cached": _cached_entries(),
    }


def _cached_entries() -> int:
    """Entries of the package's memoised functions and of what its modules keep."""
    count = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("mcore_batching"):
            continue
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                count += value.cache_info().currsize
            elif isinstance(value, Collection) and not isinstance(
                value, str | bytes | torch.Tensor
            ):
                count += len(value)
    return count
