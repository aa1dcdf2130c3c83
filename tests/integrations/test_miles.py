"""miles, whose functions are slime's with other parameters: its plan, its trainer's placeholders.

miles' own functions, and its own tests of ``build_dp_schedule``, take part where
``MCORE_BATCHING_MILES`` names a checkout (31f1ca961).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.stand_ins import StandIns, forget
from slime_package import miles, slime
from test_slime_schedule import arguments, check, lengths_of, own_tests_of, parallel, plan
from test_slime_scheduled import KEYS, rollout_data

import mcore_batching
from mcore_batching.integrations.slime import HookError, hook_schedule, init

__all__ = ["miles", "slime"]

CHECKOUT = os.environ.get("MCORE_BATCHING_MILES", "")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="MCORE_BATCHING_MILES does not name a checkout of miles"
)
STAND_INS = ("ray", "httpx", "tqdm", "transformers", "huggingface_hub", "pydantic", "sglang")
WRAPPER = "mcore_batching.integrations.slime.rollout"


def unpartitioned(ranks: int) -> dict[str, Any]:
    """What miles' trainer says of itself without virtual pipeline stages."""
    return parallel(ranks) | {"vpp_size": None, "microbatch_group_size_per_vp_stage": None}


def test_sizes_without_virtual_pipeline_stages_may_be_none() -> None:
    lengths, rollouts = [5] * 4, [0, 1, 2, 3]
    args = arguments(10, pipeline_model_parallel_size=2)
    check(plan(args, unpartitioned(2), lengths, rollouts, 4), parallel(2), lengths, rollouts, 4, 10)


def modules() -> SimpleNamespace:
    return SimpleNamespace(
        data=importlib.import_module("miles.backends.training_utils.data"),
        model=importlib.import_module("miles.backends.megatron_utils.model"),
    )


def test_where_both_are_installed_all_plans_there_are_are_replaced(
    miles: Path, slime: Path
) -> None:
    names = [f"{each}.utils.dp_schedule.build_dp_schedule" for each in ("miles", "slime")]
    hooked = hook_schedule()
    assert hooked is not None
    with hooked:
        assert sorted(hooked.hooked) == names
    (miles / "utils" / "dp_schedule.py").unlink()
    forget("slime", "miles")
    hooked = hook_schedule()
    assert hooked is not None
    with hooked:
        assert hooked.hooked == names[1:]
    modules()  # it is miles that trains
    with pytest.raises(HookError, match="this miles has no"):
        init(SimpleNamespace())


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_the_rollout_function_is_miles_default(
    miles: Path, slime: Path, legacy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime is installed, too, but it is miles that imports the rollout function."""
    monkeypatch.setenv("MILES_USE_LEGACY_ROLLOUT_V1", legacy)
    (miles / "utils" / "misc.py").touch()
    importlib.import_module("miles.utils.misc")
    try:
        wrapper = importlib.import_module(WRAPPER)
        assert hasattr(sys.modules["miles.utils.dp_schedule"].build_dp_schedule, "__wrapped__")
    finally:
        sys.modules.pop(WRAPPER, None)
    name = "sglang_rollout" if int(legacy) else "inference_rollout.inference_rollout_common"
    module = sys.modules[f"miles.rollout.{name}"]
    assert wrapper.generate_rollout in vars(module).values()
    assert inspect.isclass(wrapper.generate_rollout) is not bool(int(legacy))


def sums(
    logits: str, *, total_lengths: list[int], tokens: list[torch.Tensor], non_loss_data: bool
) -> Any:
    return {"sums": [int(each.sum()) for each in tokens]}


def test_placeholders_are_drawn_run_and_left_out(miles: Path) -> None:
    found = modules()
    data = rollout_data([], [1], [], [0, 2]) | {"num_microbatches": [4]}
    with mcore_batching.hook(found.data, found.model) as hooked:
        assert hooked.hooked == [
            "miles.backends.training_utils.data.get_data_iterator",
            "miles.backends.megatron_utils.model.forward_only",
        ]
        iterators, counts = found.data.get_data_iterator(None, None, data)
        made = found.model.forward_only(sums, None, None, iterators, counts, rollout_id=0)
        empty = found.data.get_batch(iterators[0].reset(), KEYS)
    assert counts == [4]
    assert made == {"sums": [3, 10, 1], "replay": False}
    assert [each.tolist() for each in empty["tokens"]] == [[0]]
    assert int(sum(torch.clamp_min(mask.sum(), 1) for mask in empty["loss_masks"])) == 0


def test_what_the_trainer_plans_itself_stays_its_own(miles: Path) -> None:
    """Images and adapters: fields without a kind among them, and iterators of its own class."""
    found = modules()
    data = rollout_data() | {"adapter_slots": [0, 0, 1]}
    del data["micro_batch_indices"]
    with mcore_batching.hook(found.data, found.model):
        (iterator,), counts = found.data.get_data_iterator(None, None, data)
        assert type(iterator) is found.data.DataIterator
        assert counts == [3]
        assert iterator.get_next(["adapter_slots"]) == {"adapter_slots": [0]}
        made = found.model.forward_only(sums, None, None, [iterator], counts, rollout_id=0)
    assert made["sums"] == [3, 10, 1]


def test_miles_calls_init(miles: Path, slime: Path, capfd: Any) -> None:
    """slime is installed, too, but it is miles that is loaded."""
    found = modules()
    own = found.data.get_data_iterator
    init(SimpleNamespace())
    hooked = "hooked miles.backends.training_utils.data.get_data_iterator"
    assert hooked in capfd.readouterr().out
    assert found.data.get_data_iterator is not own
    assert not [name for name in sys.modules if name.startswith("slime.backends")]


def test_unknown_versions_are_refused_by_name(miles: Path, monkeypatch: Any) -> None:
    path = miles / "backends" / "training_utils" / "data.py"
    path.write_text(
        path.read_text().replace("def get_data_iterator(args,", "def get_data_iterator(")
    )
    with pytest.raises(
        HookError,
        match=r"of an unknown version of slime or miles: expected get_data_iterator\(rollout_data"
        r", \.\.\.\) or get_data_iterator\(args, model, rollout_data, \.\.\.\), found \(model, ",
    ):
        init(SimpleNamespace())
    (miles / "utils" / "dp_schedule.py").unlink()
    forget("slime", "miles")
    for call in (hook_schedule, lambda: init(SimpleNamespace())):
        with pytest.raises(HookError, match=r"this miles has no miles\.utils\.dp_schedule .*1927"):
            call()
    forget("slime", "miles")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HookError, match=r"neither slime nor miles is installed: for another"):
        init(SimpleNamespace())
    assert hook_schedule() is None


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """miles' own modules, read from the checkout; empty ones for what they import besides."""
    forget("slime", "miles")
    monkeypatch.syspath_prepend(CHECKOUT)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns(STAND_INS)])
    before = set(sys.modules)
    yield importlib.import_module("miles.utils.dp_schedule")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in STAND_INS:
            del sys.modules[name]
    forget("slime", "miles")


@needs_checkout
def test_miles_own_tests_of_its_function_pass_with_ours(checkout: Any) -> None:
    path = Path(CHECKOUT, "tests", "fast", "utils", "test_dp_schedule.py")
    if not path.exists():
        pytest.skip(f"{path} is not in the checkout")
    hooked = hook_schedule()
    assert hooked is not None
    with hooked:
        tests = own_tests_of(path)
        assert len(tests) == 15
        for test in tests:
            test()


@needs_checkout
def test_the_same_steps_as_miles_own_and_undone_the_same_plans(checkout: Any) -> None:
    draw = random.Random(5)
    partial_steps = 0
    for seed in range(40):
        ranks, size = draw.choice([1, 2, 4]), draw.choice([4, 8])
        count = size * draw.randint(1, 3) + draw.randint(0, size - 1)
        rollouts = [name for name in range(count) for _ in range(draw.randint(1, 3))]
        lengths = lengths_of(seed, len(rollouts), 1000)
        args = arguments(1000, allow_partial_train_step=draw.random() < 0.7)
        given = {"global_batch_size": size, "rollout_indices": rollouts}
        before = checkout.build_dp_schedule(args, unpartitioned(ranks), lengths, **given)
        hooked = hook_schedule()
        assert hooked is not None
        with hooked:
            ours = checkout.build_dp_schedule(args, unpartitioned(ranks), lengths, **given)
        assert ours[3] == before[3]
        assert samples_of_steps(ours) == samples_of_steps(before)
        partial = ours[3][-1] % size
        partial_steps += bool(partial)
        for result in (before, ours):
            check(result, parallel(ranks), lengths, rollouts, size, 1000, partial)
        assert checkout.build_dp_schedule(args, unpartitioned(ranks), lengths, **given) == before
    assert partial_steps > 5


def samples_of_steps(result: Any) -> list[list[int]]:
    partitions, micro_batches, counts, _ = result
    steps = [step for step, count in enumerate(counts) for _ in range(count)]
    found: list[list[int]] = [[] for _ in counts]
    for part, slots in zip(partitions, micro_batches, strict=True):
        for step, samples in zip(steps, slots, strict=True):
            found[step] += [part[i] for i in samples]
    return [sorted(each) for each in found]


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


@needs_checkout
def test_miles_manager_splits_a_batch_by_our_plan_unless_the_trainer_plans(checkout: Any) -> None:
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
