"""A package named verl with the functions that are replaced; and verl's own, from a checkout.

Of verl's own, third-party packages that its functions here do not use are stand-ins (`STAND_INS`),
and so are the packages around `verl.workers.engine.utils` and `verl.workers.config`, whose start-up
imports engines. torch and tensordict are real.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from kit.stand_ins import StandIns, bare_packages, forget, write_package

SOURCE = os.environ.get("MCORE_BATCHING_VERL_SOURCE", "")
STAND_INS = ("datasets", "omegaconf", "pandas", "ray", "transformers")

BALANCING = """
def rearrange_micro_batches(batch, max_token_len, dp_group=None, num_batches_divided_by=None,
                            same_micro_num_in_dp=True, min_num_micro_batch=None,
                            use_dynamic_bsz_balance=True, force_group_size=1):
    return "own", force_group_size

def restore_dynamic_batch(data, batch_idx_list):
    indices = [sample for samples in batch_idx_list for sample in samples]
    assert len(indices) == data.shape[0]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    if data.is_nested:
        import torch
        rows = data.unbind()
        return torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)
    return data[order]
"""
SELECTING = """
import torch

def index_select_tensor_dict(batch, indices):
    made = {}
    for key, values in batch.items():
        if not values.is_nested:
            made[key] = values[indices]
            continue
        rows = values.unbind()
        made[key] = torch.nested.as_nested_tensor([rows[i] for i in indices], layout=torch.jagged)
    return made
"""
FILES = {
    "utils/seqlen_balancing": BALANCING,
    "utils/tensordict_utils": SELECTING,
    "utils/device": "def get_device_name(): return 'cpu'\n",
    "workers/engine/utils": (
        "from verl.utils.seqlen_balancing import rearrange_micro_batches, restore_dynamic_batch\n"
    ),
}


@pytest.fixture
def small_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The small package's folder, importable until the end of the test."""
    write_package(tmp_path / "verl", FILES)
    monkeypatch.syspath_prepend(tmp_path)
    forget("verl")
    yield tmp_path / "verl"
    forget("verl")


@pytest.fixture(scope="module")
def own_verl() -> Iterator[Any]:
    """verl's own `seqlen_balancing`, `tensordict_utils`, engine's `utils` and `core_algos`."""
    if not SOURCE:
        pytest.skip("MCORE_BATCHING_VERL_SOURCE does not name a folder with verl (0.9.1)")
    pytest.importorskip("tensordict", reason="verl needs tensordict, which is not installed")
    forget("verl")
    finder = StandIns(STAND_INS)
    sys.meta_path.append(finder)
    sys.path.insert(0, SOURCE)
    sys.modules |= bare_packages(SOURCE, ("verl.workers", "verl.workers.engine"))
    sys.modules["verl.workers.config"] = MagicMock(name="verl.workers.config")
    names = {
        "balancing": "verl.utils.seqlen_balancing",
        "tensors": "verl.utils.tensordict_utils",
        "engine": "verl.workers.engine.utils",
        "algorithms": "verl.trainer.ppo.core_algos",
        "protocol": "verl.protocol",
    }
    yield MagicMock(**{short: importlib.import_module(name) for short, name in names.items()})
    sys.path.remove(SOURCE)
    sys.meta_path.remove(finder)
    forget("verl", *STAND_INS)
