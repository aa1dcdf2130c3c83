"""Packages named slime and miles with functions of the signatures that they have had since their
pull requests 1926 and 1927."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.stand_ins import forget, write_package

PLAN = """
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size,
                      rollout_indices):
    return "own"
"""
DATA = """
class DataIterator:
    def __init__(self, rollout_data, micro_batch_indices):
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys):
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        data = self.rollout_data
        return {k: None if data.get(k) is None else [data[k][i] for i in indices] for k in keys}

    def reset(self):
        self.offset = 0
        return self

def get_data_iterator(rollout_data):
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"])]

def get_batch(data_iterator, keys, pad_multiplier=128, allgather_cp=False):
    return data_iterator.get_next(keys)
"""
MODEL = """
from .data import get_batch

def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="",
                 use_rollout_top_p_replay=False):
    (iterator,) = data_iterator
    iterator.reset()
    made = []
    for _ in range(sum(num_microbatches)):
        batch = get_batch(iterator, ["tokens", "total_lengths", "loss_masks"])
        _, values = f("logits", total_lengths=batch["total_lengths"], tokens=batch["tokens"])
        made += values["sums"]
    origin = [None] * len(made)
    for index, value in zip(sum(iterator.micro_batch_indices, []), made, strict=False):
        origin[index] = value
    return {store_prefix + "sums": origin, "replay": use_rollout_top_p_replay}
"""
MANAGER = """
from slime.utils.dp_schedule import build_dp_schedule

class RolloutManager:
    def split(self, *arguments, **keywords):
        return build_dp_schedule(*arguments, **keywords)
"""
FILES = {
    "utils/dp_schedule": PLAN,
    "backends/megatron_utils/data": DATA,
    "backends/megatron_utils/model": MODEL,
    "ray/rollout": MANAGER,
    "rollout/sglang_rollout": "def generate_rollout(args, rollout_id, source): return 'rollouts'\n",
}


OWN_PLAN = """
def get_data_iterator(args, model, rollout_data):
    if "micro_batch_indices" in rollout_data:
        indices, counts = rollout_data["micro_batch_indices"], rollout_data["num_microbatches"]
    else:
        indices, counts = [[i] for i in range(len(rollout_data["tokens"]))], [3]
    return [DataIterator(rollout_data, indices)], counts

def get_batch(data_iterator, keys, pad_multiplier=128, qkv_format="thd", get_position_ids=False,
              allgather_cp=False):
    return data_iterator.get_next(keys)
"""
MILES_FILES = {
    "utils/dp_schedule": PLAN,
    "utils/environ": """
import os

def use_legacy_rollout_v1():
    return bool(int(os.environ.get("MILES_USE_LEGACY_ROLLOUT_V1", "0")))
""",
    "backends/training_utils/data": DATA.partition("def get_data_iterator")[0] + OWN_PLAN,
    "backends/megatron_utils/model": MODEL.replace(".data", "miles.backends.training_utils.data")
    .replace('store_prefix="",', 'rollout_id, store_prefix="",')
    .replace('_, values = f("logits", ', 'values = f("logits", non_loss_data=True, '),
    "ray/rollout/train_data_conversion": MANAGER.replace("slime", "miles"),
    "rollout/sglang_rollout": FILES["rollout/sglang_rollout"],
    "rollout/inference_rollout/inference_rollout_common": "class InferenceRolloutFn: ...\n",
}


@pytest.fixture
def slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder, importable until the end of the test."""
    yield from _importable(tmp_path / "slime", FILES, monkeypatch)


@pytest.fixture
def miles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder, importable until the end of the test."""
    yield from _importable(tmp_path / "miles", MILES_FILES, monkeypatch)


def _importable(
    folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    write_package(folder, files)
    monkeypatch.syspath_prepend(folder.parent)
    forget("slime", "miles")
    yield folder
    forget("slime", "miles")
