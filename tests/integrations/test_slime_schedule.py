"""``build_dp_schedule`` in slime's and miles' rollout managers: the contract of its result, and who
plans."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frameworks import SLIME_INIT, rewrite, slime_arguments, slime_plan, trainer_sizes
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import broken_invariants, examples

from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.slime import HookError, hook_schedule
from mcore_batching.planning import ParallelDims, PlannerConfig, StepPlan
from mcore_batching.planning.errors import MCoreBatchingError

Small = Callable[..., Path]


@st.composite
def problems(draw: Any) -> tuple[dict[str, Any], list[int], list[int], int]:
    ranks = draw(st.integers(1, 4))
    context = draw(st.sampled_from([1, 2]))
    chunks, group = draw(st.sampled_from([(None, None), (1, 1), (2, 2), (2, 4)]))
    count = draw(st.integers(ranks, 24))
    lengths = draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    rollouts = draw(st.lists(st.integers(0, count), min_size=count, max_size=count))
    return (
        trainer_sizes(ranks, context, chunks, group),
        lengths,
        rollouts,
        draw(st.integers(1, len(set(rollouts)))),
    )


@examples(250)
@given(problems(), st.booleans())
@example((trainer_sizes(8, 1, 2, 4), [60] * 17, [*range(17)], 17), False)  # mostly placeholders
@example((trainer_sizes(2), [5] * 6, [*range(6)], 4), True)  # as many samples left as ranks
@example(
    (trainer_sizes(4, 1, 2, 2), [40, 24, 28, 45], [*range(4)], 4), False
)  # ends first if one idles
def test_the_contract_holds(
    problem: tuple[dict[str, Any], list[int], list[int], int], allow_partial: bool
) -> None:
    """With miles' option, rollouts that are left over make a smaller step, unless a rank would
    have no sample of it."""
    config, lengths, rollouts, size = problem
    args = slime_arguments(
        64, context_parallel_size=config["cp_size"], allow_partial_train_step=allow_partial
    )
    names = list(dict.fromkeys(rollouts))
    samples = Counter(names.index(name) // size for name in rollouts)
    partial = len(names) % size * allow_partial
    if samples[len(names) // size] < config["dp_size"]:
        partial = 0
    try:
        result = slime_plan(args, config, lengths, rollouts, size)
    except HookError:
        assert max(samples[step] for step in range(len(names) // size)) < config["dp_size"]
        assert not partial
        return
    partitions, micro_batches, counts, sizes = result
    assert sizes == [size] * (len(names) // size) + [partial] * bool(partial)
    for part, slots in zip(partitions, micro_batches, strict=True):
        assert part
        assert [i for samples in slots for i in samples] == list(range(len(part)))
        assert {*map(type, (*part, *counts))} == {int}
        assert len(slots) == sum(counts)
    dims = ParallelDims(
        data_parallel=config["dp_size"],
        context_parallel=config["cp_size"],
        pipeline_parallel=config["microbatch_group_size_per_vp_stage"] or 1,
        virtual_pipeline=config["vpp_size"] or 1,
    )
    ends = [*itertools.accumulate(counts, initial=0)]
    for step, (first, end) in enumerate(itertools.pairwise(ends)):
        ours = [i for i, name in enumerate(rollouts) if names.index(name) // size == step]
        plan = StepPlan(
            micro_batches=tuple(
                tuple(tuple(ours.index(part[i]) for i in samples) for samples in slots[first:end])
                for part, slots in zip(partitions, micro_batches, strict=True)
            ),
            num_microbatches=end - first,
            sample_indices=tuple(range(len(ours))),
            dims=dims,
            config=PlannerConfig(max_tokens_per_gpu=64, fill="placeholder"),
        )
        assert broken_invariants(plan, [lengths[i] for i in ours]) == set()


PADDED = {"data_pad_size_multiplier": 4, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "context", "lengths", "count"),
    [
        ({}, 1, [6] * 3, 1),
        (PADDED, 1, [6] * 3, 2),  # a row of 18 is padded to 24
        (PADDED, 2, [4] * 9, 2),
        ({"dynamic_batch_max_samples_per_row": 1}, 1, [5] * 4, 4),
        ({"dynamic_batch_cost_model": "fixed"}, 1, [5] * 4, 1),
        ({"enable_mtp_training": True}, 1, [5] * 4, 1),  # no placeholder
    ],
)
def test_options_are_read_from_the_arguments(
    options: dict[str, Any], context: int, lengths: list[int], count: int
) -> None:
    """The cap of 20 counts what ``get_batch`` pads."""
    assert slime_plan(slime_arguments(20, **options), trainer_sizes(1, context), lengths)[2] == [
        count
    ]


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"custom_megatron_init_path": None}, 1, f"set --custom-megatron-init-path {SLIME_INIT}"),
    ({}, 4, "rank 3 would train no sample.*--global-batch-size to 4"),
    ({"enable_mtp_training": True}, 2, "batch-size higher, or unset --enable-mtp-training"),
    ({"dynamic_batch_share_prefixes": True}, 1, "unset dynamic_batch_share_prefixes"),
    ({"dynamic_batch_pad_each_to": 8}, 1, "pad rows by dynamic_batch_pad_total_to"),
    ({"dynamic_batch_context_parallel": 2}, 1, "unset dynamic_batch_context_parallel"),
    ({"dynamic_batch_split_backward": "auto"}, 1, "--dynamic-batch-split-backward is gone"),
    ({"dynamic_batch_on_oversize": "error"}, 1, "on_oversize"),
    ({"dynamic_batch_cost_model": "/no"}, 1, "dynamic_batch_cost_model /no: .*set it to a file"),
    ({"dynamic_batch_cost_model": __file__}, 1, "expected a cost model in JSON.*set it to a file"),
    (
        {"dynamic_batch_cost_model": "auto", "expert_model_parallel_size": 2},
        1,
        "wait for each other in every one: set dynamic_batch_cost_model",
    ),
]


@pytest.mark.parametrize(("options", "ranks", "message"), REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(
    options: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        slime_plan(slime_arguments(5, **options), trainer_sizes(ranks), [5, 5, 6])
    assert isinstance(caught.value, MCoreBatchingError)


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
    folder, args, sizes = small("slime"), slime_arguments(10, **options), trainer_sizes(2)
    module = importlib.import_module("slime.utils.dp_schedule")
    more: dict[str, Any] = {"global_batch_size": size, "rollout_indices": [0, 1]}
    if is_multimodal is not None:
        newer = "rollout_indices, sample_is_multimodal=None)"
        module = rewrite(module.__name__, folder, "rollout_indices)", newer)
        more["sample_is_multimodal"] = is_multimodal
    with hook_schedule() or pytest.fail("nothing is hooked"):
        made = module.build_dp_schedule(args, sizes, [5, 6], **more)
    assert (made == ("own", args, sizes, [5, 6], size, [0, 1])) != is_ours


def test_parallel_dims_of_arguments() -> None:
    names = ("data", "pipeline_model", "context", "tensor_model", "expert_model")
    sizes = {f"{name}_parallel_size": 2 + place for place, name in enumerate(names)}
    args = SimpleNamespace(**sizes, virtual_pipeline_model_parallel_size=7)
    rest = {"pipeline_parallel": 3, "context_parallel": 4, "tensor_parallel": 5}
    chunks = {"virtual_pipeline": 7, "microbatch_group_size": 8}
    assert job_dims(args, microbatch_group_size=8, expert_parallel=1) == ParallelDims(
        data_parallel=2, **rest, **chunks
    )
    args.virtual_pipeline_model_parallel_size = None  # Megatron sets a group size all the same
    assert job_dims(args, microbatch_group_size=8, data_parallel=6) == ParallelDims(
        data_parallel=6, expert_parallel=6, **rest
    )


def test_miles_manager_splits_a_batch_by_our_plan_unless_the_trainer_plans(
    own: Callable[[str], Path],
) -> None:
    """Three samples of 12 tokens for four micro-batches: the fourth is a placeholder."""
    own("miles")
    manager = importlib.import_module("miles.ray.rollout.train_data_conversion")
    args, config = slime_arguments(12, global_batch_size=3), trainer_sizes(2)
    of_samples: dict[str, Any] = {"tokens": [1] * 12, "loss_masks": [1], "truncated": 0}
    of_samples |= dict.fromkeys(("rewards", "raw_reward"), 0.0)
    of_samples |= dict.fromkeys(("response_lengths", "rollout_mask_sums"), 1)
    data = {name: [value] * 3 for name, value in of_samples.items()}
    data |= {name: [0, 1, 2] for name in ("sample_indices", "rollout_ids")}
    split = manager.split_train_data_by_dp_scheduled_raw
    assert manager.can_schedule_on_rollout_side(args, data, config)
    with pytest.raises(AssertionError, match="dynamic path"):
        split(args, dict(data), train_parallel_config=config)
    with hook_schedule() or pytest.fail("nothing is hooked"):
        shards = split(args, dict(data), train_parallel_config=config)
        images = data | {"multimodal_train_inputs": [{}] * 3}
        assert not manager.can_schedule_on_rollout_side(args, images, config)
        args.multi_lora = True
        assert not manager.can_schedule_on_rollout_side(args, data, config)
    assert sorted(i for shard in shards for i in shard["sample_indices"]) == [0, 1, 2]
    for shard in shards:
        assert (shard["num_microbatches"], shard["num_rollouts"]) == ([2], [3])
        assert shard["partition"] == shard["sample_indices"]
        assert len(shard["micro_batch_indices"]) == 2
    assert sum(not each for shard in shards for each in shard["micro_batch_indices"]) == 1
