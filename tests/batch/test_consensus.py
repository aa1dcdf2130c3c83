"""What goes wrong on one rank is the same named error on all: six processes, gloo."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from spawned import reports_of_group

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import LONGEST_TEXT, DisagreementError
from mcore_batching.batch.messages import (
    MESSAGE_BYTES,
    NUMBERS_IN_MESSAGE,
    RankMessages,
    reduced,
    residue_of,
)
from mcore_batching.planning.errors import ConfigError

NUM_RANKS = 6
REPLICAS = [[0, 3], [1, 4], [2, 5]]
STAGES = [[0, 3], [1], [4], [2, 5]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What one rank does and names in an agreement, and what comes of it on all."""

    operation: str = ""
    """Else the name of the case."""
    mismatch: type[DisagreementError] = DisagreementError
    body: Any = int
    same: Sequence[tuple[str, Any, str]] = ()
    """Names, values, and the ranks that are compared."""
    every: Any = None
    wanted: bool = False
    reductions: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    """By name a method of the agreement, and a number or a list."""
    messages: float | None = None
    """Where all goes well: as many as a rank sends at most; infinite if reports are gathered."""
    failures: Mapping[int, str] | None = None
    """Of a disagreement: what differs, by rank."""

    def run(self, consensus: Consensus, name: str) -> dict[str, Any]:
        """Name all values in an agreement's block, and read what came of them."""
        with consensus.agreement(self.operation or name, mismatch=self.mismatch) as agree:
            self.body()
            for key, value, scope in self.same:
                agree.same(key, value, within=scope)
            made = {n: getattr(agree, kind)(n, v) for n, (kind, v) in self.reductions.items()}
            everyone = None
            if self.every is not None:
                everyone = agree.every("value", self.every, wanted=self.wanted)
        values = {key: each.value for key, each in made.items()}
        return {"every": everyone and everyone.by_rank, "reductions": values}


class UnprintableError(Exception):
    """An exception whose message cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OtherDisagreementError(DisagreementError):
    """A disagreement of the caller's own kind."""


class Unreadable:
    """What can be sent, but not read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def raises(error: BaseException) -> Callable[[], Any]:
    """A function that raises."""

    def work() -> Any:
        raise error

    return work


FAULTS: dict[str, tuple[Case, str, str]] = {
    "one raises": (
        Case(body=raises(ZeroDivisionError("by zero"))),
        "ZeroDivisionError",
        "rank 2: ZeroDivisionError: by zero",
    ),
    "one is unprintable": (
        Case(body=raises(UnprintableError())),
        "UnprintableError",
        "rank 2: UnprintableError (its message raised RuntimeError)",
    ),
    # More than a job's store takes, and half a character, which cannot be printed.
    "one is long": (
        Case(body=raises(ValueError("begins " + 9_000_000 * "x" + " ends \udc80"))),
        "ValueError",
        r"xxx ends \udc80",
    ),
    "one cannot travel": (Case(every=lambda: 0), "", "rank 2: "),
    # Raised behind the agreement, on this rank alone.
    "one cannot be read": (
        Case(every=Unreadable()),
        "ValueError",
        "rank 2: ValueError: invalid literal for int()",
    ),
}
"""What rank 2 does while the others do nothing, its own error, and what all raise."""


def cases(rank: int) -> dict[str, Case]:
    """By name, what this one of six ranks does."""
    replica, is_two = rank % 3, rank == 2
    operation = {
        "operation": "sums" if is_two else "counts",
        "failures": {2: "operation is 'sums', on rank 0 it is 'counts'"},
    }
    here = raises(ValueError("here")) if is_two else int
    made = {name: case if is_two else Case() for name, (case, *_) in FAULTS.items()}
    return made | {
        "one exits": Case(body=raises(SystemExit("no data")) if is_two else int),
        "all raise alike": Case(body=raises(ConfigError("set it"))),
        "all raise": Case(body=raises(ValueError(f"on {rank}"))),
        "own mismatch": Case(
            same=[("cap", rank, "job")],
            mismatch=OtherDisagreementError,
            failures={other: f"cap is {other}, on rank 0 it is 0" for other in range(1, 6)},
        ),
        "alike": Case(
            same=[
                ("cap", 8, "job"),
                ("fill", "split", "job"),
                ("samples", replica, "replica"),
                *[("temperature", 1.0, "stage")] * (rank == 1),
            ],
            reductions={
                "b": ("max", [rank, 0.1 * rank, -math.inf, math.inf if rank == 4 else 0]),
                "d": ("min", [rank, 0.1 * rank, -math.inf if rank == 4 else 0]),
                "a": ("sum", [2**53 + 1, 0.1 * replica, 0 if replica else 0.5, replica - 1]),
                "c": ("sum_over_ranks", [rank, 0.25 * rank]),
            },
            messages=3,
        ),
        "as many numbers as a message holds": Case(
            reductions={"most": ("max", [rank] * 60), "all": ("sum", [1] * 40)}, messages=3
        ),
        "more numbers than a message holds": Case(
            reductions={
                "b": ("max", [rank * (-1) ** i + i + 0.5 for i in range(130)]),
                "d": ("min", [rank * (-1) ** i + i for i in range(20)]),
                "a": ("sum", [replica * i + 0.5 for i in range(80)]),
                "c": ("sum_over_ranks", [rank * i for i in range(40)]),
            },
            messages=math.inf,
        ),
        "said by some": Case(same=[("names", ["a"], "job")] * (rank in (1, 4)), messages=3),
        "said in part": Case(
            same=[("a", 1, "job") if rank < 4 else ("b", 2, "job")], messages=math.inf
        ),
        "nobody asks": Case(every=rank, wanted=False, messages=3),
        "one asks": Case(
            every=rank,
            wanted=rank == 5,
            reductions={"b": ("sum", [1]), "c": ("sum_over_ranks", rank), "a": ("min", rank)},
            messages=3 + 3,
        ),
        "nan in a sum": Case(
            reductions={"sum": ("sum", math.nan if replica == 1 else 1.0)}, messages=3
        ),
        **{
            f"nan on rank {own} among {more}": Case(
                reductions={"most": ("max", [0] * more + [math.nan if rank == own else rank])},
                messages=math.inf,
            )
            for own, more in ((0, 0), (4, 0), (4, 120))
        },
        "integers beyond 64 bits": Case(
            reductions={"most": ("max", [2**70 + rank]), "sum": ("sum", 2**65)}, messages=math.inf
        ),
        "a sum beyond 64 bits": Case(reductions={"sum": ("sum", [2**62])}, messages=math.inf),
        "a number of another kind": Case(
            reductions={"most": ("max", [torch.tensor(rank)])}, messages=math.inf
        ),
        "one replica differs": Case(
            same=[("samples", rank == 4, "replica")],
            failures={4: "samples is True, on rank 1 it is False"},
        ),
        "two replicas differ crosswise": Case(
            same=[("samples", rank in (0, 4), "replica")],
            failures={
                3: "samples is False, on rank 0 it is True",
                4: "samples is True, on rank 1 it is False",
            },
        ),
        "one stage differs": Case(
            same=[("temperature", [0.5 if rank == 5 else 1], "stage")],
            failures={5: "temperature is [0.5], on rank 2 it is [1]"},
        ),
        "a number of another type differs": Case(
            same=[("cap", 8.0 if is_two else 8, "job")],
            failures={2: "cap is 8.0, on rank 0 it is 8"},
        ),
        "said by some and differs": Case(
            same=[("names", [rank], "job")] * (rank in (1, 4)),
            failures={4: "names is [4], on rank 1 it is [1]"},
        ),
        "number of maxima differs": Case(
            reductions={"most": ("max", [0] * (2 if rank == 3 else 1))},
            failures={3: "reductions is most (max of 2), on rank 0 it is most (max of 1)"},
        ),
        "number of sums differs": Case(
            reductions={"tokens": ("sum", [0] * (rank == 1))},
            failures={1: "reductions is tokens (sum of 1), on rank 0 it is tokens (sum of 0)"},
        ),
        "name of a figure differs": Case(
            reductions={"cost" if rank else "time": ("min", 0)},
            failures={0: "reductions is time (min), on rank 1 it is cost (min)"},
        ),
        "kind of a figure differs": Case(
            reductions={"rows": ("sum_over_ranks" if is_two else "sum", 0)},
            failures={2: "reductions is rows (sum over ranks), on rank 0 it is rows (sum)"},
        ),
        "operation differs": Case(**operation),
        "operation differs and one raises": Case(body=here, **operation),
    }


def run_all(rank: int, size: int) -> dict[str, Any]:
    """What a rank of the group reports of all cases, and of messages among the first ranks."""
    report: dict[str, Any] = {}
    consensus = Consensus(dist.group.WORLD, replicas=REPLICAS, stages=STAGES)
    for name, case in cases(rank).items():
        with (
            mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather,
            mock.patch.object(dist, "isend", wraps=dist.isend) as send,
        ):
            outcome = outcome_of(case, consensus, name)
        report[name] = outcome | {"gathers": gather.call_count, "messages": send.call_count}
    with consensus.agreement("of replicas") as agree:
        some, nothing = agree.gather("some", rank if rank < 3 else None), agree.gather("none", None)
    report["of replicas"] = some.by_rank, nothing.values
    two = dist.new_group([1, 2])
    if rank in (1, 2):
        subgroup = Consensus(two)
        case = Case(every=rank, wanted=True, reductions={"n": ("sum", 1)})
        report["subgroup"] = outcome_of(case, subgroup, "")
        case = Case(body=raises(ValueError("here")) if rank == 2 else int)
        report["subgroup fails"] = outcome_of(case, subgroup, "")
    report["messages"] = {}
    for number in range(rank + 1, size + 1):
        messages = RankMessages(dist.group.WORLD, range(number))
        report["messages"][number] = (
            messages.reduce(bytes([rank, rank]), in_order),
            messages.gather(bytes([rank, 7])),
        )
    return report


def in_order(low: bytes, high: bytes) -> bytes:
    """First and last rank of two neighbouring runs of ranks."""
    assert low[1] + 1 == high[0], (low, high)
    return bytes([low[0], high[1]])


def outcome_of(case: Case, consensus: Consensus, name: str) -> dict[str, Any]:
    """What an agreement came to, or its error after a round trip through pickle."""
    try:
        return {**case.run(consensus, name), "type": None}
    except (Exception, SystemExit) as error:
        cause = type(error.__cause__).__name__
        error = pickle.loads(pickle.dumps(error))
        return {
            "type": type(error).__name__,
            "message": str(error),
            "failures": getattr(error, "failures", None),
            "cause": cause,
        }


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
        assert report["all raise alike"]["message"] == "set it"
        assert report["all raise"]["type"] == "RankFailedError"
        assert list(report["all raise"]["failures"]) == [*range(NUM_RANKS)]


def test_one_process_needs_no_group() -> None:
    alone = Consensus(None)
    with alone.agreement("") as agree:
        everyone = agree.every("value", 1)
        a, b = agree.sum("a", [1]), agree.min("b", 2)
        with pytest.raises(RuntimeError, match="once the agreement's block has ended"):
            _ = a.value
    assert (everyone.by_rank, a.value, b.value) == ({0: 1}, [1], 2)
    with pytest.raises(ZeroDivisionError), alone.agreement(""):
        _ = 1 // 0


def test_an_interrupt_leaves_the_block_without_a_collective() -> None:
    class Unreachable(Consensus):
        def reports(self, report: Any) -> Any:
            raise AssertionError("a collective")

    with pytest.raises(KeyboardInterrupt), Unreachable(None).agreement(""):
        raise KeyboardInterrupt


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


def test_ranks_receive_the_values_of_those_that_are_meant(reports: list[dict[str, Any]]) -> None:
    """Of all if any wants them; of a replica's counterparts; of a part of the ranks by itself."""
    for rank, report in enumerate(reports):
        assert report["one asks"]["every"] == {each: each for each in range(NUM_RANKS)}
        assert report["nobody asks"]["every"] == {rank: rank}
        expected = {replica[rank // 3]: None if rank > 2 else replica[0] for replica in REPLICAS}
        assert report["of replicas"] == (expected, [None] * 3)
    for report in reports[1:3]:
        assert report["subgroup"]["every"] == {1: 1, 2: 2}
        assert report["subgroup"]["reductions"] == {"n": 2}
        assert report["subgroup fails"]["failures"] == {2: "ValueError: here"}


@pytest.mark.parametrize("case", [name for name, each in CASES.items() if each.failures])
def test_no_difference_is_lost_in_a_summary(reports: list[dict[str, Any]], case: str) -> None:
    for report in (rank[case] for rank in reports):
        assert report["type"] == CASES[case].mismatch.__name__
        assert report["failures"] == CASES[case].failures
        assert report["gathers"] == 1


def test_messages_reach_all_of_any_number_of_ranks(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["messages"] == {
            size: (bytes([0, size - 1]), [bytes([each, 7]) for each in range(size)])
            for size in range(rank + 1, NUM_RANKS + 1)
        }


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
