"""Rows at the cap as they are made, and what a warm-up gives back of random numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_batching.batch import DEFAULT_SCHEMA, make_placeholder
from mcore_batching.megatron import compat, warm_up
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.warm_up import check_warm_up, rows_at_cap
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig

PP4 = {"pipeline_parallel": 4}
PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}


def schedule_of(
    lengths: list[int], dims: dict[str, int], cap: int = 64, **config: Any
) -> MicroBatchSchedule:
    """One step, a sample a micro-batch."""
    data: dict[str, list[Any]] = {
        "tokens": [torch.full((length,), 7) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": [length // 2 for length in lengths],
    }
    return MicroBatchSchedule(
        rollout_data=data,
        schema=DEFAULT_SCHEMA,
        template=make_placeholder(DEFAULT_SCHEMA, data, data),
        steps=(tuple((i,) for i in range(len(lengths))) or ((),),),
        dims=ParallelDims(data_parallel=2, **dims),
        config=PlannerConfig(max_tokens_per_gpu=cap, **config),
        context_parallel_rank=0,
        pad_token_id=0,
        vocabulary_size=None,
        plan_digest="",
        gather_shards=tuple,
        scope="local",
        cost_model=CostModel(),
    )


@pytest.mark.parametrize(
    ("dims", "config", "tokens"),
    [
        ({}, {}, [64]),
        (PP4, {}, [64] * 4),
        # Two groups of two, of which the first stage holds 5 passes of half its layers at a time.
        (PP2_VPP2, {}, [64] * 4),
        (PP2_VPP2 | {"microbatch_group_size": 3}, {}, [64] * 6),
        ({}, {"pad_total_to": 24}, [48]),
        # 64 + 64 + 64 + 1 tokens at a time, and no more.
        (PP4, {"max_inflight_tokens": 200}, [64, 64, 64, 1]),
        (PP4, {"max_inflight_tokens": 64 + 3}, [64, 1, 1, 1]),
        (PP4, {"max_inflight_tokens": 50, "pad_total_to": 8}, [48, 8, 8, 8]),
        (PP2_VPP2, {"max_inflight_tokens": 5 * 64 // 2 - 1}, [64, 64, 1, 1]),
        ({"context_parallel": 2}, {}, [128 // 2]),
        ({}, {"max_context_parallel": 2}, [64]),
        # Rows on one rank, of which each may hold half of what rows on two may.
        ({"context_parallel": 2}, {"max_context_parallel": 4, "max_inflight_tokens": 80}, [40]),
    ],
)
def test_rows_are_as_many_and_as_long_as_training_may_hold(
    dims: dict[str, int], config: dict[str, Any], tokens: list[int]
) -> None:
    rows = rows_at_cap(schedule_of([5, 20, 9], dims, **config), 0)
    assert [row.tokens.shape[1] for row in rows] == tokens


def test_a_row_repeats_the_longest_sample_that_fits() -> None:
    (row,) = rows_at_cap(schedule_of([5, 20, 70, 9], {}), 0)
    assert row.total_lengths == [20, 20, 20]
    assert row.response_lengths == [10, 10, 10]
    assert row.host_cu_seqlens_padded == (0, 20, 40, 60, 64)
    (row,) = rows_at_cap(schedule_of([5, 20], {}, max_samples_per_row=2), 0)
    assert row.host_cu_seqlens_padded == (0, 20, 40, 64)


@pytest.mark.parametrize("lengths", [[], [70]])
def test_a_rank_without_a_sample_that_fits_has_a_placeholder_as_long(lengths: list[int]) -> None:
    (row,) = rows_at_cap(schedule_of(lengths, {}), 0)
    assert row.is_placeholder
    assert row.host_cu_seqlens_padded == (0, 1, 64)


def test_random_numbers_of_every_kind_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = [torch.get_rng_state()]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: device.append(state))
    tracker, shared = get_cuda_rng_tracker(), torch.Generator("cpu")
    kept = tracker.get_states()
    tracker.set_states({"shared": shared, "own": shared.get_state()})

    def draw() -> list[float]:
        own = torch.Generator("cpu")
        own.set_state(tracker.states_["own"])
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        numbers += [float(torch.rand((), generator=each)) for each in (shared, own)]
        tracker.states_["own"].copy_(own.get_state())
        return numbers

    try:
        with warm_up._same_random_numbers():
            first = draw()
        assert draw() == first
        assert tracker.get_states()["shared"] is shared
        assert device[1:] == [device[0]]
    finally:
        tracker.set_states(kept)


def test_buffers_that_a_module_replaces_are_the_former_ones_again() -> None:
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(3))
    module.register_buffer("replaced", torch.zeros(3))
    module.register_buffer("cast", torch.ones(3, dtype=torch.bfloat16))
    module.register_buffer("absent", None)
    before = dict(module.named_buffers())
    stored = {name: buffer.data_ptr() for name, buffer in before.items()}
    with warm_up._same_buffers([module]):
        module.count += 1
        module.replaced = module.replaced + 1
        module.cast.data = module.cast.data.float() + 1  # as routers do with their biases
    for name, buffer in module.named_buffers():
        assert buffer is before[name]
        assert buffer.data_ptr() == stored[name]
    assert module.count.tolist() == module.replaced.tolist() == [0, 0, 0]
    assert module.cast.dtype == torch.bfloat16
    assert module.cast.tolist() == [1, 1, 1]


def test_what_routers_record_meanwhile_is_forgotten() -> None:
    one = torch.ones(())

    def record(name: str) -> None:
        try:
            from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        except ImportError:
            from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

            save_to_aux_losses_tracker(name, one, 2, 2)
        else:
            get_moe_metrics_tracker().record(name, one, 2, 2)

    def recorded() -> dict[str, list[float]]:
        return {name: compat._values_of(v).tolist() for name, v in compat._moe_metrics().items()}

    compat._moe_metrics().clear()
    try:
        record("before")
        with compat.kept_moe_metrics():
            record("before")
            record("meanwhile")
            assert recorded() == {"before": [0, 2], "meanwhile": [0, 1]}
        assert recorded() == {"before": [0, 1]}
    finally:
        compat._moe_metrics().clear()


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        (
            {"use_dynamic_batch_size": False},
            {},
            "--dynamic-batch-warm-up-at-cap runs rows at a cap: set --use-dynamic-batch-size and "
            "--max-tokens-per-gpu as well, or unset --dynamic-batch-warm-up-at-cap",
        ),
        ({}, {"fp8": "e4m3"}, "FP8 and FP4 modules keep .*: unset --dynamic-batch-warm-up-at-cap"),
        ({}, {"fp4": "e2m1"}, "FP8 and FP4 modules keep .*: unset --dynamic-batch-warm-up-at-cap"),
    ],
)
def test_what_a_warm_up_cannot_run_on_is_refused(
    args: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    model = SimpleNamespace(**{"fp8": None, "fp4": None} | config)
    asked = SimpleNamespace(dynamic_batch_warm_up_at_cap=True, **args)
    with pytest.raises(DynamicBatchArgumentError, match=message):
        check_warm_up(asked, model)
    check_warm_up(SimpleNamespace(**args), model)
    if not config:
        del asked.use_dynamic_batch_size
        check_warm_up(asked, model)
