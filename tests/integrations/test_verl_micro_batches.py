"""verl's micro-batches made by this package: the contract, agreement between ranks, the hook."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.stand_ins import forget
from planning_cases import examples, plan_locally
from rank_workers import CAP, VERL, batch_of, rearrange_all
from spawned import reports_of_group
from verl_package import small_verl

from mcore_batching.batch import OrderError
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.verl import hook, micro_batches
from mcore_batching.planning import ParallelDims, PlannerConfig

__all__ = ["small_verl"]


def rearranged(
    lengths: list[int], cap: int = CAP, *, fields: Any = None, **options: Any
) -> tuple[list[Any], Any]:
    """Without verl, of dense tensors."""
    batch = batch_of(lengths) | (fields or {})
    with mock.patch.object(micro_batches, "_select", selected):
        return micro_batches.rearrange_micro_batches(None, batch, cap, **options)


def selected(batch: dict[str, torch.Tensor], samples: list[int]) -> dict[str, torch.Tensor]:
    return {name: values[samples] for name, values in batch.items()}


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
    assert torch.equal(restored, batch_of(lengths)["input_ids"])


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


def test_samples_that_no_micro_batch_holds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"101 tokens.*hold 100: set ppo_max_token_len_per_gpu"):
        rearranged([40, 101])
    with pytest.raises(ValueError, match="has no sample: set ppo_mini_batch_size higher"):
        rearranged([])


def groups_of(**sizes: int) -> SimpleNamespace:
    """Megatron's parallel state, as far as it is asked."""
    names = ("context", "tensor", "pipeline", "expert")
    functions = {
        f"get_{name}_{'' if name == 'context' else 'model_'}parallel_world_size": sizes.get(name, 1)
        for name in names
    }
    functions["get_virtual_pipeline_model_parallel_world_size"] = sizes.get("chunks")
    made: dict[str, Any] = {name: lambda size=size: size for name, size in functions.items()}
    return SimpleNamespace(model_parallel_is_initialized=lambda: True, **made)


def test_in_a_pipeline_it_is_the_plan_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without `dp_group` more experts than this rank's own share of the job are no error.
    state = groups_of(pipeline=4, context=2, tensor=2, expert=8)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    lengths = [90, 13, 55, 8, 21, 34, 70, 5, 3, 44, 61, 29]
    dims = ParallelDims(
        pipeline_parallel=4, context_parallel=2, tensor_parallel=2, sequence_parallel=True
    )
    step = plan_locally(lengths, dims, PlannerConfig(max_tokens_per_gpu=60), [0] * 12)
    _, indices = rearranged(lengths, 120)
    assert indices == [list(samples) for samples in step.micro_batches[0]]
    for samples in indices:  # padded to multiples of 8, as verl pads for both
        assert sum(-(-lengths[i] // 8) * 8 for i in samples) <= 120


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return reports_of_group(rearrange_all, 2, tmp_path_factory.mktemp("verl"))


def test_ranks_have_equally_many(reports: list[dict[str, Any]]) -> None:
    for case, count in {"one rank needs more": 4, "groups of four": 8}.items():
        assert [len(report[case]) for report in reports] == [count, count]
    assert [len(report["alone"]) for report in reports] == [3, 1]
    for report, lengths in zip(reports, VERL["groups of four"][0], strict=True):
        flat = sorted(itertools.chain.from_iterable(report["groups of four"]))
        shortest = lengths.index(min(lengths))
        assert flat == sorted([*range(5), *[shortest] * 3])


def test_errors_of_one_rank_are_raised_on_all(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "a sample has 101 tokens, a micro-batch may hold 100" in report["over the cap"]
        assert "a data-parallel rank has no sample" in report["no sample"]
    for case, own in (
        ("planning fails", "ZeroDivisionError"),
        ("batch cannot be read", "KeyError: 'attention_mask'"),  # left the others waiting
    ):
        for report in reports:
            assert report[case].startswith("RankFailedError: failed on some ranks")
            assert f"rank 1: {own}" in report[case]


def test_both_functions_are_replaced_everywhere_and_put_back(small_verl: Path) -> None:
    engine = importlib.import_module("verl.workers.engine.utils")
    module = importlib.import_module("verl.utils.seqlen_balancing")
    own = dict(vars(engine))
    with hook() as hooked:
        assert sorted(hooked.hooked) == [
            f"{each}.{name}"
            for each in ("verl.utils.seqlen_balancing", "verl.workers.engine.utils")
            for name in ("rearrange_micro_batches", "restore_dynamic_batch")
        ]
        _, indices = engine.rearrange_micro_batches(batch_of([60, 30, 50]), max_token_len=100)
        assert sorted(map(sorted, indices)) == [[0, 1], [2]] or len(indices) == 2
        # Consecutive samples that belong together are left to verl.
        assert engine.rearrange_micro_batches(None, 9, force_group_size=2) == ("own", 2)
        with pytest.raises(HookError, match="hooked already"):
            hook()
    assert dict(vars(engine)) == own
    assert module.rearrange_micro_batches(None, 9) == ("own", 1)


def test_another_signature_is_refused_by_name(small_verl: Path) -> None:
    path = small_verl / "utils" / "seqlen_balancing.py"
    path.write_text(path.read_text().replace("min_num_micro_batch=None", "least=None"))
    forget("verl")
    with pytest.raises(HookError, match=r"found rearrange_micro_batches.*, least=None"):
        hook()
