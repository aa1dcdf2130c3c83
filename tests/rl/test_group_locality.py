"""A group on two ranks is an error on every rank, and nothing else is: three processes, gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_locality_worker import check_all
from spawned import reports_of_group

NUM_RANKS = 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[dict[Any, Any]]:
    return reports_of_group(check_all, NUM_RANKS, tmp_path_factory.mktemp("split_groups"))


def test_a_split_group_is_the_same_error_on_every_rank(reports: list[dict[Any, Any]]) -> None:
    first, *others = [report["advantages", "split"] for report in reports]
    assert all(other == first for other in others)
    assert first["type"] == "SplitGroupError"
    assert "split: 'b' on ranks 0, 2; 'c' on ranks 1, 2; give a uid's samples" in first["message"]
    assert "set group to data-parallel ranks alone" in first["message"]


@pytest.mark.parametrize(
    "case", ["whole", "padding sample with a real uid", "a rank has no samples"]
)
def test_whole_groups_pass(reports: list[dict[Any, Any]], case: str) -> None:
    """Padding samples are in no group, and a rank without samples takes part."""
    for report in reports:
        assert isinstance(report["advantages", case], list)


def test_whole_groups_have_their_advantages(reports: list[dict[Any, Any]]) -> None:
    found = torch.cat(reports[1]["advantages", "whole"])
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)


def test_uids_are_equal_by_value(reports: list[dict[Any, Any]]) -> None:
    for report in reports:
        assert (
            "groups are split: 8 on ranks 0, 2; give" in report["advantages", "integers"]["message"]
        )


@pytest.mark.parametrize(
    ("case", "at_fault", "error", "text"),
    [
        ("no uids on a rank", 1, "SchemaError", "field 'uids': expected 1 values, one per sample"),
        ("no uid of a sample", 2, "LengthError", "must be hashable, got"),
        ("uids that do not travel", 0, "PicklingError", "lambda"),
    ],
)
def test_what_is_wrong_with_one_ranks_uids_is_an_error_on_all(
    reports: list[dict[Any, Any]], case: str, at_fault: int, error: str, text: str
) -> None:
    first, *others = [report["advantages", case] for report in reports]
    assert all(other == first for other in others)
    assert first["type"] == "RankFailedError"
    assert f"rank {at_fault}: {error}: " in first["message"]
    assert text in first["message"]


def test_a_message_lists_a_few_groups(reports: list[dict[Any, Any]]) -> None:
    outcome = reports[0]["advantages", "many split"]
    assert "4 on ranks 0, 1, 2 and 4 more; give" in outcome["message"]


def test_ranks_are_named_as_the_job_counts_them(reports: list[dict[Any, Any]]) -> None:
    for report in reports[1:]:
        assert "groups are split: 'c' on ranks 1, 2; give" in report["subgroup"]["message"]


def test_a_process_alone_sees_no_other_ranks(reports: list[dict[Any, Any]]) -> None:
    assert all(isinstance(report["alone"], list) for report in reports)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("estimator", "rank 1: estimator is 'rloo', on rank 0 it is 'grpo'"),
        ("normalize", "rank 2: normalize is True, on rank 0 it is False"),
        ("outcome", "rank 1: outcome is 'sum', on rank 0 it is 'last'"),
        ("step_wise", "rank 0: step_wise is True, on rank 1 it is False"),
    ],
)
def test_arguments_that_differ_are_an_error_and_no_hang(
    reports: list[dict[Any, Any]], argument: str, text: str
) -> None:
    messages = {report["differs", argument]["message"] for report in reports}
    assert len(messages) == 1
    assert text in messages.pop()
