"""The guarantees of masked statistics and metrics: in one process, and in two with gloo."""

from __future__ import annotations

import math
import statistics as plain
from typing import Any

import pytest
import torch
from batch_cases import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_worker import CASES, batch_of, reduce_all, shard
from spawned import reports_of

from mcore_batching.batch import BatchError, SchemaError
from mcore_batching.rl import pad_batch, real_samples, sample_metrics
from mcore_batching.rl.metrics import masked_zscore
from mcore_batching.rl.real_samples import real_indices


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-100, 100), st.booleans()), max_size=5),
        max_size=5,
    )
)
def test_statistics_are_those_of_the_values_that_are_left(
    rows: list[list[tuple[float, bool]]],
) -> None:
    values = [
        torch.tensor([v if m else math.nan for v, m in row], dtype=torch.float64) for row in rows
    ]
    masks = [torch.tensor([m for _, m in row], dtype=torch.bool) for row in rows]
    kept = [v for row in rows for v, m in row if m]
    scores = masked_zscore(values, masks, epsilon=1e-8)
    assert [score.shape for score in scores] == [value.shape for value in values]
    if not kept:
        assert all(score.tolist() == [0.0] * len(score) for score in scores)
        return
    scale = math.sqrt(plain.pvariance(kept) + 1e-8)
    for row, score in zip(rows, scores, strict=True):
        expected = [(v - plain.fmean(kept)) / scale if m else 0.0 for v, m in row]
        assert score.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_variance_of_large_values_keeps_its_digits() -> None:
    values = torch.tensor([[1e8, 1e8 + 1]], dtype=torch.float64)
    assert masked_zscore(values, torch.ones(1, 2), epsilon=0.0)[0].tolist() == [-1.0, 1.0]


def test_zscore_keeps_type_and_shape_and_carries_no_gradient() -> None:
    value = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    (score,) = masked_zscore([value], [torch.ones(1, 2)])
    assert (score.dtype, score.tolist(), score.requires_grad) == (torch.bfloat16, [[-1, 1]], False)
    assert masked_zscore([torch.tensor([1, 3])], [torch.ones(2)])[0].dtype == torch.float32
    (score,) = masked_zscore([torch.tensor([2.0, 2.0])], [torch.ones(2)], epsilon=0.0)
    assert score.tolist() == [0.0, 0.0]


def test_skyrl_fault_the_mean_of_zscores_counts_padding() -> None:
    """Padding of 0 beside advantages of 10 and 20 moves the unmasked mean to 7.5."""
    values = torch.tensor([[10.0, 20.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0]])
    assert masked_zscore(values, mask)[0].tolist() == pytest.approx([-1, 1, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("values", "masks", "message"),
    [
        ([torch.ones(2)], [], "expected 1 masks, one for each value, got 0"),
        ([torch.ones(2)], [torch.ones(1)], r"mask 0 has shape \[1\], its value \[2\]"),
    ],
)
def test_masks_that_do_not_fit_are_refused(values: Any, masks: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        masked_zscore(values, masks)


def padded(count: int, multiple: int) -> dict[str, Any]:
    samples = {
        **make_samples([(5, 2)] * count),
        "rewards": [1.0 + i for i in range(count)],
        "uids": ["a", "b"] * (count // 2),
    }
    return pad_batch(samples, multiple, pad_token_id=0)


def test_real_samples_are_those_that_were_not_fabricated() -> None:
    batch = padded(4, 7)
    assert real_indices(batch) == [0, 1, 2, 3]
    real = real_samples(batch)
    assert {len(values) for values in real.values()} == {4}
    assert real["uids"] == ["a", "b", "a", "b"]
    assert real_indices({"uids": [1, 2, 3]}) == [0, 1, 2]
    assert real_indices(make_samples([])) == []


def test_tags_that_are_not_one_a_sample_are_refused() -> None:
    batch = {**make_samples([(2, 1)] * 3), "is_padding": [False, True], "rewards": [1.0] * 3}
    for function in (real_indices, real_samples, lambda each: sample_metrics(each, ["rewards"])):
        with pytest.raises(SchemaError, match=r"'is_padding': expected 3 values, .* 2 values"):
            function(batch)


def test_verl_fault_metrics_count_padding() -> None:
    metrics = sample_metrics(padded(4, 16), ["rewards", "response_lengths"])
    assert metrics == {
        "rewards/mean": 2.5,
        "rewards/max": 4.0,
        "rewards/min": 1.0,
        "response_lengths/mean": 2.0,
        "response_lengths/max": 2.0,
        "response_lengths/min": 2.0,
    }


def test_verl_fault_metrics_of_a_batch_that_is_all_padding() -> None:
    batch = padded(4, 16)
    only_padding = {key: values[4:] for key, values in batch.items()}
    assert sample_metrics(only_padding, ["rewards"]) == {}
    assert sample_metrics(make_samples([]), ["response_lengths"]) == {}


@pytest.mark.parametrize(
    "values", [None, [1.0], [1.0, 2.0, 3.0], [1.0, "a"], [1.0, "2"], [1.0, torch.ones(2)]]
)
def test_a_metric_of_what_is_no_number_a_sample_is_refused(values: Any) -> None:
    with pytest.raises(SchemaError, match=r"'rewards'.*: expected .* per sample.* a metric of"):
        sample_metrics({"total_lengths": [2, 2], "rewards": values}, ["rewards"])


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[Any]:
    return reports_of(reduce_all, 2, tmp_path_factory.mktemp("masked"))


@pytest.mark.parametrize("case", CASES)
def test_statistics_of_two_ranks_are_those_of_all_values(reports: list[Any], case: str) -> None:
    together = [a + b for a, b in zip(shard(case, 0), shard(case, 1), strict=True)]
    scores = reports[0][case] + reports[1][case]
    for score, wanted in zip(scores, masked_zscore(*together), strict=True):
        assert torch.allclose(score, wanted)
        assert torch.isfinite(score).all()


@pytest.mark.parametrize("case", ["some", "one rank", "all"])
def test_metrics_of_two_ranks(reports: list[Any], case: str) -> None:
    rewards = [
        reward
        for rank in (0, 1)
        for reward, tag in zip(
            batch_of(case, rank)["rewards"], batch_of(case, rank)["is_padding"], strict=True
        )
        if not tag
    ]
    expected = (
        {
            "rewards/mean": plain.fmean(rewards),
            "rewards/max": max(rewards),
            "rewards/min": min(rewards),
        }
        if rewards
        else {}
    )
    assert [report["metrics", case] for report in reports] == [expected] * 2


def test_what_is_wrong_on_one_rank_is_an_error_on_all(reports: list[Any]) -> None:
    for report in reports:
        for name, text in (
            ("field", "SchemaError: field 'rewards': expected 2 values, one per sample"),
            ("tags", "SchemaError: field 'is_padding': expected 2 values, one per sample"),
            ("mask", "BatchError: mask 0 has shape [3], its value [2]"),
        ):
            assert f"rank 1: {text}" in report["error", name]
