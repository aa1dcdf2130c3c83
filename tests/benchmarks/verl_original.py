"""verl's own planning functions, loaded from a checkout by themselves: imports that they do not use
are empty stand-ins, and all-reduces over ranks are carried out by a loop."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mcore_batching.planning import Problem
from mcore_batching.tools.rules import Bins


def load_alone(path: Path, **stand_ins: Any) -> Any:
    """One module, without the start-up of the package that it lies in."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def verl_original(source: Path) -> Callable[[Problem], list[Bins]]:
    torch = pytest.importorskip("torch")
    tools = SimpleNamespace(index_select_tensor_dict=lambda batch, part: None)
    module = load_alone(
        source / "verl/utils/seqlen_balancing.py",
        **{
            "verl": ModuleType("verl"),
            "verl.protocol": SimpleNamespace(DataProto=object),
            "verl.utils": SimpleNamespace(tensordict_utils=tools),
            "verl.utils.device": SimpleNamespace(get_device_name=lambda: "cpu"),
        },
    )

    def plan(problem: Problem) -> list[Bins]:
        work = [int(w) for w in module.calculate_workload(torch.tensor(problem.lengths)).tolist()]
        shards = module.get_seqlen_balanced_partitions(work, problem.num_ranks, equal_size=True)
        for shard in shards:
            shard.sort(key=lambda i: (work[i], i))
            shard[:] = shard[::2] + shard[1::2][::-1]

        dims = problem.dims
        group = dims.group_size if dims.virtual_pipeline > 1 else None

        def rank_of(shard: list[int], least: int) -> Bins:
            mask = torch.zeros(len(shard), max(problem.tokens), dtype=torch.long)
            for row, sample in enumerate(shard):
                mask[row, : problem.tokens[sample]] = 1
            _, parts = module.rearrange_micro_batches(
                {"input_ids": mask, "attention_mask": mask},
                problem.capacity,
                num_batches_divided_by=group,
                min_num_micro_batch=least,
            )
            return [[shard[i] for i in part] for part in parts]

        least = 1
        while True:  # verl's all-reduce of the count, until all ranks agree
            ranks = [rank_of(shard, least) for shard in shards]
            least = max(map(len, ranks))
            if all(len(rank) == least for rank in ranks):
                return ranks

    return plan
