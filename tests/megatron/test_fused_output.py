"""Memory of log-probs: the fused output layer's as predicted, no float32 copy of logits otherwise;
options that end with their step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_batching.megatron.log_probs import (
    Options,
    StatisticsOfLogits,
    StatisticsOfProduct,
    _options,
    temperatures_used,
)
from mcore_batching.planning import ParallelDims, PlannerConfig, plan_step, step_statistics
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory

TOKENS, VOCABULARY, HIDDEN = 128, 4096, 256


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[None]:
    """Megatron's, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_what_is_predicted(dtype: torch.dtype) -> None:
    """Activations of the layers before it left out."""
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    places, targets = torch.arange(TOKENS), torch.randint(VOCABULARY, (TOKENS,))
    product, options = cast(Any, StatisticsOfProduct), Options(1.0, TOKENS, with_entropy=True)

    def run() -> None:
        product.apply(hidden * 1, weight, places, targets, options).sum().backward()

    shape = ModelShape(
        layers=1,
        hidden=HIDDEN,
        ffn=1,
        heads=1,
        groups=1,
        head_dim=HIDDEN,
        vocab=VOCABULARY,
        bytes_per_value=dtype.itemsize,
        fused_output=True,
    )
    step = plan_step([TOKENS], ParallelDims(), PlannerConfig(max_tokens_per_gpu=TOKENS))
    predicted = predicted_memory(step_statistics(step, [TOKENS]), step, shape)
    output = predicted.last_stage_bytes - predicted.first_stage_bytes
    found = _peak_bytes(run)
    assert 0.7 * output < found <= output


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_need_no_float32_copy(dtype: torch.dtype) -> None:
    """Logits that nothing else reads: their gradient takes their place."""
    logits = torch.randn(1, TOKENS, VOCABULARY, dtype=dtype, requires_grad=True)
    places, targets = torch.arange(TOKENS), torch.randint(VOCABULARY, (TOKENS,))
    statistics, options = cast(Any, StatisticsOfLogits), Options(1.0, TOKENS // 16, True)

    def run() -> None:
        made = logits * 1
        found = statistics.apply(made, places, targets, options, [None])
        torch.autograd.grad(found.sum(), made)

    of_logits, copy = TOKENS * VOCABULARY * dtype.itemsize, 4 * TOKENS * VOCABULARY
    assert of_logits < _peak_bytes(run) <= of_logits + 0.7 * copy


def test_temperatures_are_of_the_innermost_step() -> None:
    """Also after one that failed inside of another."""
    with temperatures_used() as outer:
        with contextlib.suppress(ZeroDivisionError), temperatures_used() as inner:
            _options(2.0, 1, with_entropy=False)
            raise ZeroDivisionError
        _options(1.0, 1, with_entropy=False)
    _options(0.7, 1, with_entropy=False)
    assert (outer, inner) == ({1.0}, {2.0})


def _peak_bytes(run: Any) -> int:
    """Most memory that is held at once, over that before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    events = cast(Any, profile).profiler.kineto_results.events()
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
