"""What each process of test_consensus.py runs."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch.agreement.consensus import Consensus, Statement
from mcore_batching.batch.agreement.figures import largest, least, rank_total, total
from mcore_batching.batch.agreement.rank_messages import RankMessages
from mcore_batching.batch.errors import DisagreementError
from mcore_batching.planning.errors import Argument, ConfigError


class UnprintableError(Exception):
    """An exception whose message cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OtherDisagreementError(DisagreementError):
    """A disagreement of the caller's own kind."""


def raises(error: Exception) -> Callable[[], Any]:
    """A function that raises."""

    def work() -> Any:
        raise error

    return work


def config_error() -> ConfigError:
    """An error that speaks of an argument."""
    return ConfigError("set ", Argument("max_tokens_per_gpu", 8))


def says_nothing_picklable(value: Any) -> Statement:
    """A statement that cannot travel."""
    del value
    return Statement(tell=lambda: 0)


class Unreadable:
    """What can be sent, but not read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def plan(rank: int) -> dict[str, dict[str, Any]]:
    """Name of each case to what this rank passes to `Consensus.agree`."""
    fine: Callable[[], Any] = int
    last = rank == 2
    on_last: dict[str, Any] = {
        "one raises": raises(ZeroDivisionError("by zero")),
        "one is unprintable": raises(UnprintableError()),
        "one is long": raises(ValueError("begins " + 9_000_000 * "x" + " ends \udc80")),
        "one is not callable": None,
        "one exits": raises(SystemExit("no data")),
        "one speaks of an argument": raises(config_error()),
    }
    cases: dict[str, dict[str, Any]] = {
        name: {"work": work if last else fine} for name, work in on_last.items()
    }
    cases["one cannot travel"] = {"work": fine}
    if last:
        cases["one cannot travel"]["says"] = says_nothing_picklable
    cases["one cannot be read"] = {"work": fine}
    if last:
        unread = Statement(tell=Unreadable(), asks=False)
        cases["one cannot be read"]["says"] = lambda _: unread
    cases["all raise alike"] = {"work": raises(config_error())}
    cases["all raise"] = {"work": raises(ValueError(f"on {rank}"))}
    statements: dict[str, Statement] = {
        "alike": Statement(
            equal={"cap": 8},
            equal_in_replica={"samples": rank == 2},
            tell=("rank", rank),
            figures={
                "last": largest(rank),
                "ranks": least([rank, 5]),
                "samples": total([10 + (rank == 2), 0.5]),
                "shares": rank_total([rank, 0.25]),
            },
        ),
        "value differs": Statement(equal={"cap": 8 if rank != 1 else 9, "fill": "split"}),
        "left out": Statement(equal={"names": ["a"]} if rank else {}),
        "replica differs": Statement(equal_in_replica={"samples": rank}),
        "number of sums differs": Statement(figures={"tokens": total([0] * rank)}),
        "name of a figure differs": Statement(figures={"cost" if rank else "time": least(0)}),
        "kind of a figure differs": Statement(
            figures={"rows": (rank_total if rank == 2 else total)(0)}
        ),
    }
    for name, statement in statements.items():
        cases[name] = {"work": fine, "says": lambda _, s=statement: s}
    cases["stage differs"] = {"work": fine, "stage": "sums" if last else "counts"}
    cases["stage differs and one raises"] = {
        "work": raises(ValueError("here")) if last else fine,
        "stage": "sums" if last else "counts",
    }
    cases["own mismatch"] = {
        "work": fine,
        "says": lambda _: Statement(equal={"cap": rank}),
        "mismatch": OtherDisagreementError,
    }
    return cases


WIDE_REPLICAS = [[0, 3], [1, 4], [2, 5]]
WIDE_STAGES = [[0, 3], [1], [4], [2, 5]]


def wide_statements(rank: int) -> dict[str, Statement]:
    """Name of each case among six ranks to this rank's statement."""
    replica = rank % 3
    return {
        "alike": Statement(
            equal={"cap": 8, "fill": "split"},
            equal_in_replica={"samples": replica},
            equal_in_stage={"temperature": 1.0} if rank == 1 else {},
            figures={
                "b": largest([rank, 0.1 * rank, -math.inf, math.inf if rank == 4 else 0]),
                "d": least([rank, 0.1 * rank, -math.inf if rank == 4 else 0]),
                "a": total([2**53 + 1, 0.1 * replica, 0 if replica else 0.5, replica - 1]),
                "c": rank_total([rank, 0.25 * rank]),
            },
        ),
        # Halves take more bytes than small integers: one too many, and all ranks gather.
        "more numbers than a summary holds": Statement(
            figures={
                "b": largest([rank * (-1) ** i + i + 0.5 for i in range(130)]),
                "d": least([rank * (-1) ** i + i for i in range(20)]),
                "a": total([replica * i + 0.5 for i in range(80)]),
                "c": rank_total([rank * i for i in range(40)]),
            },
        ),
        "as many numbers as a summary holds": Statement(
            figures={"most": largest([rank] * 60), "all": total([1] * 40)}
        ),
        "said by some": Statement(equal={"names": ["a"]} if rank in (1, 4) else {}),
        "nobody asks": Statement(tell=rank, asks=False),
        "one asks": Statement(
            tell=rank,
            asks=rank == 5,
            figures={"b": total([1]), "c": rank_total(rank), "a": least(rank)},
        ),
        "said in part": Statement(equal={"a": 1} if rank < 4 else {"b": 2}),
        "nan on rank 0": Statement(figures={"most": largest([math.nan if rank == 0 else rank])}),
        "nan on rank 4": Statement(figures={"most": largest([math.nan if rank == 4 else rank])}),
        "nan among many": Statement(
            figures={"most": largest([0] * 120 + [math.nan if rank == 4 else rank])}
        ),
        "nan in a sum": Statement(figures={"sum": total(math.nan if replica == 1 else 1.0)}),
        "integers beyond 64 bits": Statement(
            figures={"most": largest([2**70 + rank]), "sum": total(2**65)}
        ),
        "a sum beyond 64 bits": Statement(figures={"sum": total([2**62])}),
        "a number of another kind": Statement(figures={"most": largest([torch.tensor(rank)])}),
        "said by some and differs": Statement(equal={"names": [rank]} if rank in (1, 4) else {}),
        "one replica differs": Statement(equal_in_replica={"samples": rank == 4}),
        "two replicas differ crosswise": Statement(equal_in_replica={"samples": rank in (0, 4)}),
        "one stage differs": Statement(equal_in_stage={"temperature": [0.5 if rank == 5 else 1]}),
        "number of maxima differs": Statement(
            figures={"most": largest([0] * (2 if rank == 3 else 1))}
        ),
        "a number of another type differs": Statement(equal={"cap": 8.0 if rank == 2 else 8}),
    }


@contextlib.contextmanager
def counted_calls() -> Iterator[dict[str, int]]:
    """How often this rank gathers everybody's statement, and how often it sends a message."""
    counts = {"gathers": 0, "messages": 0}
    gather, send = dist.all_gather_object, dist.isend

    def gathering(*arguments: Any, **options: Any) -> Any:
        counts["gathers"] += 1
        return gather(*arguments, **options)

    def sending(*arguments: Any, **options: Any) -> Any:
        counts["messages"] += 1
        return send(*arguments, **options)

    dist.all_gather_object, dist.isend = gathering, sending
    try:
        yield counts
    finally:
        dist.all_gather_object, dist.isend = gather, send


def run_wide(rank: int, report: dict[str, Any]) -> None:
    """The cases among all six ranks, and messages among the first 1 to 6 of them."""
    consensus = Consensus(dist.group.WORLD, replicas=WIDE_REPLICAS, stages=WIDE_STAGES)
    for name, statement in wide_statements(rank).items():
        with counted_calls() as counts:
            outcome = outcome_of(lambda n=name, s=statement: consensus.agree(n, int, lambda _: s))
        report[name] = outcome | counts
    with counted_calls() as counts:
        outcome = outcome_of(
            lambda: consensus.do_alike("fine", int) or consensus.do_alike("", config_error_raised)
        )
    report["alike without a word"] = outcome | counts
    alone = config_error_raised if rank == 1 else int

    def on_one() -> Any:
        consensus.do_alike("work that fails on one", alone)
        return consensus.agree("the next", int)

    report["fails on one without a word"] = outcome_of(on_one)
    report["messages"] = {}
    for size in range(1, 7):
        if rank < size:
            messages = RankMessages(dist.group.WORLD, range(size))
            report["messages"][size] = (
                messages.reduce(bytes([rank, rank]), in_order),
                messages.gather(bytes([rank, 7])),
            )


def config_error_raised() -> Any:
    """Raise, always."""
    raise config_error()


def in_order(low: bytes, high: bytes) -> bytes:
    """First and last rank of two neighbouring runs of ranks."""
    assert low[1] + 1 == high[0], (low, high)
    return bytes([low[0], high[1]])


def outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What an agreement came to, or its error after a round trip through pickle."""
    try:
        agreed = call()
    except (Exception, SystemExit) as error:
        cause = type(error.__cause__).__name__
        try:
            error = pickle.loads(pickle.dumps(error))
            text = str(error)
        except RuntimeError:
            text = ""
        return {
            "type": type(error).__name__,
            "message": text,
            "failures": getattr(error, "failures", None),
            "cause": cause,
        }
    names = ("result", "told", "figures")
    return {name: getattr(agreed, name, None) for name in names} | {"type": None}


def run_all(rank: int, size: int) -> dict[str, Any]:
    """What a rank of the group reports of all cases."""
    first_three, last_two = dist.new_group([0, 1, 2]), dist.new_group([1, 2])
    report: dict[str, Any] = {"wide": {}}
    run_wide(rank, report["wide"])
    if rank < 3:
        run_three(rank, first_three, last_two, report)
    return report


def run_three(rank: int, three: Any, last_two: Any, report: dict[str, Any]) -> None:
    """The cases among ranks 0, 1 and 2, and some among 1 and 2."""
    consensus = Consensus(
        three,
        replicas=[[0, 1], [2]],
        spell=lambda argument: f"--{argument.name}",
    )
    for name, arguments in plan(rank).items():
        stage = arguments.pop("stage", name)
        report[name] = outcome_of(lambda s=stage, a=arguments: consensus.agree(s, **a))
    if rank:
        subgroup = Consensus(last_two)
        report["subgroup"] = outcome_of(
            lambda: subgroup.agree("", int, lambda _: Statement(tell=rank, figures={"n": total(1)}))
        )
        report["subgroup fails"] = outcome_of(
            lambda: subgroup.agree("", raises(ValueError("here")) if rank == 2 else int)
        )
