"""miles, whose functions are slime's with other parameters: its plan, its trainer's placeholders.

miles' own functions, and its own tests of ``build_dp_schedule``, take part in test_own_schedules.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.stand_ins import forget
from slime_package import miles, slime
from test_slime_schedule import arguments, check, parallel, plan
from test_slime_scheduled import rollout_data

import mcore_batching
from mcore_batching.integrations.slime import HookError, hook_schedule, init

__all__ = ["miles", "slime"]

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
        match=r"expected get_data_iterator\(args, model, rollout_data\), found get_data_it",
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
