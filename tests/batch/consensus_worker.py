"""What each process of test_consensus.py runs."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch.consensus import Consensus, DisagreementError, Statement
from mcore_batching.planning.errors import Argument, ConfigError

TIMEOUT = datetime.timedelta(seconds=60)


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


def plan(rank: int) -> dict[str, dict[str, Any]]:
    """Name of each case to what this rank passes to `Consensus.agree`."""
    fine: Callable[[], Any] = int
    last = rank == 2
    on_last: dict[str, Any] = {
        "one raises": raises(ZeroDivisionError("by zero")),
        "one is unprintable": raises(UnprintableError()),
        "one is not callable": None,
        "one speaks of an argument": raises(config_error()),
    }
    cases: dict[str, dict[str, Any]] = {
        name: {"work": work if last else fine} for name, work in on_last.items()
    }
    cases["one cannot travel"] = {"work": fine}
    if last:
        cases["one cannot travel"]["says"] = says_nothing_picklable
    cases["all raise alike"] = {"work": raises(config_error())}
    cases["all raise"] = {"work": raises(ValueError(f"on {rank}"))}
    statements: dict[str, Statement] = {
        "alike": Statement(
            equal={"cap": 8},
            equal_in_replica={"samples": rank == 2},
            tell=("rank", rank),
            largest=[rank, -rank],
            total=[10 + (rank == 2), 0.5],
        ),
        "value differs": Statement(equal={"cap": 8 if rank != 1 else 9, "fill": "split"}),
        "left out": Statement(equal={"names": ["a"]} if rank else {}),
        "replica differs": Statement(equal_in_replica={"samples": rank}),
        "number of sums differs": Statement(total=[0] * rank),
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


def outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What an agreement came to, or its error after a round trip through pickle."""
    try:
        agreed = call()
    except Exception as error:
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
    return {name: getattr(agreed, name) for name in ("result", "told", "largest", "total")}


def run_all(rank: int, size: int, store: str, results: str) -> None:
    """Run all cases in a group of processes; writes one file a rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    consensus = Consensus(
        dist.group.WORLD,
        replicas=[[0, 1], [2]],
        spell=lambda argument: f"--{argument.name}",
    )
    report: dict[str, Any] = {}
    for name, arguments in plan(rank).items():
        stage = arguments.pop("stage", name)
        report[name] = outcome_of(lambda s=stage, a=arguments: consensus.agree(s, **a))
    last_two = dist.new_group([1, 2])
    if rank:
        subgroup = Consensus(last_two)
        report["subgroup"] = outcome_of(
            lambda: subgroup.agree("", int, lambda _: Statement(tell=rank, total=[1]))
        )
        report["subgroup fails"] = outcome_of(
            lambda: subgroup.agree("", raises(ValueError("here")) if rank == 2 else int)
        )
    torch.save(report, f"{results}.{rank}")
    dist.barrier()  # no rank leaves while another is still in the last collective
    dist.destroy_process_group()
