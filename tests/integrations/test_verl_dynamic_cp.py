"""verl's dynamic context parallelism by this package's plan: the contract of its scheduler, and
verl's own adapter around it, from where ``MCORE_BATCHING_VERL_SOURCE`` names a folder with verl."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples
from verl_package import own_verl

from mcore_batching.integrations.verl import hook
from mcore_batching.integrations.verl.micro_batches import RowScheduler

__all__ = ["own_verl"]

CAP = 64
LENGTHS = [200, 13, 55, 8, 21, 34, 64, 5, 3, 44, 61, 29]


def scheduled(lengths: list[int], ranks: int) -> list[list[list[int]]]:
    scheduler = RowScheduler(max_seqlen_per_dp_cp_rank=CAP, cp_size=1, dp_size=ranks)
    return scheduler.get_groups_and_subsamples([(10 + i, n) for i, n in enumerate(lengths)])


def sizes_with_groups(ranks: int) -> set[int]:
    """Sizes of rows that Megatron makes groups for (`create_dynamic_dp_cp_groups`), and all ranks,
    whose group it has anyway."""
    return {2**n for n in range(int(math.log2(ranks)))} | {ranks}


@examples(100)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.data())
def test_the_contract_holds(ranks: int, data: st.DataObject) -> None:
    """What verl checks, and the cap: of several samples in a row, padding included."""
    lengths = data.draw(st.lists(st.integers(1, CAP * ranks), min_size=1, max_size=20))
    rows = []
    for of_slot in scheduled(lengths, ranks):
        assert len(of_slot) == ranks
        for rank, samples in enumerate(of_slot):
            assert samples
            members = [peer for peer, others in enumerate(of_slot) if others == samples]
            assert members == [*range(members[0], members[0] + len(members))]
            assert members[0] % len(members) == 0
            assert len(members) in sizes_with_groups(ranks)
            if rank == members[0]:
                rows.append(samples)
                multiple = 2 * len(members) if len(members) > 1 else 1
                padded = [math.ceil(lengths[i - 10] / multiple) * multiple for i in samples]
                assert len(samples) == 1 or sum(padded) <= CAP * len(members)
    assert sorted(itertools.chain(*rows)) == [10 + i for i in range(len(lengths))]


def test_too_few_samples_are_shared_by_all_ranks() -> None:
    assert scheduled([50], 4) == [[[10]] * 4]


@pytest.fixture
def megatrons(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Megatron that has the scheduler, and so the groups of such rows."""
    name = "megatron.core.datasets.data_schedule"
    stand_in: Any = SimpleNamespace(DefaultDynamicCPScheduler=object)
    monkeypatch.setitem(sys.modules, name, stand_in)
    return


def test_verls_own_adapter_takes_the_rows(own_verl: Any, megatrons: None) -> None:
    """Every sample once, in rows that it accepts on every rank; undone, Megatron's class again."""
    module = importlib.import_module("verl.utils.dynamic_cp_scheduler")
    from tensordict import TensorDict

    parts = [torch.arange(n) for n in LENGTHS]
    batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
            "sample": torch.arange(len(LENGTHS)),
        },
        batch_size=[len(LENGTHS)],
    )
    with hook() as hooked:
        assert f"{module.__name__}.get_megatron_dynamic_cp_scheduler_cls" in hooked.hooked
        adapter = module.DynamicCPScheduler(CAP, dp_size=2, cp_size=2)
        leaders: list[int] = []
        counts, sizes = set(), set()
        for rank in range(4):
            group = SimpleNamespace(size=lambda: 4, rank=lambda rank=rank: rank)
            made = adapter.schedule(batch, group, tp_size=1)
            counts.add(len(made))
            for row in made:
                sizes.add(own_verl.tensors.get_non_tensor_data(row, "local_cp_size", None))
                if own_verl.tensors.get_non_tensor_data(row, module.DCP_GROUP_LEADER, None):
                    leaders += row["sample"].tolist()
    assert sorted(leaders) == [*range(len(LENGTHS))]
    assert len(counts) == 1
    assert max(sizes) == 4
    assert module.get_megatron_dynamic_cp_scheduler_cls() is object


def test_a_megatron_without_such_groups_is_refused(
    own_verl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.data_schedule", None)
    module = importlib.import_module("verl.utils.dynamic_cp_scheduler")
    with hook(), pytest.raises(RuntimeError, match="requires a Megatron-Core build"):
        module.get_megatron_dynamic_cp_scheduler_cls()
