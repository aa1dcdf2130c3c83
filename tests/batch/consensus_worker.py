"""What each of six processes of test_consensus.py runs, and what should come of it."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import DisagreementError
from mcore_batching.batch.messages import RankMessages
from mcore_batching.planning.errors import ConfigError, named

REPLICAS = [[0, 3], [1, 4], [2, 5]]
STAGES = [[0, 3], [1], [4], [2, 5]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What one rank does and names in an agreement, and what comes of it on all."""

    operation: str = ""
    """Else the name of the case."""
    mismatch: type[DisagreementError] = DisagreementError
    body: Any = int
    same: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_replica: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_stage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
            for key, value in self.same.items():
                agree.same(key, value)
            for key, value in self.in_replica.items():
                agree.same(key, value, within="replica")
            for key, value in self.in_stage.items():
                agree.same(key, value, within="stage")
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


ADVICE = f"set {named('max_tokens_per_gpu', 8)}"
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
    "one is not callable": (
        Case(body=None),
        "TypeError",
        "rank 2: TypeError: 'NoneType' object is not call",
    ),
    "one speaks of an argument": (
        Case(body=raises(ConfigError(ADVICE))),
        "ConfigError",
        "rank 2: ConfigError: set max_tokens_per_gpu=8 (--max-tokens-per-gpu 8)",
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
        "all raise alike": Case(body=raises(ConfigError(ADVICE))),
        "all raise": Case(body=raises(ValueError(f"on {rank}"))),
        "own mismatch": Case(same={"cap": rank}, mismatch=OtherDisagreementError),
        "alike": Case(
            same={"cap": 8, "fill": "split"},
            in_replica={"samples": replica},
            in_stage={"temperature": 1.0} if rank == 1 else {},
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
        "said by some": Case(same={"names": ["a"]} if rank in (1, 4) else {}, messages=3),
        "said in part": Case(same={"a": 1} if rank < 4 else {"b": 2}, messages=math.inf),
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
            in_replica={"samples": rank == 4},
            failures={4: "samples is True, on rank 1 it is False"},
        ),
        "two replicas differ crosswise": Case(
            in_replica={"samples": rank in (0, 4)},
            failures={
                3: "samples is False, on rank 0 it is True",
                4: "samples is True, on rank 1 it is False",
            },
        ),
        "one stage differs": Case(
            in_stage={"temperature": [0.5 if rank == 5 else 1]},
            failures={5: "temperature is [0.5], on rank 2 it is [1]"},
        ),
        "a number of another type differs": Case(
            same={"cap": 8.0 if is_two else 8}, failures={2: "cap is 8.0, on rank 0 it is 8"}
        ),
        "said by some and differs": Case(
            same={"names": [rank]} if rank in (1, 4) else {},
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
