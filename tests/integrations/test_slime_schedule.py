"""``build_dp_schedule`` in slime's and miles' rollout managers: the contract of its result, and who
plans. Their own tests of it take part where environment variables name their checkouts.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frameworks import rewrite, source_of
from hypothesis import example, given
from hypothesis import strategies as st
from kit.stand_ins import forget, module_of
from planning_cases import examples

from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.slime import HookError, hook_schedule
from mcore_batching.integrations.slime.learning import chosen_costs
from mcore_batching.integrations.slime.rollout_manager import build_dp_schedule
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.costs.layers_of import first_guess

Small = Callable[..., Path]
INIT = "mcore_batching.integrations.slime.init"


def arguments(cap: int, **more: Any) -> SimpleNamespace:
    made = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": cap,
        "micro_batch_size": 1,
        "custom_megatron_init_path": INIT,
        "balance_data": False,
        "balance_by_flops": False,
        "dynamic_batch_plan_effort": 30,
    }
    return SimpleNamespace(**(made | more))


def parallel(ranks: int, context: int = 1, chunks: int = 1, group: int = 1) -> dict[str, int]:
    return {
        "dp_size": ranks,
        "cp_size": context,
        "vpp_size": chunks,
        "microbatch_group_size_per_vp_stage": group,
    }


def unpartitioned(ranks: int) -> dict[str, Any]:
    """What miles' trainer says of itself without virtual pipeline stages."""
    return parallel(ranks) | {"vpp_size": None, "microbatch_group_size_per_vp_stage": None}


def plan(
    args: Any, config: dict[str, int], lengths: list[int], rollouts: list[int], size: int
) -> Any:
    return build_dp_schedule(
        pytest.fail, args, config, lengths, global_batch_size=size, rollout_indices=rollouts
    )


def check(
    result: Any,
    config: dict[str, int],
    lengths: list[int],
    rollouts: list[int],
    size: int,
    cap: int,
    partial: int = 0,
) -> None:
    """What slime's trainer and its own tests expect of a schedule.

    Args:
        partial: rollouts of a last, smaller step.
    """
    partitions, micro_batches, counts, sizes = result
    ranks = config["dp_size"]
    names = list(dict.fromkeys(rollouts))
    assert sizes == [size] * (len(names) // size) + [partial] * bool(partial)
    num_steps = len(sizes)
    assert len(counts) == num_steps
    assert len(partitions) == len(micro_batches) == ranks
    for count in counts:
        assert type(count) is int
        assert count > 0
        if config["vpp_size"] > 1:
            assert count % config["microbatch_group_size_per_vp_stage"] == 0
    step_of = {name: place // size for place, name in enumerate(names)}
    kept = [i for i, name in enumerate(rollouts) if step_of[name] < num_steps]
    assert sorted(i for part in partitions for i in part) == kept
    for part, slots in zip(partitions, micro_batches, strict=True):
        assert all(type(i) is int for i in part)
        assert part
        assert len(slots) == sum(counts)
        assert [i for samples in slots for i in samples] == list(range(len(part)))
        steps = [step for step, count in enumerate(counts) for _ in range(count)]
        for step, samples in zip(steps, slots, strict=True):
            assert {step_of[rollouts[part[i]]] for i in samples} <= {step}
            tokens = sum(lengths[part[i]] for i in samples)
            assert tokens <= cap * config["cp_size"] or len(samples) == 1


@st.composite
def problems(draw: Any) -> tuple[dict[str, int], list[int], list[int], int]:
    ranks = draw(st.integers(1, 4))
    context = draw(st.sampled_from([1, 2]))
    chunks, group = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 4)]))
    count = draw(st.integers(ranks, 24))
    lengths = draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    rollouts = draw(st.lists(st.integers(0, count), min_size=count, max_size=count))
    return (
        parallel(ranks, context, chunks, group),
        lengths,
        rollouts,
        draw(st.integers(1, len(set(rollouts)))),
    )


@examples(250)
@given(problems(), st.booleans())
@example((parallel(8, 1, 2, 4), [60] * 17, [*range(17)], 17), False)  # mostly placeholders
@example((parallel(2), [5] * 6, [*range(6)], 4), True)  # as many samples left as ranks
@example((parallel(4, 1, 2, 2), [40, 24, 28, 45], [*range(4)], 4), False)  # ends first if one idles
def test_the_contract_holds(
    problem: tuple[dict[str, int], list[int], list[int], int], allow_partial: bool
) -> None:
    """With miles' option, rollouts that are left over make a smaller step, unless a rank would
    have no sample of it."""
    config, lengths, rollouts, size = problem
    args = arguments(
        64, context_parallel_size=config["cp_size"], allow_partial_train_step=allow_partial
    )
    names = list(dict.fromkeys(rollouts))
    samples = Counter(names.index(name) // size for name in rollouts)
    partial = len(names) % size * allow_partial
    if samples[len(names) // size] < config["dp_size"]:
        partial = 0
    try:
        result = plan(args, config, lengths, rollouts, size)
    except HookError:
        assert max(samples[step] for step in range(len(names) // size)) < config["dp_size"]
        assert not partial
        return
    check(result, config, lengths, rollouts, size, 64, partial)


def test_the_cap_counts_what_get_batch_pads() -> None:
    """Three samples of 6 fill 18 of 20 tokens, in a row that is padded to 24."""
    unpadded = plan(arguments(20), parallel(1), [6] * 3, [0, 1, 2], 3)
    assert unpadded[2] == [1]
    padded = arguments(20, data_pad_size_multiplier=4, tensor_model_parallel_size=2)
    assert plan(padded, parallel(1), [6] * 3, [0, 1, 2], 3)[2] == [2]
    assert plan(padded, parallel(1, context=2), [4] * 9, [*range(9)], 9)[2] == [2]


def test_the_planners_options_are_read_from_the_arguments() -> None:
    lengths, rollouts = [5] * 4, [0, 1, 2, 3]
    args = arguments(20, dynamic_batch_max_samples_per_row=1)
    assert plan(args, parallel(1), lengths, rollouts, 4)[2] == [4]
    with pytest.raises(ValueError, match="on_oversize"):
        plan(arguments(4, dynamic_batch_on_oversize="error"), parallel(1), lengths, rollouts, 4)


def test_a_cost_model_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text("{}")
    args = arguments(20, dynamic_batch_cost_model=str(path))
    with pytest.raises(ValueError, match="expected a JSON object"):
        plan(args, parallel(1), [5], [0], 1)
    plan(arguments(20, dynamic_batch_cost_model="fixed"), parallel(1), [5], [0], 1)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 256}
    assert chosen_costs(arguments(20, **sizes)) == first_guess(sizes)


def test_sizes_without_virtual_pipeline_stages_may_be_none() -> None:
    lengths, rollouts = [5] * 4, [0, 1, 2, 3]
    args = arguments(10, pipeline_model_parallel_size=2)
    check(plan(args, unpartitioned(2), lengths, rollouts, 4), parallel(2), lengths, rollouts, 4, 10)


REFUSED = [
    ({"custom_megatron_init_path": None}, 1, f"set --custom-megatron-init-path {INIT}"),
    ({}, 4, "rank 3 would train no sample.*--global-batch-size to 4"),
    ({"enable_mtp_training": True}, 2, "batch-size higher, or unset --enable-mtp-training"),
    ({"dynamic_batch_share_prefixes": True}, 1, "unset dynamic_batch_share_prefixes"),
    ({"dynamic_batch_pad_each_to": 8}, 1, "pad rows by dynamic_batch_pad_total_to"),
    ({"dynamic_batch_context_parallel": 2}, 1, "unset dynamic_batch_context_parallel"),
    ({"dynamic_batch_split_backward": "auto"}, 1, "--dynamic-batch-split-backward is gone"),
]


@pytest.mark.parametrize(("options", "ranks", "message"), REFUSED)
def test_what_the_trainer_could_not_run_is_refused_by_name(
    options: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(HookError, match=message):
        plan(arguments(5, **options), parallel(ranks), [5] * 3, [0, 1, 2], 3)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_mtp_training": True},  # without a placeholder
        *({"dynamic_batch_split_backward": off} for off in (False, None, "off")),  # as YAML reads
    ],
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    given = parallel(1), [5] * 3, [0, 1, 2], 3
    assert plan(arguments(5, **options), *given) == plan(arguments(5), *given)


@pytest.mark.parametrize(
    ("options", "size", "is_multimodal", "is_ours"),
    [
        ({}, 2, None, True),
        ({"use_dynamic_batch_size": False}, 2, None, False),
        ({}, 3, None, False),  # too few rollouts for a step
        ({"multimodal_aware_packing": "off"}, 2, [False, True], True),
        ({"multimodal_aware_packing": "separate"}, 2, [False, True], False),
        ({"multimodal_aware_packing": "separate"}, 2, [False, False], True),
        ({"multimodal_aware_packing": "separate"}, 2, None, True),
    ],
)
def test_where_the_framework_plans_itself(
    small: Small, options: dict[str, Any], size: int, is_multimodal: Any, is_ours: bool
) -> None:
    """Versions that say which samples have images pack them apart by a rule of their own."""
    folder, more = small("slime"), {"global_batch_size": size, "rollout_indices": [0, 1]}
    module = importlib.import_module("slime.utils.dp_schedule")
    if is_multimodal is not None:
        newer = "rollout_indices, sample_is_multimodal=None)"
        module = rewrite(module.__name__, folder, "rollout_indices)", newer)
        more["sample_is_multimodal"] = is_multimodal
    with hook_schedule() or pytest.fail("nothing is hooked"):
        made = module.build_dp_schedule(arguments(10, **options), parallel(2), [5, 6], **more)
    assert (made != "own") == is_ours


WRAPPER = "mcore_batching.integrations.slime.rollout"


@pytest.mark.parametrize(
    ("framework", "legacy", "default"),
    [
        ("slime", "0", "sglang_rollout"),
        ("miles", "1", "sglang_rollout"),
        ("miles", "0", "inference_rollout.inference_rollout_common"),
    ],
)
def test_the_rollout_function_is_the_default_and_hooks_the_plan_of_its_process(
    small: Small, framework: str, legacy: str, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime is installed, too, where it is miles that imports the rollout function."""
    small("slime", framework)
    monkeypatch.setenv("MILES_USE_LEGACY_ROLLOUT_V1", legacy)
    if framework == "miles":
        importlib.import_module("miles.utils.misc")
    try:
        wrapper = importlib.import_module(WRAPPER)
    finally:
        sys.modules.pop(WRAPPER, None)
    assert hasattr(sys.modules[f"{framework}.utils.dp_schedule"].build_dp_schedule, "__wrapped__")
    assert wrapper.generate_rollout in vars(sys.modules[f"{framework}.rollout.{default}"]).values()
    assert inspect.isclass(wrapper.generate_rollout) == ("inference" in default)


def test_all_plans_there_are_are_replaced(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small("slime", "miles")
    for names in (["miles", "slime"], ["miles"]):
        hooked = hook_schedule()
        assert hooked is not None
        with hooked:
            assert sorted(hooked.hooked) == [
                f"{name}.utils.dp_schedule.build_dp_schedule" for name in names
            ]
        (folder / "slime" / "utils" / "dp_schedule.py").unlink(missing_ok=True)
        forget("slime", "miles")
    (folder / "miles" / "utils" / "dp_schedule.py").unlink()
    with pytest.raises(
        HookError, match=r"slime\.utils\.dp_schedule .*leave hook_schedule out.*; this miles has no"
    ):
        hook_schedule()
    forget("slime", "miles")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hook_schedule() is None


def test_parallel_dims_of_arguments() -> None:
    args = SimpleNamespace(
        data_parallel_size=6,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
        context_parallel_size=4,
        tensor_model_parallel_size=5,
        expert_model_parallel_size=8,
    )
    rest = {"pipeline_parallel": 2, "context_parallel": 4, "tensor_parallel": 5}
    chunks = {"virtual_pipeline": 3, "microbatch_group_size": 7}
    assert job_dims(args, microbatch_group_size=7) == ParallelDims(
        data_parallel=6, expert_parallel=8, **rest, **chunks
    )
    args.virtual_pipeline_model_parallel_size = None  # Megatron sets a group size all the same
    assert job_dims(args, microbatch_group_size=7, data_parallel=8) == ParallelDims(
        data_parallel=8, expert_parallel=8, **rest
    )


OWN_TESTS = {
    "slime": ("tests/test_dp_schedule.py", 6),
    "miles": ("tests/fast/utils/test_dp_schedule.py", 15),
}
"""By framework: its own tests of the function, and their least number."""


@pytest.fixture(params=OWN_TESTS)
def checkout(request: pytest.FixtureRequest, own: Callable[[str], Path]) -> str:
    """The framework, read from its checkout."""
    framework: str = request.param
    own(framework)
    importlib.import_module(f"{framework}.utils.dp_schedule")
    return framework


def test_their_own_tests_of_the_function_pass_with_ours(
    checkout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(pytest.mark), "unit", lambda test: test)
    tests, least = OWN_TESTS[checkout]
    path = source_of(checkout) / tests
    if not path.exists():
        pytest.skip(f"{path} is not in the checkout")
    hooked = hook_schedule()
    assert hooked is not None
    with hooked:
        own = [test for name, test in vars(module_of(path)).items() if name.startswith("test_")]
        assert len(own) >= least
        for test in own:
            test()


def batch_of(lengths: list[int], rollouts: list[int]) -> dict[str, Any]:
    """What miles' manager splits."""
    return {
        "tokens": [[1] * length for length in lengths],
        "response_lengths": [1] * len(lengths),
        "rewards": [0.0] * len(lengths),
        "raw_reward": [0.0] * len(lengths),
        "truncated": [0] * len(lengths),
        "loss_masks": [[1]] * len(lengths),
        "sample_indices": list(range(len(lengths))),
        "rollout_ids": rollouts,
        "rollout_mask_sums": [1] * len(lengths),
    }


@pytest.mark.parametrize("checkout", ["miles"], indirect=True)
@pytest.mark.usefixtures("checkout")
def test_miles_manager_splits_a_batch_by_our_plan_unless_the_trainer_plans() -> None:
    """Three samples of 12 tokens for four micro-batches: the fourth is a placeholder."""
    manager = importlib.import_module("miles.ray.rollout.train_data_conversion")
    args = arguments(12, global_batch_size=3)
    data = batch_of([12, 12, 12], [0, 1, 2])
    config = unpartitioned(2)
    assert manager.can_schedule_on_rollout_side(args, data, config)
    with pytest.raises(AssertionError, match="dynamic path"):
        manager.split_train_data_by_dp_scheduled_raw(args, dict(data), train_parallel_config=config)
    hooked = hook_schedule()
    assert hooked is not None
    with hooked:
        shards = manager.split_train_data_by_dp_scheduled_raw(
            args, dict(data), train_parallel_config=config
        )
        images = data | {"multimodal_train_inputs": [{}] * 3}
        assert not manager.can_schedule_on_rollout_side(args, images, config)
        args.multi_lora = True
        assert not manager.can_schedule_on_rollout_side(args, data, config)
    assert sorted(i for shard in shards for i in shard["sample_indices"]) == [0, 1, 2]
    for shard in shards:
        assert shard["num_microbatches"] == [2]
        assert shard["num_rollouts"] == [3]
        assert shard["partition"] == shard["sample_indices"]
        assert len(shard["micro_batch_indices"]) == 2
    assert sum(not each for shard in shards for each in shard["micro_batch_indices"]) == 1
