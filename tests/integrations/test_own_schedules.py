"""``build_dp_schedule`` of slime and miles, from their checkouts, beside the plan in its place.

Each is read from a checkout that an environment variable names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks import source_of
from kit.stand_ins import module_of
from test_slime_schedule import arguments, unpartitioned

from mcore_batching.integrations.slime import hook_schedule

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
