"""verl's micro-batches and rows of its dynamic context parallelism, made by this package: the
contract, agreement between ranks, the plugin.

verl's own functions take part where ``MCORE_BATCHING_VERL_SOURCE`` names a folder with verl, an
unpacked wheel of 0.9.1 or a checkout, and tensordict is installed. That its engine's loop gives the
same with them is shown in `tests/distributed/test_hooked.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from frameworks import LENGTHS, padded_batch
from hypothesis import given
from hypothesis import strategies as st
from kit.patience import patience
from kit.stand_ins import module_of
from planning_cases import examples, plan_locally
from spawned import reports_of_group

from mcore_batching.batch import OrderError
from mcore_batching.integrations import local
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.verl import hook, micro_batches
from mcore_batching.integrations.verl.micro_batches import RowScheduler
from mcore_batching.planning import ParallelDims, PlannerConfig

Small = Callable[..., Path]
PLUGIN = "mcore_batching.integrations.verl.plugin"
CAP = 100


def selected(batch: Mapping[str, torch.Tensor], samples: list[int]) -> dict[str, torch.Tensor]:
    """In place of verl's own, which takes a TensorDict."""
    return {name: values[samples] for name, values in batch.items()}


def rearranged(
    lengths: list[int], cap: int = CAP, *, fields: Any = None, **options: Any
) -> tuple[list[Any], Any]:
    """Without verl, of dense tensors."""
    batch = padded_batch(lengths) | (fields or {})
    with mock.patch.object(micro_batches, "_select", selected):
        return micro_batches.rearrange_micro_batches(None, batch, cap, **options)


@examples(150)
@given(
    st.lists(st.integers(1, CAP), min_size=1, max_size=20),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 1, 5]),
)
def test_the_contract_holds(lengths: list[int], multiple: int | None, least: int | None) -> None:
    made, indices = rearranged(lengths, num_batches_divided_by=multiple, min_num_micro_batch=least)
    flat = list(itertools.chain.from_iterable(indices))
    assert all(type(sample) is int for sample in flat)
    assert set(flat) == set(range(len(lengths)))
    assert len(made) == len(indices) >= (least or 1)
    assert len(made) % (multiple or 1) == 0
    if len(made) <= len(lengths):
        assert len(flat) == len(lengths)
    for samples, micro_batch in zip(indices, made, strict=True):
        assert samples
        assert sum(lengths[i] for i in samples) <= CAP
        assert int(micro_batch["attention_mask"].sum()) == sum(lengths[i] for i in samples)
    rows = torch.cat([micro_batch["input_ids"] for micro_batch in made])

    def own(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
        order = list(itertools.chain.from_iterable(batch_idx_list))
        assert len(order) == len(lengths) == data.shape[0]
        return data[torch.tensor(order).argsort()]

    restored = micro_batches.restore_dynamic_batch(own, rows, indices)
    assert torch.equal(restored, padded_batch(lengths)["input_ids"])


@pytest.mark.parametrize(
    ("rows", "indices", "message"),
    [
        (2, [[2, 0], [1]], "expected 3 rows, one a sample, got 2, none of samples []"),
        (4, [[2, 0], [1]], "got 4"),
        (4, [[2, 0], [1], [2, 2]], "expected 5 rows, one a sample, got 4"),  # one sample fills up
        (3, [[2, 0], [2]], "got 3, none of samples [1]"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_another_number_of_rows_is_an_error(
    rows: int, indices: list[list[int]], message: str, nested: bool
) -> None:
    data = torch.arange(rows)[:, None]
    if nested:
        data = torch.nested.as_nested_tensor(list(data), layout=torch.jagged)
    with pytest.raises(OrderError, match=message.replace("[", r"\[").replace("]", r"\]")):
        micro_batches.restore_dynamic_batch(lambda *_: pytest.fail("was called"), data, indices)


def test_a_sample_that_fills_up_has_no_loss() -> None:
    masks = torch.ones(3, 7, dtype=torch.bool)
    made, indices = rearranged(
        [40, 30, 60], fields={"response_mask": masks}, num_batches_divided_by=4
    )
    assert sorted(indices) == [[0], [1], [1], [2]]
    masked = [not micro_batch["response_mask"].any() for micro_batch in made]
    assert [samples for samples, empty in zip(indices, masked, strict=True) if empty] == [[1]]
    assert masks.all()


def test_it_is_refused_where_verl_counts_the_tokens_that_were_run() -> None:
    fields = {"routed_num_tokens": torch.tensor(130)}
    with pytest.raises(HookError, match=r"fewer samples than its 4 micro-batches.*mini_batch_size"):
        rearranged([40, 30, 60], fields=fields, num_batches_divided_by=4)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 2), (4, 1)])
def test_it_is_the_plan_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, stages: int, chunks: int
) -> None:
    # Without `dp_group` more experts than this rank's own share of the job are no error.
    of_groups = {"pipeline_model": stages, "virtual_pipeline_model": chunks, "expert_model": 8}
    of_groups |= {"context": 2, "tensor_model": 2}
    state = SimpleNamespace(model_parallel_is_initialized=lambda: True)
    for name, size in of_groups.items():
        setattr(state, f"get_{name}_parallel_world_size", functools.partial(int, size))
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    sizes = {"pipeline_parallel": stages, "virtual_pipeline": chunks, "context_parallel": 2}
    dims = ParallelDims(**sizes, tensor_parallel=2, sequence_parallel=True)
    step = plan_locally(LENGTHS, dims, PlannerConfig(max_tokens_per_gpu=60), [0] * 12)
    _, indices = rearranged(LENGTHS, 120)
    assert indices == [list(samples) for samples in step.micro_batches[0]]
    for samples in indices:  # padded to multiples of 8, as verl pads for both
        assert sum(-(-LENGTHS[i] // 8) * 8 for i in samples) <= 120


FAILED = "RankFailedError: failed on some ranks.*rank 1: "
CASES: dict[str, tuple[list[list[int]], dict[str, Any], Any]] = {
    "one rank needs more": ([[60, 60, 60, 60], [10, 10, 10, 10]], {}, [4, 4]),
    "groups of four": (
        [[60, 55, 58, 52, 51], [10, 10, 10, 10, 9]],
        {"num_batches_divided_by": 4},
        [8, 8],
    ),
    "alone": ([[60, 60, 60], [10, 10, 10]], {"same_micro_num_in_dp": False}, [3, 1]),
    "over the cap": (
        [[60, 101], [10, 10]],
        {},
        "101 tokens, a micro-batch may hold 100: set ppo_max_token_len_per_gpu",
    ),
    "no sample": ([[60], []], {}, "a data-parallel rank has no sample: set ppo_mini_batch_size hi"),
    # It left the others waiting.
    "batch cannot be read": ([[60, 5], [10, 10]], {}, f"{FAILED}KeyError: 'attention_mask'"),
    "planning fails": ([[60, 5], [10, 10]], {}, f"{FAILED}ZeroDivisionError"),
}
"""By name: the lengths of each rank's samples, verl's options, and how many micro-batches each rank
has, or the error of both."""


def rearrange_all(rank: int, size: int) -> dict[str, Any]:
    """What each case came to on this rank, an error as its text; the last rank is at fault."""
    micro_batches._select, packing, report = selected, local.pack_local, {}
    for case, (lengths, options, _) in CASES.items():
        batch, is_last = padded_batch(lengths[rank]), rank == size - 1
        if case == "planning fails" and is_last:
            local.pack_local = lambda problem: 1 // 0
        if case == "batch cannot be read" and is_last:
            del batch["attention_mask"]
        try:
            made = micro_batches.rearrange_micro_batches(
                None, batch, CAP, dist.group.WORLD, **options
            )
            report[case] = made[1]
        except Exception as error:
            report[case] = f"{type(error).__name__}: {error}"
        local.pack_local = packing
    return report


def test_ranks_have_equally_many_or_the_same_error(tmp_path: Path) -> None:
    reports = reports_of_group(rearrange_all, 2, tmp_path)
    for case, (_, _, expected) in CASES.items():
        found = [report[case] for report in reports]
        if isinstance(expected, str):
            assert all(re.search(expected, each, re.DOTALL) for each in found), case
        else:
            assert list(map(len, found)) == expected, case
    for report, lengths in zip(reports, CASES["groups of four"][0], strict=True):
        flat = sorted(itertools.chain.from_iterable(report["groups of four"]))
        shortest = lengths.index(min(lengths))
        assert flat == sorted([*range(5), *[shortest] * 3])


def test_consecutive_samples_that_belong_together_are_left_to_verl() -> None:
    given: list[Any] = []
    options = {"num_batches_divided_by": 2, "force_group_size": 2}
    micro_batches.rearrange_micro_batches(lambda *all_: given.extend(all_), {}, 9, **options)
    assert given == [{}, 9, None, 2, True, None, True, 2]


ROW_CAP = 64


def sizes_with_groups(ranks: int) -> set[int]:
    """Sizes of rows that Megatron makes groups for (`create_dynamic_dp_cp_groups`), and all ranks,
    whose group it has anyway."""
    return {2**n for n in range(int(math.log2(ranks)))} | {ranks}


@examples(100)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.data())
def test_the_contract_of_shared_rows_holds(ranks: int, data: st.DataObject) -> None:
    """What verl checks, and the cap: of several samples in a row, padding included."""
    lengths = data.draw(st.lists(st.integers(1, ROW_CAP * ranks), min_size=1, max_size=20))
    rows = []
    scheduler = RowScheduler(max_seqlen_per_dp_cp_rank=ROW_CAP, cp_size=1, dp_size=ranks)
    numbered = [(10 + i, length) for i, length in enumerate(lengths)]
    for of_slot in scheduler.get_groups_and_subsamples(numbered):
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
                assert len(samples) == 1 or sum(padded) <= ROW_CAP * len(members)
    assert sorted(itertools.chain(*rows)) == [10 + i for i in range(len(lengths))]


@pytest.mark.parametrize("value", [None, "", "0", "1", "yes"])
def test_the_plugin_hooks_verl_if_it_is_asked(
    small: Small, monkeypatch: pytest.MonkeyPatch, value: str | None, capfd: Any
) -> None:
    """And prints what is wrong, which verl only logs."""
    small("verl")
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    if value is not None:
        monkeypatch.setenv("MCORE_BATCHING_VERL", value)
    with pytest.raises(HookError) if value == "yes" else contextlib.nullcontext():
        importlib.import_module(PLUGIN)  # as verl loads it
    assert ("verl" in sys.modules) == (value == "1")
    printed, errors = capfd.readouterr()
    hooked, refused = (
        "hooked verl.utils.seqlen_balancing.rearrange_micro_batches",
        (
            "verl keeps its own micro-batches, because",
            "MCORE_BATCHING_VERL must be 1, 0 or unset, got 'yes'",
        ),
    )
    assert (hooked in printed, bool(printed)) == (value == "1",) * 2
    assert [each in errors for each in refused] == [value == "yes"] * 2
    assert bool(errors) == (value == "yes")


def test_verl_finds_the_plugin() -> None:
    tomllib = importlib.import_module("tomllib")
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["verl.plugins"] == {"mcore_batching": PLUGIN}


@pytest.fixture
def own_verl(own: Callable[[str], Path]) -> Path:
    pytest.importorskip("tensordict", reason="verl needs tensordict, which is not installed")
    return own("verl")


START_UP = """
import sys
from kit.stand_ins import StandIns
from frameworks import CHECKOUTS
sys.meta_path.append(StandIns(CHECKOUTS["verl"].stand_ins))
import verl
import verl.utils.seqlen_balancing as balancing
print("replaced", hasattr(balancing.rearrange_micro_batches, "_mcore_batching_original"))
"""


@pytest.mark.parametrize(("value", "replaced"), [("1", True), ("", False), ("2", False)])
def test_verl_loads_the_plugin_on_import(
    own_verl: Path, tmp_path: Path, value: str, replaced: bool
) -> None:
    metadata = tmp_path / "mcore_batching-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: mcore_batching\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\nmcore_batching = {PLUGIN}\n")
    paths = [tmp_path, own_verl, Path(__file__).parent, *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", START_UP],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MCORE_BATCHING_VERL": value},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"replaced {replaced}" in done.stdout
    assert ("hooked verl.utils.seqlen_balancing" in done.stdout) == replaced
    assert ("must be 1, 0 or unset" in done.stderr) == (value == "2")


def test_verls_own_tests_pass_with_ours(own_verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one process; the others need two devices of one's own."""
    path = own_verl / "tests" / "utils" / "test_seqlen_balancing.py"
    if not path.exists():
        pytest.skip(f"{path} is not there: a wheel has no tests")
    monkeypatch.setitem(sys.modules, "verl.utils.model", SimpleNamespace(create_random_mask=mask))
    with hook():
        module = module_of(path)
        module.test_seqlen_balancing()
        module.test_dynamic_batch()


def mask(input_ids: torch.Tensor, **ratios: float) -> torch.Tensor:
    """A random mask with padding on both sides, as verl's tests make them."""
    rows, width = input_ids.shape
    first = torch.randint(int(width * ratios["max_ratio_of_left_padding"]) + 1, (rows, 1))
    least, most = ratios["min_ratio_of_valid_token"], ratios["max_ratio_of_valid_token"]
    valid = torch.randint(int(width * least), int(width * most) + 1, (rows, 1))
    places = torch.arange(width)
    return ((places >= first) & (places < first + valid)).long()


SCHEDULERS = "megatron.core.datasets.data_schedule"
ROW_LENGTHS = [200, 13, 55, 8, 21, 34, 64, 5, 3, 44, 61, 29]


@pytest.mark.usefixtures("own_verl")
def test_verls_own_adapter_takes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample once, in rows that it accepts on every rank; undone, Megatron's class again."""
    # A Megatron that has the scheduler, and so the groups of such rows.
    schedulers: Any = SimpleNamespace(DefaultDynamicCPScheduler=object)
    monkeypatch.setitem(sys.modules, SCHEDULERS, schedulers)
    module = importlib.import_module("verl.utils.dynamic_cp_scheduler")
    tensors = importlib.import_module("verl.utils.tensordict_utils")
    from tensordict import TensorDict

    parts = [torch.arange(n) for n in ROW_LENGTHS]
    batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
            "sample": torch.arange(len(ROW_LENGTHS)),
        },
        batch_size=[len(ROW_LENGTHS)],
    )
    with hook() as hooked:
        assert f"{module.__name__}.get_megatron_dynamic_cp_scheduler_cls" in hooked.hooked
        adapter = module.DynamicCPScheduler(ROW_CAP, dp_size=2, cp_size=2)
        leaders: list[int] = []
        counts, sizes = set(), set()
        for rank in range(4):
            group = SimpleNamespace(size=lambda: 4, rank=lambda rank=rank: rank)
            made = adapter.schedule(batch, group, tp_size=1)
            counts.add(len(made))
            for row in made:
                sizes.add(tensors.get_non_tensor_data(row, "local_cp_size", None))
                if tensors.get_non_tensor_data(row, module.DCP_GROUP_LEADER, None):
                    leaders += row["sample"].tolist()
    assert sorted(leaders) == [*range(len(ROW_LENGTHS))]
    assert len(counts) == 1
    assert max(sizes) == 4
    assert module.get_megatron_dynamic_cp_scheduler_cls() is object
    # One without such groups.
    monkeypatch.setitem(sys.modules, SCHEDULERS, None)
    with hook(), pytest.raises(RuntimeError, match="requires a Megatron-Core build"):
        module.get_megatron_dynamic_cp_scheduler_cls()
