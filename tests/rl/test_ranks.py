"""Advantages and metrics of three processes with gloo: those of all ranks together, or the same
error on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks_worker import SIZE, STEPS, plain_zscores, report, turns_of
from spawned import reports_of_group


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return reports_of_group(report, SIZE, tmp_path_factory.mktemp("ranks"))


ERRORS = {
    "split": r"SplitGroupError: groups are split: 'b' on ranks 0, 2; 'c' on ranks 1, 2; give a "
    r"uid's samples to one rank, and set group to data-parallel ranks alone",
    "integers": r"groups are split: 8 on ranks 0, 2; give",
    "many split": r"4 on ranks 0, 1, 2 and 4 more; give",
    "no uids": r"RankFailedError(.|\n)*rank 1: SchemaError: field 'uids': expected 1 values, one",
    "no uid of a sample": r"RankFailedError(.|\n)*rank 2: LengthError: .* must be hashable, got",
    "uids that do not travel": r"RankFailedError(.|\n)*rank 0: PicklingError: .*lambda",
    "estimator": r"rank 1: estimator is 'rloo', on rank 0 it is 'grpo'",
    "normalize": r"rank 2: normalize is True, on rank 0 it is False",
    "outcome": r"rank 1: outcome is 'sum', on rank 0 it is 'last'",
    "step_wise": r"rank 0: step_wise is True, on rank 1 it is False",
    "field": r"rank 0: SchemaError: field 'rewards': expected 6 values",
    "number of steps": r"rank 1: number of steps is 1, on rank 0 it is 2",
    "metrics of a field": r"rank 1: SchemaError: field 'rewards': expected 2 values, one per samp",
    "metrics of tags": r"rank 1: SchemaError: field 'is_padding': expected 2 values, one per sampl",
    "metrics of other fields": r"rank 1: fields is \['rewards'\], on rank 0 it is \['rewards', '",
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_is_the_same_error_on_every_rank(
    reports: list[dict[str, Any]], case: str
) -> None:
    first, *others = [report[case] for report in reports]
    assert all(other == first for other in others)
    assert re.search(ERRORS[case], first)


@pytest.mark.parametrize(
    "case", ["whole", "padding sample with a real uid", "a rank has no samples", "alone"]
)
def test_groups_that_are_whole_pass(reports: list[dict[str, Any]], case: str) -> None:
    """Padding samples are in no group, a rank without samples takes part, and a process alone has
    no other ranks."""
    assert all(isinstance(report[case], list) for report in reports)
    found = torch.cat(reports[1]["whole"])
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)


def test_ranks_are_named_as_the_job_counts_them(reports: list[dict[str, Any]]) -> None:
    for own in reports[1:]:
        assert "groups are split: 'c' on ranks 1, 2; give" in own["of two ranks"]


@pytest.mark.parametrize("masked", ["both", "one rank is masked", "all masked"])
def test_statistics_of_a_step_are_those_of_all_ranks(
    reports: list[dict[str, Any]], masked: str
) -> None:
    """Where all is masked there was a hang, or NaN."""
    parts = [
        turns_of(rank, masked=rank >= {"both": 2, "one rank is masked": 1}.get(masked, 0))
        for rank in (0, 1)
    ]
    assert reports[2][masked] == []
    for step in STEPS:
        for (rank, i), expected in plain_zscores(parts, step).items():
            assert reports[rank][masked][i].tolist() == pytest.approx(expected, rel=1e-5)


def test_metrics_are_those_of_the_real_samples_of_all_ranks(reports: list[dict[str, Any]]) -> None:
    expected = {"rewards/mean": 4.0, "rewards/max": 7.0, "rewards/min": 1.0}
    assert [report["metrics"] for report in reports] == [expected] * SIZE
    assert [report["metrics of padding alone"] for report in reports] == [{}] * SIZE
