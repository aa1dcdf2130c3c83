"""Arguments that the planner refuses: calls and the errors that they raise, by class and text."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcore_batching import planning
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    MCoreBatchingError,
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
    return dataclasses.replace(CAP_10, **options)


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


LENGTH = "from 0 to 1099511627776, got"
FOUR = "ConfigError: layer_costs must have four numbers of 0 or more for each letter…"
LARGEST = "max_context_parallel (--dynamic-batch-context-parallel)"
TAGS = "LengthError: is_padding needs True or False for each of 2 samples…"
OTHER_FOREST = "LengthError: the forest is of 4 samples, or of other…; make it of these lengths"
UID = "LengthError: the group of sample 1 must be hashable, got…"
ORDER = "LengthError: groups must be a sequence, got…"
HAS_NOT = "LengthError: lengths has 2 entries, but the step runs sample 3…"
COST = "must be a number from 0 to 1e+100, got"
NO_MODEL = "ConfigError: expected a cost model in JSON:"
EFFORT = "set it to {}, or set balance='cost' (--dynamic-batch-balance cost)"
LEAST = (
    "ConfigError: the least micro-batch takes 16 tokens, the cap is 14; set "
    "max_tokens_per_gpu (--max-tokens-per-gpu) to 8 or more, or lower "
    "pad_each_to (--dynamic-batch-pad-each-to) and pad_total_to (--dynamic-batch-pad-total-to)"
)
DEEP = ParallelDims(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
SECOND = plan_batch([5, 9, 3, 7], ONE, CAP_10, samples_per_step=2).steps[1]
FOREST = forest_of_groups([5] * 4, [4] * 4, "abcd")

REFUSALS = {
    "plan([3, -1])": f"LengthError: the length of sample 1 must be an integer {LENGTH} -1; correct "
    "lengths",
    "plan([3, 4, 2**40 + 1])": f"LengthError: … sample 2 … {LENGTH} 1099511627777; correct lengths",
    "plan([2.0])": f"LengthError: … sample 0 … {LENGTH} 2.0; correct lengths",
    "plan([1, True])": f"LengthError: … sample 1 … {LENGTH} True; correct lengths",
    "plan([1, 2, '3'])": f"LengthError: … sample 2 … {LENGTH} '3'; correct lengths",
    **{
        f"plan({name}={wrong})": f"ConfigError: {name} must be a {kind}, got {wrong}; pass "
        f"{kind}(…)"
        for name, kind in (
            ("dims", "ParallelDims"),
            ("config", "PlannerConfig"),
            ("cost_model", "CostModel"),
        )
        for wrong in ("None", "0", "'a'", "10", "{}")
        if (name, wrong) != ("cost_model", "None")
    },
    "plan(dims=ParallelDims)": "ConfigError: dims must be a ParallelDims, got <class…",
    **{
        f"plan(forward_only={value})": "ConfigError: forward_only must be True or False, got…"
        for value in ("None", "2", "'no'", "[True, False]")
    },
    **{
        f"batch(samples_per_step={value})": "LengthError: samples_per_step (--samples-per-step) "
        "must be…"
        for value in ("0", "-3", "2.0", "True")
    },
    # A search that would take hours; each step is searched by itself.
    "plan([3] * 10**6, plan_effort=1500)": "ConfigError: plan_effort=1500 "
    "(--dynamic-batch-plan-effort 1500) is too much for 1000000 samples in a step; "
    + EFFORT.format(200),
    "plan(plan_effort=10**12)": f"ConfigError: … for 2 samples … {EFFORT.format(10**8)}",
    "plan([5] * 4, forest=FOREST, plan_effort=10**9)": "ConfigError: plan_effort…",
    # No room for a token; a placeholder goes on one rank, although two ranks have room for one.
    "plan([], DEEP, max_tokens_per_gpu=7, pad_total_to=16)": LEAST,
    "plan([1, 2], DEEP, max_tokens_per_gpu=7, pad_total_to=16)": LEAST,
    "plan([8], ParallelDims(data_parallel=4), max_tokens_per_gpu=5, max_context_parallel=4, "
    "pad_each_to=8)": "ConfigError: … takes 8 tokens, the cap is 5…",
    # Sizes that no job has.
    "ParallelDims(virtual_pipeline=2)": "ParallelDimsError: virtual_pipeline=2 (--vpp 2) needs "
    "more than one pipeline stage; set pipeline_parallel (--pp) to 2 or more, or "
    "virtual_pipeline=1 (--vpp 1)",
    "ParallelDims(virtual_pipeline=2, pipeline_parallel=4, microbatch_group_size=3)": (
        "ParallelDimsError: microbatch_group_size (--microbatch-group-size) must be at least "
        "pipeline_parallel=4 (--pp 4), got 3; increase it, or leave it out"
    ),
    "ParallelDims(data_parallel=2, expert_parallel=3)": "ParallelDimsError: expert_parallel (--ep) "
    "must divide the 2 ranks of a pipeline stage, got 3; set a divisor, or data_parallel (--dp) "
    "to a multiple",
    "ParallelDims(data_parallel=10**12, pipeline_parallel=2)": "ParallelDimsError: 2000000000000 "
    "ranks are more than 131072; decrease data_parallel (--dp) or pipeline_parallel (--pp)",
    "ParallelDims(pipeline_parallel=2, virtual_pipeline=10**6)": (
        "ParallelDimsError: virtual_pipeline (--vpp) must be at most 512, got 1000000"
    ),
    "ParallelDims(pipeline_parallel=2000)": (
        "ParallelDimsError: pipeline_parallel (--pp) must be at most 1024, got 2000"
    ),
    "ParallelDims(data_parallel=8, microbatch_group_size=10**6)": "ParallelDimsError: "
    "microbatch_group_size (--microbatch-group-size) must be at most 16384, got 1000000",
    **{
        f"ONE.round_up_num_microbatches({count})": "ParallelDimsError: num_microbatches must be…"
        for count in ("-1", "1.5", "True")
    },
    # Counts that no schedule runs.
    **{
        call.format(forward_only): "ParallelDimsError: the schedule cannot run "
        f"{count} micro-batches per rank; set num_microbatches to {legal}"
        for forward_only in (False, True)
        for count, legal, call in (
            (0, 1, "Clock([], schedule({}, interleaved=False))"),
            (0, 1, "schedule({}, interleaved=False).order(0, 0)"),
            (7, 10, "Clock([1.0] * 7, schedule({}, interleaved=True))"),
            (-3, 6, "schedule({}, interleaved=True).order(0, -3)"),
        )
    },
    # The most ranks of a row: a power of two, or all.
    **{
        f"plan([3], ParallelDims(data_parallel={ranks // 2}, context_parallel=2), "
        f"max_context_parallel={most})": f"ConfigError: {LARGEST} must be a power of two or all "
        f"{ranks} ranks, got {most}; set {LARGEST} to {instead}"
        for most, ranks, instead in ((3, 6, 2), (5, 6, 4), (9, 6, 4), (3, 8, 2), (16, 8, 8))
    },
    # Costs.
    "CostModel(linear=1e308)": f"ConfigError: linear {COST} 1e+308",
    "CostModel(window=4, beyond_window=1.5)": "ConfigError: beyond_window must be 1 or less, got "
    "1.5…",
    "costs('ab', ('a', 1, 1, 1, 1))": FOUR,
    "costs('a', ('a', 1, 1, 1))": FOUR,
    "costs('a', ('a', 1, 1, 1, -1))": FOUR,
    "costs('a', ('a', 1, 1, 1, nan))": FOUR,
    "costs('a', ('a', 1, 1, 1, 1e101))": FOUR,
    "costs('a', ('a', 'x', 1, 1, 1))": FOUR,
    "costs('a', ['a', 10**400, 0, 0, 0])": FOUR,
    "costs('a', ['a', 1, 1, 1], ['b', 1, 1, 1, 1, 1])": FOUR,
    "CostModel(layers=3)": FOUR,
    "CostModel(layers='a', layer_costs=7)": FOUR,
    "CostModel.from_json('nonsense')": f"{NO_MODEL} …",
    "CostModel.from_json('[' * 100_000)": f"{NO_MODEL} …",
    "CostModel.from_json('{}')": "ConfigError: expected a JSON object with backward_ratio, linear, "
    "per_micro_batch, quadratic, got '{}'; take the cost_model.json that a job records",
    "CostModel.from_json('{\"linear\": 1.0}')": "ConfigError: expected a JSON object with …",
    "CostModel.from_json('[1]')": f"{NO_MODEL} a JSON object, got '[1]'",
    "CostModel.from_json(COSTS.to_json().replace('2.0', '1' + '0' * 400))": (
        f"ConfigError: linear {COST} 1000…"
    ),
    # Sizes of a model.
    "config_of_json('nonsense')": "ConfigError: expected a model's config.json: …",
    "config_of_json('[7]')": "ConfigError: expected a model's config.json: a JSON object, got "
    "'[7]'",
    "shape(vocab_size=None)": "ConfigError: … has no padded_vocab_size or vocab_size …",
    "shape(vocab_size='x')": "ConfigError: vocab_size must be an integer, got 'x' … set 1 or more",
    "shape(num_key_value_heads=[1])": "ConfigError: num_key_value_heads must be an integer…",
    "shape(num_hidden_layers=0)": "ConfigError: … has no num_layers or … of 1 or more; add it",
    "shape(hidden_size=-4)": "ConfigError: hidden_size must be 1 or more, got -4…",
    **{
        f"first_guess(MODEL | {{'{name}': None}})": f"ConfigError: … has no …{name}… of 1 or more…"
        for name in NAMES
    },
    "first_guess(MODEL | {'hybrid_layer_pattern': 'MX'})": "ConfigError: … has no layers 'X'; …",
    "cost_model('a', {'a': LayerCost()})": "ConfigError: a model's layers must have weights; …",
    # Groups of samples: uids have an order and are told apart, also from padding.
    **{f"group_steps(['a', {uid}], 1)": UID for uid in ("None", "['a']", "('a', ['b'])", "{}")},
    **{
        f"group_steps(['a', 'b'], 1, is_padding={tags})": TAGS
        for tags in ("[True]", "[0, '0']", "[0, [1]]", "[nan, nan]", "[0, inf]", "[0, 10**400]")
    },
    "group_steps(['a', 'b'], 1, is_padding='no')": "LengthError: is_padding must…",
    **{
        f"group_steps({groups}, 1)": ORDER
        for groups in ("'ab'", "b'ab'", "{'a': 0, 'b': 1}", "{1, 2}", "3", "None")
    },
    "group_steps(['a'], 0)": "LengthError: groups_per_step must be 1 or more, got 0…",
    "group_steps(['a'], 1, last='short')": "LengthError: last must be one of 'keep', 'drop', "
    "'error', got 'short'…",
    "batch(groups=[0, 1], groups_per_step=1, samples_per_step=1)": (
        "LengthError: … leave out samples_per_step (--samples-per-step)"
    ),
    "batch(groups=[0, 1])": "LengthError: … need groups_per_step; set it",
    "batch(groups_per_step=1)": "LengthError: … need groups; set it",
    "batch(groups=[0, 1, 1], groups_per_step=1)": "LengthError: groups has 3 entries for 2 "
    "samples…",
    "batch([5, 5], prompts=[5, 6], groups=[0, 0])": (
        "LengthError: sample 1 has 5 tokens, its prompt 6; give total…"
    ),
    "batch([5, 5], prompts=[5, 5], groups=['a'])": "LengthError: groups has 1…",
    "batch([5, 5], prompts=[5, 5])": "LengthError: groups must be a sequence, got NoneType…",
    "batch([5, 5], prompts=[5], groups=[0, 0])": "LengthError: prompts has 1…",
    "batch([5, 5], prompts=[5, -1], groups=[0, 0])": f"LengthError: the prompt of sample 1 must be "
    f"an integer {LENGTH} -1; correct prompts",
    "batch([5, 5], prompts=[5, 5], groups=[[0], [0]])": UID.replace("1", "0"),
    **{
        f"plan({lengths}, forest=FOREST)": OTHER_FOREST
        for lengths in ("[5] * 5", "[5] * 3", "[5, 5, 5, 4]", "[]")
    },
    # Steps of a plan belong together.
    "Plan(steps=(), num_samples=0)": "LengthError: a plan needs one step or more…",
    "Plan(steps=(SECOND, dataclasses.replace(SECOND, scope='local')), num_samples=4)": (
        "LengthError: step 1 has other dims…"
    ),
    # Other lengths than a plan's; a count below what is packed.
    "step_statistics(SECOND, [3, 7])": HAS_NOT,
    "predicted_step_time(SECOND, [3, 7])": HAS_NOT,
    "fill_local(Problem.of([9, 9], ONE, CAP_10), [[0], [1]], 1)": "LengthError: "
    "num_microbatches must be at least this rank's 2, got 1; set the maximum over all ranks",
}
"""Calls and their errors; `…` stands for any text."""


CALLED = vars(math) | vars(planning) | vars(clock) | vars(local) | vars(layers_of)


@pytest.mark.parametrize("call", REFUSALS)
def test_refused(call: str) -> None:
    with pytest.raises(MCoreBatchingError) as caught:
        eval(call, CALLED | globals())
    error, text = caught.value, REFUSALS[call]
    assert re.fullmatch(re.escape(text).replace("…", ".*"), f"{type(error).__name__}: {error}")
    sample = re.search(r"(?:sample|step) (\d) (?:has|must)", str(error))
    assert getattr(error, "index", None) == (int(sample[1]) if sample else None)


OPTIONS = [
    *((ParallelDims, each) for each in dataclasses.fields(ParallelDims)),
    *((PlannerConfig, each) for each in dataclasses.fields(PlannerConfig)),
    *((CostModel, each) for each in dataclasses.fields(CostModel) if "layer" not in each.name),
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
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 5)
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_a_long_list_is_cut_in_a_message() -> None:
    assert shortened(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert shortened(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
