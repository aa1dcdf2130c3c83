"""Arguments that the planner refuses: calls and the errors that they raise, by class and text."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import Field, FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from refusals import rows

from mcore_batching import planning
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    clock,
    local,
    plan_batch,
    plan_step,
)
from mcore_batching.planning.config import CHOICES
from mcore_batching.planning.costs import layers_of
from mcore_batching.planning.errors import named, shortened
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.planning.plans.memory import ModelShape
from mcore_batching.planning.schedule import Schedule

COSTS = CostModel(linear=2.0, quadratic=0.5, per_micro_batch=3.0, backward_ratio=1.5, window=7)
NAMES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
MODEL = dict.fromkeys((*NAMES, "vocab_size"), 4)
CAP_10 = PlannerConfig(max_tokens_per_gpu=10)
ONE = ParallelDims()
ARGUMENTS = {"config", "cost_model", "forward_only", "forest"}


def config(**options: Any) -> PlannerConfig:
    return replace(CAP_10, **options)


def plan(lengths: Any = (3, 4), dims: Any = ONE, **options: Any) -> object:
    """A plan of one step; options are arguments of `plan_step` or of the planner's config."""
    own = {name: options.pop(name) for name in ARGUMENTS & {*options}}
    return plan_step(lengths, dims, **{"config": config(**options)} | own)


def batch(lengths: Any = (3, 4), **options: Any) -> object:
    return plan_batch(lengths, ONE, CAP_10, **options)


def schedule(forward_only: bool, *, interleaved: bool) -> Schedule:
    chunks, group = (2, 6) if interleaved else (1, None)
    dims = ParallelDims(pipeline_parallel=4, virtual_pipeline=chunks, microbatch_group_size=group)
    return Schedule(dims=dims, forward_only=forward_only)


def shape(**changes: Any) -> ModelShape:
    """The shape in a model's config with these sizes."""
    return ModelShape.of(layers_of.config_of_json(json.dumps(MODEL | changes)))


def costs(layers: object, *each: object) -> CostModel:
    return CostModel(layers=layers, layer_costs=each)  # type: ignore[arg-type]


COST = "must be a number from 0 to 1e+100, got"
DEEP = ParallelDims(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
SECOND = plan_batch([5, 9, 3, 7], ONE, CAP_10, samples_per_step=2).steps[1]
FOREST = forest_of_groups([5] * 4, [4] * 4, "abcd")


@pytest.mark.parametrize(
    ("call", "error", "text"), rows(__file__, math, planning, clock, local, layers_of, globals())
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert type(caught.value) is error
    sample = re.search(r"(?:sample|step) (\d) (?:has|must)", str(caught.value))
    assert getattr(caught.value, "index", None) == (int(sample[1]) if sample else None)


OPTIONS = [
    *((ParallelDims, each) for each in fields(ParallelDims)),
    *((PlannerConfig, each) for each in fields(PlannerConfig)),
    *((CostModel, each) for each in fields(CostModel) if "layer" not in each.name),
]
# Errors cut texts that are long once escaped, as of many rare characters.
TEXTS = st.text("auto 15é", max_size=9)
VALUES = st.none() | st.booleans() | st.integers(-99, 0) | st.floats() | TEXTS


@given(st.sampled_from(OPTIONS), VALUES)
def test_options_of_another_type_or_out_of_range_are_refused_by_name(
    option: tuple[type, Field[Any]], value: Any
) -> None:
    kind, field = option
    name, choices = named(field.name), CHOICES.get(field.name)
    if field.type == "bool":
        assume(type(value) is not bool)
        message = f"{name} must be True or False, got {value!r}"
    elif choices:
        assume(value not in choices)
        message = f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
    elif field.type == "float":
        is_number = type(value) in (int, float)
        assume(not (is_number and 0 <= value <= 1e100))
        message = f"{name} {COST} {value!r}"
    elif type(value) is int:
        message = f"{name} must be 1 or more, got {value}; increase {name}"
    else:
        assume(value is not None or field.type == "int")
        found = f"{value!r} ({type(value).__name__})"
        message = f"{name} must be an integer, got {found}; set 1 or more"
    given_ = {"max_tokens_per_gpu": 10} if kind is PlannerConfig else {}
    with pytest.raises(ParallelDimsError if kind is ParallelDims else ConfigError) as caught:
        kind(**given_ | {field.name: value})
    assert str(caught.value) == message


def test_what_lies_just_beside_is_taken() -> None:
    dims = ParallelDims(data_parallel=3, context_parallel=2)
    for legal in (None, 1, 2, 4, 6):
        config(max_context_parallel=legal).check_max_context_parallel(dims)
    for sizes in ({"data_parallel": 3}, {"context_parallel": 3}, {"tensor_parallel": 6}):
        assert ParallelDims(**sizes, expert_parallel=3).expert_parallel == 3
    plan([3, 3, 3, 3], plan_effort=10**8, balance="cost")
    plan([1, 2], DEEP, max_tokens_per_gpu=8, pad_total_to=16)


def test_arrays_of_other_libraries_are_read_as_integers_and_not_as_booleans() -> None:
    numpy, torch = map(pytest.importorskip, ("numpy", "torch"))
    for make in (numpy.array, torch.tensor):
        with pytest.raises(LengthError, match="length of sample 0 must be an integer"):
            plan(make([True, False]))
        assert plan(make([3, 4])) == plan([3, 4])
    with pytest.raises(
        ConfigError,
        match=r"fill \(--dynamic-batch-fill\) must be one of 'split', 'placeholder', got array",
    ):
        config(fill=numpy.array(["split", "pad"]))
    dims, settings = ParallelDims(data_parallel=numpy.int64(2)), config(plan_effort=numpy.int32(9))
    assert type(dims.data_parallel) is type(settings.plan_effort) is int


def test_a_search_that_would_take_hours_is_refused_before_any_step_is_planned() -> None:
    planned: list[int] = []
    with pytest.raises(ConfigError, match="for 3 samples in a step"):
        plan_batch(
            [3] * 4,
            ONE,
            config(plan_effort=10**8),
            groups=[0, 1, 1, 1],
            groups_per_step=1,
            on_step=lambda step, _: planned.append(step),
        )
    assert not planned


@pytest.mark.parametrize(
    "value",
    [ParallelDims(data_parallel=2), config(), CostModel(linear=2), SECOND],
)
def test_options_and_plans_are_frozen_hashable_and_picklable(value: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, 5)
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_a_long_list_is_cut_in_a_message() -> None:
    assert shortened(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert shortened(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
