"""A package named slime with functions of the signatures that slime has had since its PR 1926."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder, importable until the end of the test."""
    folder = tmp_path / "slime"
    for name, text in FILES.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
    (tmp_path / "__init__.py").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield folder
    forget()


def forget() -> None:
    """Let the package be imported anew."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "slime"]:
        del sys.modules[name]
