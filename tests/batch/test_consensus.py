"""What goes wrong on one rank is the same named error on all: six processes, gloo."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from consensus_worker import ADVICE, FAULTS, REPLICAS, cases, run_all
from hypothesis import given
from hypothesis import strategies as st
from spawned import reports_of_group

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import (
    LONGEST_TEXT,
    BatchError,
    CollectiveError,
    DisagreementError,
    RankFailedError,
)
from mcore_batching.batch.messages import (
    MESSAGE_BYTES,
    NUMBERS_IN_MESSAGE,
    _joined,
    _message,
    reduced,
    residue_of,
)

NUM_RANKS = 6


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return reports_of_group(run_all, NUM_RANKS, tmp_path_factory.mktemp("consensus"))


@pytest.mark.parametrize("case", FAULTS)
def test_a_failure_on_one_rank_is_raised_on_all(reports: list[dict[str, Any]], case: str) -> None:
    _, cause, text = FAULTS[case]
    assert [report[case]["type"] for report in reports] == ["RankFailedError"] * NUM_RANKS
    assert len({report[case]["message"] for report in reports}) == 1
    assert text in reports[0][case]["message"]
    assert list(reports[0][case]["failures"]) == [2]
    assert len(reports[0][case]["message"]) < LONGEST_TEXT + 200
    others = [report[case]["cause"] for rank, report in enumerate(reports) if rank != 2]
    assert others == ["NoneType"] * 5
    assert cause in reports[2][case]["cause"]
    assert reports[2][case]["cause"] != "NoneType"


def test_a_rank_that_exits_ends_itself_and_is_named_on_the_others(
    reports: list[dict[str, Any]],
) -> None:
    exiting, *others = [reports[rank]["one exits"] for rank in (2, 0, 1, 3, 4, 5)]
    assert [report["type"] for report in others] == ["RankFailedError"] * 5
    assert [report["failures"] for report in others] == [{2: "SystemExit: no data"}] * 5
    assert exiting["type"] == "SystemExit"


def test_what_all_ranks_raise_alike_is_raised_as_it_is(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["all raise alike"]["type"] == "ConfigError"
        assert report["all raise alike"]["message"] == ADVICE
        assert report["all raise"]["type"] == "RankFailedError"
        assert list(report["all raise"]["failures"]) == [*range(NUM_RANKS)]


def test_the_caller_names_the_disagreement(reports: list[dict[str, Any]]) -> None:
    assert {report["own mismatch"]["type"] for report in reports} == {"OtherDisagreementError"}


def test_a_part_of_the_ranks_agrees_by_itself(reports: list[dict[str, Any]]) -> None:
    for report in reports[1:3]:
        assert report["subgroup"]["every"] == {1: 1, 2: 2}
        assert report["subgroup"]["reductions"] == {"n": 2}
        assert report["subgroup fails"]["failures"] == {2: "ValueError: here"}


def test_one_process_needs_no_group() -> None:
    alone = Consensus(None)
    with alone.agreement("") as agree:
        everyone = agree.every("value", 1)
        a, b = agree.sum("a", [1]), agree.min("b", 2)
    assert (everyone.by_rank, a.value, b.value) == ({0: 1}, [1], 2)
    with pytest.raises(ZeroDivisionError), alone.agreement(""):
        _ = 1 // 0


def test_a_reduction_has_no_value_before_the_block_ends() -> None:
    with Consensus(None).agreement("") as agree:
        a = agree.max("a", 1)
        with pytest.raises(RuntimeError, match="once the agreement's block has ended"):
            _ = a.value


def test_an_interrupt_leaves_the_block_without_a_collective() -> None:
    class Unreachable(Consensus):
        def reports(self, report: Any) -> Any:
            raise AssertionError("a collective")

    with pytest.raises(KeyboardInterrupt), Unreachable(None).agreement(""):
        raise KeyboardInterrupt


def test_the_errors_are_those_of_a_batch() -> None:
    for error in (RankFailedError, DisagreementError):
        assert issubclass(error, CollectiveError)
        assert issubclass(error, RuntimeError)
        assert issubclass(error, BatchError)


CASES = cases(0)


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if each.messages])
def test_maxima_and_sums_are_those_of_all_ranks(reports: list[dict[str, Any]], case: str) -> None:
    """As Python's ``max`` and ``sum`` over ranks and replicas, the same bits on every rank; where
    all goes well a few small messages do."""
    parts = [cases(rank)[case].reductions for rank in range(NUM_RANKS)]
    firsts = [parts[replica[0]] for replica in REPLICAS]
    join = {"max": max, "min": min, "sum": sum, "sum_over_ranks": sum}
    expected = {}
    for name, (kind, value) in parts[0].items():
        given = [each[name][1] for each in (firsts if kind == "sum" else parts)]
        is_list = isinstance(value, list)
        columns = zip(*given, strict=True) if is_list else [given]
        joined = list(map(join[kind], columns))
        expected[name] = joined if is_list else joined[0]
    for report in (rank[case] for rank in reports):
        assert report["type"] is None
        assert repr(sorted(report["reductions"].items())) == repr(sorted(expected.items()))
        most = CASES[case].messages
        assert most == math.inf or (report["gathers"] == 0 and report["messages"] <= most)
    assert MESSAGE_BYTES <= 1300


def test_who_asks_is_told_and_so_are_all(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["one asks"]["every"] == {each: each for each in range(NUM_RANKS)}
        assert report["nobody asks"]["every"] == {rank: rank}


def test_values_of_replicas_are_those_of_the_ranks_at_ones_own_place(
    reports: list[dict[str, Any]],
) -> None:
    for rank, report in enumerate(reports):
        given = {each: each if each < 3 else None for each in range(NUM_RANKS)}
        expected = {ranks[rank // 3]: given[ranks[rank // 3]] for ranks in REPLICAS}
        assert report["of replicas"] == (expected, [None] * 3)


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if each.failures])
def test_no_difference_is_lost_in_a_summary(reports: list[dict[str, Any]], case: str) -> None:
    for report in (rank[case] for rank in reports):
        assert report["type"] == "DisagreementError"
        assert report["failures"] == CASES[case].failures
        assert report["gathers"] == 1


def test_messages_reach_all_of_any_number_of_ranks(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["messages"] == {
            size: (bytes([0, size - 1]), [bytes([each, 7]) for each in range(size)])
            for size in range(rank + 1, NUM_RANKS + 1)
        }


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**40), 2**40) | st.floats(allow_nan=False),
            st.integers(-(2**40), 2**40),
        ),
        min_size=1,
        max_size=9,
    ),
    st.randoms(use_true_random=False),
)
def test_joined_in_any_tree_numbers_are_the_same(
    values: list[tuple[float, int]], random: Any
) -> None:
    parts = [_message(([most], [addend])) for most, addend in values]
    while len(parts) > 1:
        at = random.randrange(len(parts) - 1)
        parts[at : at + 2] = [_joined(parts[at], parts[at + 1])]
    most, total = max(most for most, _ in values), sum(addend for _, addend in values)
    assert pickle.loads(parts[0]) == ([most], [total])


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), min_size=1, max_size=4))
def test_residues_vanish_where_each_replica_is_of_one_mind(replicas: list[list[str]]) -> None:
    residue = sum(
        residue_of("replica", {"samples": said}, number, place, len(replica))
        for number, replica in enumerate(replicas)
        for place, said in enumerate(replica)
    )
    assert (residue % 2**128 == 0) == all(len(set(replica)) == 1 for replica in replicas)


def test_a_message_holds_the_numbers_it_is_made_for() -> None:
    """A hundred ranks' 64-bit integers and floats, or none of it."""

    class Alone:
        def reduce(self, own: bytes, combine: Any) -> bytes:
            return combine(own, own)

    least, digest = -(2**63), 2**128 - 1
    for numbers in ([least] * NUMBERS_IN_MESSAGE, [0.1] * NUMBERS_IN_MESSAGE):
        own: Any = [digest, -digest, digest, -digest, *numbers], [digest]
        assert reduced(Alone(), own) == (own[0], [2 * digest])  # type: ignore[arg-type]
    for unfit in ([math.nan], ["a" * MESSAGE_BYTES]):
        assert reduced(Alone(), (unfit, [])) is None  # type: ignore[arg-type]
    assert reduced(Alone(), None) is None  # type: ignore[arg-type]
