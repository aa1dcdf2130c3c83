"""The guarantees of metrics; of several ranks: test_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_cases import make_samples

from mcore_batching.batch import BatchError, SchemaError
from mcore_batching.rl import pad_batch, real_samples, sample_metrics
from mcore_batching.rl.real_samples import real_indices


def padded(count: int, multiple: int) -> dict[str, Any]:
    samples = {
        **make_samples([(5, 2)] * count),
        "rewards": [1.0 + i for i in range(count)],
        "uids": ["a", "b"] * (count // 2),
    }
    return pad_batch(samples, multiple, pad_token_id=0)


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


def test_names_may_come_one_by_one() -> None:
    batch = padded(4, 16)
    expected = sample_metrics(batch, ["rewards", "response_lengths"])
    assert sample_metrics(batch, (n for n in ("rewards", "response_lengths"))) == expected
    for names in ("rewards", [3]):
        with pytest.raises(BatchError, match=r"fields must (be a sequence|hold names of fields)"):
            sample_metrics(batch, names)


def test_verl_fault_metrics_of_a_batch_that_is_all_padding() -> None:
    batch = padded(4, 16)
    only_padding = {key: values[4:] for key, values in batch.items()}
    assert sample_metrics(only_padding, ["rewards"]) == {}
    assert sample_metrics(make_samples([]), ["response_lengths"]) == {}


@pytest.mark.parametrize(
    "values", [None, [1.0], [1.0, 2.0, 3.0], [1.0, "a"], [1.0, "2"], [1.0, torch.ones(2)]]
)
def test_a_metric_of_what_is_no_number_a_sample_is_refused(values: Any) -> None:
    with pytest.raises(SchemaError, match=r"'rewards'.*: expected .* per sample"):
        sample_metrics({"total_lengths": [2, 2], "rewards": values}, ["rewards"])
