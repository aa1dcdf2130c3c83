"""Errors of the planner: their texts and their attributes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    plan_batch,
    plan_step,
)
from mcore_batching.planning.errors import shortened

CONFIG = PlannerConfig(max_tokens_per_gpu=10)


@pytest.mark.parametrize(
    ("lengths", "got", "index"),
    [
        ([3, -1], "-1", 1),
        ([3, 4, 2**40 + 1], "1099511627777", 2),
        ([2.0], "2.0", 0),
        ([1, True], "True", 1),
        ([1, 2, "3"], "'3'", 2),
    ],
)
def test_lengths_that_are_none_are_named(lengths: list[Any], got: str, index: int) -> None:
    with pytest.raises(LengthError) as caught:
        plan_step(lengths, ParallelDims(), CONFIG)
    assert str(caught.value) == (
        f"the length of sample {index} must be an integer from 0 to 1099511627776, got {got}; "
        "correct lengths"
    )
    assert caught.value.index == index


@pytest.mark.parametrize("value", [None, 2, "no", [True, False]])
def test_forward_only_is_a_boolean(value: Any) -> None:
    with pytest.raises(ConfigError, match="forward_only must be True or False, got "):
        plan_step([3, 4], ParallelDims(), CONFIG, forward_only=value)


@pytest.mark.parametrize("wrong", [None, 0, "a", CONFIG.max_tokens_per_gpu, {}, ParallelDims])
@pytest.mark.parametrize("name", ["dims", "config", "cost_model"])
def test_arguments_of_another_type_are_named(name: str, wrong: Any) -> None:
    given = {"dims": ParallelDims(), "config": CONFIG, "cost_model": CostModel()}
    if (name, wrong) == ("cost_model", None):
        assert plan_step([3], **given | {name: wrong}) == plan_step([3], **given)
        return
    kind = type(given[name]).__name__
    with pytest.raises(ConfigError) as caught:
        plan_step([3], **given | {name: wrong})
    assert str(caught.value) == f"{name} must be a {kind}, got {wrong!r}; pass {kind}(…)"


@pytest.mark.parametrize("value", [0, -3, 2.0, True])
def test_samples_per_step_is_checked(value: Any) -> None:
    with pytest.raises(LengthError, match=r"samples_per_step \(--samples-per-step\) must be"):
        plan_batch([3, 4], ParallelDims(), CONFIG, samples_per_step=value)


def test_an_oversize_sample_is_named_by_its_index_in_the_batch() -> None:
    strict = PlannerConfig(max_tokens_per_gpu=10, on_oversize="error", pad_total_to=3)
    dims = ParallelDims(data_parallel=2, context_parallel=2)
    lengths = [3, 21, 1, 2, 25, 7]
    for options in ({}, {"samples_per_step": 3}):
        with pytest.raises(OversizeSampleError) as caught:
            plan_batch(lengths, dims, strict, **options)  # type: ignore[arg-type]
        error = caught.value
        assert str(error) == (
            "sample 4 has 25 tokens, 28 after padding, the cap is 20 (and 1 more samples); "
            "set max_tokens_per_gpu (--max-tokens-per-gpu) to 18 or more, or "
            "on_oversize='own-bin' (--dynamic-batch-on-oversize own-bin)"
        )
        assert (error.index, error.length, error.padded_length, error.cap) == (4, 25, 28, 20)


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_boolean_tensors_and_arrays_are_no_lengths(module: str) -> None:
    library = pytest.importorskip(module)
    make = getattr(library, "tensor" if module == "torch" else "array")
    with pytest.raises(LengthError, match="length of sample 0 must be an integer"):
        plan_step(make([True, False]), ParallelDims(), CONFIG)
    assert plan_step(make([3, 4]), ParallelDims(), CONFIG).sample_indices == (0, 1)


@pytest.mark.parametrize(("count", "effort"), [(10**6, 1500), (2, 10**12)])
def test_a_search_that_would_take_hours_is_refused(count: int, effort: int) -> None:
    config = PlannerConfig(max_tokens_per_gpu=10, plan_effort=effort)
    with pytest.raises(ConfigError) as caught:
        plan_step([3] * count, ParallelDims(), config)
    assert str(caught.value) == (
        f"plan_effort={effort} (--dynamic-batch-plan-effort {effort}) is too much for {count} "
        f"samples in a step; set it to {200_000_000 // count}, or set "
        "balance='cost' (--dynamic-batch-balance cost)"
    )


def test_steps_are_searched_one_by_one_and_packing_needs_no_search() -> None:
    config = PlannerConfig(max_tokens_per_gpu=10, plan_effort=10**8)
    with pytest.raises(ConfigError, match="3 samples in a step"):
        plan_batch([3, 3, 3, 3], ParallelDims(), config, samples_per_step=3)
    packed = dataclasses.replace(config, balance="cost")
    assert plan_step([3, 3, 3, 3], ParallelDims(), packed).num_samples == 4


def test_a_long_list_is_cut_in_a_message() -> None:
    assert shortened(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert shortened(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
