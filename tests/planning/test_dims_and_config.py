"""`ParallelDims`, `PlannerConfig`, `CostModel`: values, rules, texts of their refusals."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import dims_list, examples, least_count, megatron_runs

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    plan_step,
)
from mcore_batching.planning.config import CHOICES
from mcore_batching.planning.errors import named


@examples(1000)
@given(dims_list(), st.integers(0, 60))
def test_count_is_legal_for_megatron_and_the_least_not_below(
    dims: ParallelDims, count: int
) -> None:
    rounded = dims.round_up_num_microbatches(count)
    assert rounded == least_count(count, dims)
    assert dims.is_legal_num_microbatches(count) == megatron_runs(count, dims)


def test_experts_are_spread_over_all_ranks_of_a_stage() -> None:
    for sizes in ({"data_parallel": 3}, {"context_parallel": 3}, {"tensor_parallel": 6}):
        assert ParallelDims(**sizes, expert_parallel=3).expert_parallel == 3


OPTIONS = [
    *((ParallelDims, each) for each in dataclasses.fields(ParallelDims)),
    *((PlannerConfig, each) for each in dataclasses.fields(PlannerConfig)),
]
# Errors cut texts that are long once escaped, as of many rare characters.
TEXTS = st.text("auto 15é", max_size=9)
VALUES = st.none() | st.booleans() | st.integers(-99, 0) | st.floats() | TEXTS


@given(st.sampled_from(OPTIONS), VALUES)
def test_options_of_another_type_or_out_of_range_are_refused_by_name(
    option: tuple[type, dataclasses.Field[Any]], value: Any
) -> None:
    kind, field = option
    name, choices = named(field.name), CHOICES.get(field.name)
    if field.type == "bool":
        assume(type(value) is not bool)
        message = f"{name} must be True or False, got {value!r}"
    elif choices:
        assume(value not in choices)
        message = f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
    elif type(value) is int:
        message = f"{name} must be 1 or more, got {value}; increase {name}"
    else:
        assume(value is not None or field.type == "int")
        found = f"{value!r} ({type(value).__name__})"
        message = f"{name} must be an integer, got {found}; set 1 or more"
    given_ = {"max_tokens_per_gpu": 10} if kind is PlannerConfig else {}
    with pytest.raises(ConfigError if given_ else ParallelDimsError) as caught:
        kind(**given_ | {field.name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"virtual_pipeline": 2},
            "virtual_pipeline=2 (--vpp 2) needs more than one pipeline stage; "
            "set pipeline_parallel (--pp) to 2 or more, or virtual_pipeline=1 (--vpp 1)",
        ),
        (
            {"virtual_pipeline": 2, "pipeline_parallel": 4, "microbatch_group_size": 3},
            "microbatch_group_size (--microbatch-group-size) must be at least "
            "pipeline_parallel=4 (--pp 4), got 3; increase it, or "
            "leave it out",
        ),
        (
            {"data_parallel": 2, "expert_parallel": 3},
            "expert_parallel (--ep) must divide the 2 ranks of a pipeline stage, got 3; "
            "set a divisor, or data_parallel (--dp) to a multiple",
        ),
        (
            {"data_parallel": 10**12, "pipeline_parallel": 2},
            "2000000000000 ranks are more than 131072; decrease data_parallel (--dp) or "
            "pipeline_parallel (--pp)",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 10**6},
            "virtual_pipeline (--vpp) must be at most 512, got 1000000",
        ),
        (
            {"pipeline_parallel": 2000},
            "pipeline_parallel (--pp) must be at most 1024, got 2000",
        ),
        (
            {"data_parallel": 8, "microbatch_group_size": 10**6},
            "microbatch_group_size (--microbatch-group-size) must be at most 16384, got 1000000",
        ),
    ],
)
def test_dims_refuses(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(**sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ParallelDimsError, match="num_microbatches must be"):
        ParallelDims().round_up_num_microbatches(count)


@pytest.mark.parametrize(
    ("most", "ranks", "instead"),
    [(3, 6, 2), (5, 6, 4), (8, 6, 4), (7, 6, 4), (9, 6, 4), (3, 8, 2), (16, 8, 8)],
)
def test_most_ranks_of_a_row_are_a_power_of_two_or_all(most: int, ranks: int, instead: int) -> None:
    dims = ParallelDims(data_parallel=ranks // 2, context_parallel=2)
    for legal in (None, 1, 2, 4, ranks):
        PlannerConfig(max_tokens_per_gpu=10, max_context_parallel=legal).check_max_context_parallel(
            dims
        )
    with pytest.raises(ConfigError) as caught:
        plan_step([3], dims, PlannerConfig(max_tokens_per_gpu=10, max_context_parallel=most))
    assert str(caught.value) == (
        f"max_context_parallel (--dynamic-batch-context-parallel) must be a power of two or all "
        f"{ranks} ranks, got {most}; set "
        f"max_context_parallel (--dynamic-batch-context-parallel) to {instead}"
    )


def test_numpys_integers_are_stored_as_int_and_its_arrays_refused() -> None:
    numpy = pytest.importorskip("numpy", reason="NumPy integers need NumPy")
    with pytest.raises(
        ConfigError,
        match=r"fill \(--dynamic-batch-fill\) must be one of 'split', 'placeholder', got array",
    ):
        PlannerConfig(max_tokens_per_gpu=10, fill=numpy.array(["split", "pad"]))
    dims = ParallelDims(data_parallel=numpy.int64(2))
    config = PlannerConfig(max_tokens_per_gpu=numpy.int32(10))
    assert type(dims.data_parallel) is type(config.max_tokens_per_gpu) is int
    lengths = numpy.array([6, 4, 3, 9, 2, 14])
    assert plan_step(lengths, dims, config) == plan_step(lengths.tolist(), dims, config)


@pytest.mark.parametrize(
    "value",
    [ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=3), CostModel(linear=2)],
)
def test_options_are_frozen_hashable_and_picklable(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 5)
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_cost_of_samples_and_micro_batches() -> None:
    model = CostModel()
    assert model.sample(0) == 0
    assert model.sample(24576) == 2 * 24576
    assert model.micro_batch([]) == 256
    assert model.micro_batch([24576, 12288]) == 256 + 2 * 24576 + 12288 * 1.5
    assert model.backward_ratio == 2
    assert CostModel(linear=2, quadratic=3, per_micro_batch=5).micro_batch([1, 10]) == 330
    model = CostModel(quadratic=1.0, window=4, beyond_window=0.25)
    assert [model.sample(length) for length in (2, 6)] == [2 + 4, 6 + 36 - 0.75 * 4]
    shared = CostModel().on_ranks(3)
    assert shared.linear == pytest.approx(1.1**2 / 3)
    assert shared.per_micro_batch == 256 + 2 * 64


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linear", -1.0, "got -1.0"),
        ("quadratic", float("nan"), "got nan"),
        ("per_micro_batch", float("inf"), "got inf"),
        ("linear", 1e308, "got 1e+308"),
        ("backward_ratio", "2", "got '2'"),
        ("linear", True, "got True"),
    ],
)
def test_cost_model_refuses(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel(**{name: value})
    assert str(caught.value) == f"{name} must be a number from 0 to 1e+100, {message}"


@pytest.mark.parametrize(
    "costs",
    [
        {"layers": "ab", "layer_costs": (("a", 1.0, 1.0, 1.0, 1.0),)},
        {"layers": 3},
        {"layers": "a", "layer_costs": (("a", 1.0, 1.0, 1.0),)},
        {"layers": "a", "layer_costs": (("a", 1.0, 1.0, 1.0, -1.0),)},
        {"layers": "a", "layer_costs": (("a", 1.0, 1.0, 1.0, float("nan")),)},
        {"layers": "a", "layer_costs": (("a", 1.0, 1.0, 1.0, 1e101),)},
        {"layers": "a", "layer_costs": (("a", "x", 1.0, 1.0, 1.0),)},
        {"layers": "a", "layer_costs": [["a", 10**400, 0, 0, 0]]},
        {"layers": "a", "layer_costs": [["a", 1, 1, 1], ["b", 1, 1, 1, 1, 1]]},
        {"layers": "a", "layer_costs": 7},
    ],
)
def test_costs_of_layers_are_four_numbers_of_each_letter(costs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="layer_costs must have four numbers of 0 or more for ea"):
        CostModel(**costs)


def test_what_lies_beyond_a_window_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"beyond_window must be 1 or less, got 1\.5"):
        CostModel(window=4, beyond_window=1.5)


COSTS = CostModel(linear=2.0, quadratic=0.5, per_micro_batch=3.0, backward_ratio=1.5, window=7)


def test_cost_model_round_trip_with_and_without_what_a_record_notes() -> None:
    assert CostModel.from_json(COSTS.to_json()) == COSTS
    assert CostModel.from_json("\ufeff" + COSTS.to_json()) == COSTS
    document = json.loads(COSTS.to_json()) | {"seconds_per_unit": 1e-6}
    document |= {"weight_share": 0.8, "split_backward_overhead": 0.1}  # of an earlier release
    assert CostModel.from_json(json.dumps(document)) == COSTS
    del document["window"]
    assert CostModel.from_json(json.dumps(document)) == dataclasses.replace(COSTS, window=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "expected a cost model in JSON: "),
        ("[" * 100_000, "expected a cost model in JSON: "),
        (
            "{}",
            "expected a JSON object with backward_ratio, linear, per_micro_batch, quadratic, "
            "got '{}'; take the cost_model.json that a job records",
        ),
        ('{"linear": 1.0}', "expected a JSON object with backward_ratio, linear"),
        ("[1]", "expected a cost model in JSON: a JSON object, got '[1]'"),
        (
            COSTS.to_json().replace("2.0", "1" + "0" * 400),
            "linear must be a number from 0 to 1e+100, got 1000",
        ),
    ],
)
def test_cost_model_in_json_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel.from_json(text)
    assert message in str(caught.value)
