"""What goes wrong on one rank is the same named error on all: three processes, gloo."""

from __future__ import annotations

from typing import Any

import pytest
from consensus_worker import run_all
from spawned import reports_of

from mcore_batching.batch.consensus import (
    CollectiveError,
    Consensus,
    DisagreementError,
    RankFailedError,
    Statement,
)
from mcore_batching.batch.errors import BatchError

NUM_RANKS = 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return reports_of(run_all, NUM_RANKS, tmp_path_factory.mktemp("consensus"))


def test_every_rank_learns_what_was_told(reports: list[dict[str, Any]]) -> None:
    """Ranks 0 and 1 are one replica: its samples count once."""
    for report in reports:
        assert report["alike"] == {
            "result": 0,
            "told": {rank: ("rank", rank) for rank in range(3)},
            "largest": [2, 0],
            "total": [21, 1.0],
        }


@pytest.mark.parametrize(
    ("case", "cause", "text"),
    [
        ("one raises", "ZeroDivisionError", "rank 2: ZeroDivisionError: by zero"),
        (
            "one is unprintable",
            "UnprintableError",
            "rank 2: UnprintableError (its message raised RuntimeError)",
        ),
        ("one is not callable", "TypeError", "rank 2: TypeError: 'NoneType' object is not call"),
        (
            "one speaks of an argument",
            "ConfigError",
            "rank 2: ConfigError: set --max_tokens_per_gpu",
        ),
        ("one cannot travel", "", "rank 2: "),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(
    reports: list[dict[str, Any]], case: str, cause: str, text: str
) -> None:
    assert [report[case]["type"] for report in reports] == ["RankFailedError"] * 3
    assert len({report[case]["message"] for report in reports}) == 1
    assert text in reports[0][case]["message"]
    assert list(reports[0][case]["failures"]) == [2]
    assert [report[case]["cause"] for report in reports[:2]] == ["NoneType"] * 2
    assert cause in reports[2][case]["cause"]
    assert reports[2][case]["cause"] != "NoneType"


def test_what_all_ranks_raise_alike_is_raised_as_it_is(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["all raise alike"]["type"] == "ConfigError"
        assert report["all raise alike"]["message"] == "set --max_tokens_per_gpu"
        assert report["all raise"]["type"] == "RankFailedError"
        assert list(report["all raise"]["failures"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("case", "failures"),
    [
        ("value differs", {1: "cap is 9, on rank 0 it is 8"}),
        ("replica differs", {1: "samples is 1, on rank 0 it is 0"}),
        (
            "number of sums differs",
            {
                1: "number of sums is 1, on rank 0 it is 0",
                2: "number of sums is 2, on rank 0 it is 0",
            },
        ),
        ("stage differs", {2: "stage is 'sums', on rank 0 it is 'counts'"}),
        ("stage differs and one raises", {2: "stage is 'sums', on rank 0 it is 'counts'"}),
    ],
)
def test_a_difference_names_the_rank_and_a_witness(
    reports: list[dict[str, Any]], case: str, failures: dict[int, str]
) -> None:
    for report in reports:
        assert report[case]["type"] == "DisagreementError"
        assert report[case]["failures"] == failures


def test_a_value_that_a_rank_leaves_out_is_not_compared(reports: list[dict[str, Any]]) -> None:
    assert [report["left out"]["told"] for report in reports] == [{0: None}, {1: None}, {2: None}]


def test_the_caller_names_the_disagreement(reports: list[dict[str, Any]]) -> None:
    assert {report["own mismatch"]["type"] for report in reports} == {"OtherDisagreementError"}


def test_a_part_of_the_ranks_agrees_by_itself(reports: list[dict[str, Any]]) -> None:
    for report in reports[1:]:
        assert report["subgroup"]["told"] == {1: 1, 2: 2}
        assert report["subgroup"]["total"] == [2]
        assert report["subgroup fails"]["failures"] == {2: "ValueError: here"}


def test_one_process_needs_no_group() -> None:
    alone = Consensus(None)
    agreed = alone.agree("", lambda: [1], lambda v: Statement(tell=len(v), largest=v, total=v))
    assert (agreed.result, agreed.told, agreed.largest, agreed.total) == ([1], {0: 1}, [1], [1])
    with pytest.raises(ZeroDivisionError):
        alone.agree("", lambda: 1 // 0)


def test_the_errors_are_those_of_a_batch() -> None:
    for error in (RankFailedError, DisagreementError):
        assert issubclass(error, CollectiveError)
        assert issubclass(error, RuntimeError)
        assert issubclass(error, BatchError)
