"""What each process of test_consensus.py runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch.consensus import Agreement, Consensus
from mcore_batching.batch.errors import DisagreementError
from mcore_batching.batch.messages import RankMessages
from mcore_batching.planning.errors import ConfigError, named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank names in an agreement: values, and reductions as (method, number or list)."""

    same: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_replica: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_stage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    every: Any = None
    wanted: bool = False
    reductions: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)

    def outcome(self, block: Any, body: Callable[[], Any] = int) -> dict[str, Any]:
        """Run a body in an agreement's block, name all values, and read what came of them."""
        with block as agree:
            assert isinstance(agree, Agreement)
            result = body()
            for name, value in self.same.items():
                agree.same(name, value)
            for name, value in self.in_replica.items():
                agree.same(name, value, within="replica")
            for name, value in self.in_stage.items():
                agree.same(name, value, within="stage")
            made = {n: getattr(agree, kind)(n, v) for n, (kind, v) in self.reductions.items()}
            gathered = self.every is not None
            everyone = agree.every("value", self.every, wanted=self.wanted) if gathered else None
        values = {name: each.value for name, each in made.items()}
        by_rank = everyone and everyone.by_rank
        return {"result": result, "every": by_rank, "reductions": values}


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
    return ConfigError(f"set {named('max_tokens_per_gpu', 8)}")


class Unreadable:
    """What can be sent, but not read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def faults(rank: int) -> dict[str, dict[str, Any]]:
    """Name of each case to this rank's stage, body, part and options of the agreement."""
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
        name: {"body": work if last else fine} for name, work in on_last.items()
    }
    cases["one cannot travel"] = {"part": Part(every=(lambda: 0) if last else None)}
    cases["one cannot be read"] = {"part": Part(every=Unreadable() if last else None)}
    cases["all raise alike"] = {"body": raises(config_error())}
    cases["all raise"] = {"body": raises(ValueError(f"on {rank}"))}
    cases["stage differs"] = {"stage": "sums" if last else "counts"}
    cases["stage differs and one raises"] = {
        "body": raises(ValueError("here")) if last else fine,
        "stage": "sums" if last else "counts",
    }
    cases["own mismatch"] = {
        "part": Part(same={"cap": rank}),
        "mismatch": OtherDisagreementError,
    }
    return cases


REPLICAS = [[0, 3], [1, 4], [2, 5]]
STAGES = [[0, 3], [1], [4], [2, 5]]


def statements(rank: int) -> dict[str, Part]:
    """Name of each case among six ranks to this rank's statement."""
    replica = rank % 3
    return {
        "alike": Part(
            same={"cap": 8, "fill": "split"},
            in_replica={"samples": replica},
            in_stage={"temperature": 1.0} if rank == 1 else {},
            reductions={
                "b": ("max", [rank, 0.1 * rank, -math.inf, math.inf if rank == 4 else 0]),
                "d": ("min", [rank, 0.1 * rank, -math.inf if rank == 4 else 0]),
                "a": ("sum", [2**53 + 1, 0.1 * replica, 0 if replica else 0.5, replica - 1]),
                "c": ("sum_over_ranks", [rank, 0.25 * rank]),
            },
        ),
        "more numbers than a message holds": Part(
            reductions={
                "b": ("max", [rank * (-1) ** i + i + 0.5 for i in range(130)]),
                "d": ("min", [rank * (-1) ** i + i for i in range(20)]),
                "a": ("sum", [replica * i + 0.5 for i in range(80)]),
                "c": ("sum_over_ranks", [rank * i for i in range(40)]),
            },
        ),
        "as many numbers as a message holds": Part(
            reductions={"most": ("max", [rank] * 60), "all": ("sum", [1] * 40)}
        ),
        "said by some": Part(same={"names": ["a"]} if rank in (1, 4) else {}),
        "nobody asks": Part(every=rank, wanted=False),
        "one asks": Part(
            every=rank,
            wanted=rank == 5,
            reductions={"b": ("sum", [1]), "c": ("sum_over_ranks", rank), "a": ("min", rank)},
        ),
        "said in part": Part(same={"a": 1} if rank < 4 else {"b": 2}),
        "nan on rank 0": Part(reductions={"most": ("max", [math.nan if rank == 0 else rank])}),
        "nan on rank 4": Part(reductions={"most": ("max", [math.nan if rank == 4 else rank])}),
        "nan among many": Part(
            reductions={"most": ("max", [0] * 120 + [math.nan if rank == 4 else rank])}
        ),
        "nan in a sum": Part(reductions={"sum": ("sum", math.nan if replica == 1 else 1.0)}),
        "integers beyond 64 bits": Part(
            reductions={"most": ("max", [2**70 + rank]), "sum": ("sum", 2**65)}
        ),
        "a sum beyond 64 bits": Part(reductions={"sum": ("sum", [2**62])}),
        "a number of another kind": Part(reductions={"most": ("max", [torch.tensor(rank)])}),
        "said by some and differs": Part(same={"names": [rank]} if rank in (1, 4) else {}),
        "one replica differs": Part(in_replica={"samples": rank == 4}),
        "two replicas differ crosswise": Part(in_replica={"samples": rank in (0, 4)}),
        "one stage differs": Part(in_stage={"temperature": [0.5 if rank == 5 else 1]}),
        "number of maxima differs": Part(
            reductions={"most": ("max", [0] * (2 if rank == 3 else 1))}
        ),
        "a number of another type differs": Part(same={"cap": 8.0 if rank == 2 else 8}),
        "number of sums differs": Part(reductions={"tokens": ("sum", [0] * (rank == 1))}),
        "name of a figure differs": Part(reductions={"cost" if rank else "time": ("min", 0)}),
        "kind of a figure differs": Part(
            reductions={"rows": ("sum_over_ranks" if rank == 2 else "sum", 0)}
        ),
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


def run_all(rank: int, size: int) -> dict[str, Any]:
    """What a rank of the group reports of all cases, and of messages among the first ranks."""
    report: dict[str, Any] = {}
    consensus = Consensus(dist.group.WORLD, replicas=REPLICAS, stages=STAGES)
    for name, statement in statements(rank).items():
        with counted_calls() as counts:
            outcome = outcome_of(lambda n=name, p=statement: p.outcome(consensus.agreement(n)))
        report[name] = outcome | counts
    for name, case in faults(rank).items():
        block = consensus.agreement(
            case.get("stage", name), mismatch=case.get("mismatch", DisagreementError)
        )
        part, body = case.get("part", Part()), case.get("body", int)
        report[name] = outcome_of(lambda p=part, b=block, body=body: p.outcome(b, body))
    with consensus.agreement("of replicas") as agree:
        some, nothing = agree.gather("some", rank if rank < 3 else None), agree.gather("none", None)
    report["of replicas"] = some.by_rank, nothing.values
    two = dist.new_group([1, 2])
    if rank in (1, 2):
        subgroup = Consensus(two)
        part = Part(every=rank, wanted=True, reductions={"n": ("sum", 1)})
        report["subgroup"] = outcome_of(lambda: part.outcome(subgroup.agreement("")))
        body = raises(ValueError("here")) if rank == 2 else int
        report["subgroup fails"] = outcome_of(lambda: Part().outcome(subgroup.agreement(""), body))
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


def outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What an agreement came to, or its error after a round trip through pickle."""
    try:
        return {**call(), "type": None}
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
