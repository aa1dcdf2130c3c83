"""Seconds, messages and bytes of the agreements of one step: gathered statements against summaries.

    python tests/benchmarks/bench_agreement.py [--ranks 2 8 32 64]

Real gloo processes without a model, forked from one parent, two ranks a replica of 16 samples. They
share this machine's cores, so the wall clock measures the work of all ranks added up; CPU seconds
per rank are what a rank with a core of its own would spend. What more ranks would take is worked
out on paper: the line fitted to CPU seconds, and the way of the messages that wait for each other.

"before" is how ranks agreed until every agreement began with a summary: an ``all_gather_object`` of
everybody's statement, six times for planning and a step. A loop of one's own plans a rollout once
for many steps; a stock script plans every step.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch.agreement.consensus import Statement, agree
from mcore_batching.batch.agreement.figures import largest, least, total
from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.messages import SUMMARY_BYTES

SETTINGS = {f"setting_{i}": i for i in range(30)}
FIELDS = {"field names": [f"field_{i}" for i in range(8)], "field kinds": ["TOKENS"] * 8}
SAMPLES_PER_REPLICA, RANKS_PER_REPLICA = 16, 2
LIMIT_SECONDS = 300.0
LATENCY_SECONDS = 25e-6
"""Of one message between two machines, beside the work of sending and receiving it."""

Measured = dict[str, float]


TAKEN = {"longest": largest(0), "samples": total(16)}


def planned(rank: int) -> list[tuple[str, Statement]]:
    """The agreements of planning (local, in a pipeline) and of a training step."""
    totals = [16, 9000, 8000, 8000.0, 16, 16]
    return [
        ("taking stock", Statement(equal=SETTINGS, figures=TAKEN | {"first": least(rank)})),
        ("packing", Statement(equal=FIELDS, figures={"ends": largest([4.0, *[1.5e6] * 25])})),
        (
            "filling",
            Statement(
                equal_in_replica=_digest(rank),
                figures={
                    "ends": largest([1.5e6, 1.4e6, 16384.0, 16384.0]),
                    "plans": total([1 << 31] * 2),
                },
            ),
        ),
        (
            "collating",
            Statement(
                equal={"plan (sha256)": "0" * 16, "step": 0, "number of micro-batches": 6},
                equal_in_replica={"num_tokens": rank // RANKS_PER_REPLICA},
                figures={"totals": total(totals)},
            ),
        ),
        ("after the pipeline", Statement(equal={"names of metrics": ["kl", "loss"]})),
    ]


def stock(rank: int) -> list[tuple[str, Statement]]:
    """The agreements of a stock script's step, planning included; the last with its log line."""
    *_, collating, after = planned(rank)
    counts = [4.0, *[1.5e6] * 25, 0]
    figures = {"maxima": largest([0.0, *[4096.0] * 12]), "sums": total([1.0] * 12)}
    return [
        ("taking stock", Statement(equal=SETTINGS, figures=TAKEN | {"ends": largest(counts)})),
        (
            collating[0],
            Statement(
                equal=collating[1].equal,
                equal_in_replica=_digest(rank) | dict(collating[1].equal_in_replica),
                figures=collating[1].figures,
            ),
        ),
        (after[0], Statement(equal=after[1].equal, figures=figures)),
    ]


def _digest(rank: int) -> dict[str, int]:
    return {"samples and plan (sha256)": rank // RANKS_PER_REPLICA}


def before(rank: int) -> list[tuple[str, Statement]]:
    """As `planned`, with what every rank told, and the plans of all ranks gathered on each."""
    lengths = random.Random(rank).choices(range(100, 4000), k=SAMPLES_PER_REPLICA)
    slots = [tuple(range(i, i + 4)) for i in range(0, SAMPLES_PER_REPLICA, 4)]
    taking, packing, filling, *step = planned(rank)
    first = rank % RANKS_PER_REPLICA == 0
    choosing = Statement(
        equal_in_replica=_digest(rank), tell=("0" * 16, (lengths, slots) if first else None)
    )
    told = Statement(equal=SETTINGS, tell=SAMPLES_PER_REPLICA)
    return [(taking[0], told), packing, filling, ("choosing", choosing), *step]


class Gathering:
    """Agreement by gathering everybody's statement on every rank, as it was."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.sent_bytes = 0

    def agree(self, stage: str, work: Callable[[], Any], says: Callable[[Any], Statement]) -> None:
        """One ``all_gather_object``, and what every rank then looked through."""
        said = says(work())
        note = {
            "stage": stage,
            "equal": {name: repr(value) for name, value in said.equal.items()},
            "in_replica": {name: repr(value) for name, value in said.equal_in_replica.items()},
            "tell": pickle.dumps(said.tell),
            "figures": {name: figure.values for name, figure in said.figures.items()},
        }
        self.sent_bytes += (self._ranks - 1) * (8 + len(pickle.dumps(note)))
        notes: list[Any] = [None] * self._ranks
        dist.all_gather_object(notes, note)
        for name in note["equal"]:
            assert len({each["equal"].get(name) for each in notes}) == 1
        for each in notes:
            pickle.loads(each["tell"])
        for name in note["figures"]:
            for numbers in zip(*(each["figures"][name] for each in notes), strict=True):
                max(numbers)


class Summaries(Consensus):
    """Agreement as it is."""

    def __init__(self, ranks: int) -> None:
        replicas = [[i, i + 1] for i in range(0, ranks, RANKS_PER_REPLICA)]
        super().__init__(dist.group.WORLD, replicas=replicas)
        self._bytes = rounds_of(ranks) * SUMMARY_BYTES

    def agree(self, stage: str, work: Callable[[], Any], says: Callable[[Any], Statement]) -> None:
        """One agreement."""
        agree(self, stage, work, says)

    def sent_bytes(self, agreements: int) -> int:
        """Bytes that a rank sends in so many of them."""
        return agreements * self._bytes


def rounds_of(ranks: int) -> int:
    """Messages one behind the other, for a summary."""
    return math.ceil(math.log2(ranks))


def measure(rank: int, ranks: int, store: str, results: Any, repeats: int) -> None:
    """One process: seconds of a step's agreements, each way; rank 0 reports."""
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
    )
    gathering, summaries = Gathering(ranks), Summaries(ranks)
    ring = torch.zeros(SUMMARY_BYTES // 8, dtype=torch.int64)

    def agreements(by: Any, made: Sequence[tuple[str, Statement]]) -> None:
        for stage, statement in made:
            by.agree(stage, int, lambda _, said=statement: said)

    ways: dict[str, Callable[[], None]] = {
        "before": lambda: agreements(gathering, before(rank)),
        "planned, then a step": lambda: agreements(summaries, planned(rank)),
        "stock step": lambda: agreements(summaries, stock(rank)),
        "gloo's all-reduce": lambda: [dist.all_reduce(ring) for _ in planned(rank)] and None,
    }
    barriers = 0.0
    report: dict[str, Measured] = {}
    for name, step in {"barriers": lambda: None, **ways}.items():
        step()
        gathering.sent_bytes = 0
        walls, began = [], cpu_seconds()
        for _ in range(repeats):
            dist.barrier()
            started = time.perf_counter()
            step()
            walls.append(time.perf_counter() - started)
        cpu = torch.tensor([(cpu_seconds() - began) / repeats])
        dist.all_reduce(cpu)
        if name == "barriers":
            barriers = float(cpu)
            continue
        report[name] = {
            "wall": statistics.median(walls),
            "cpu": (float(cpu) - barriers) / ranks,
        }
    report["before"]["bytes"] = gathering_bytes(ranks, rank)
    for name, made in (("planned, then a step", planned), ("stock step", stock)):
        report[name]["bytes"] = summaries.sent_bytes(len(made(rank)))
    if rank == 0:
        results.put(report)
    dist.barrier()
    os._exit(0)  # torch's threads of the parent do not exist here


def gathering_bytes(ranks: int, rank: int) -> float:
    """Bytes that a rank hands on round the ring for the statements of a step."""
    sizes = Gathering(ranks)
    gather, dist.all_gather_object = dist.all_gather_object, _fill
    try:
        for stage, statement in before(rank):
            sizes.agree(stage, int, lambda _, said=statement: said)
    finally:
        dist.all_gather_object = gather
    return sizes.sent_bytes


def _fill(notes: list[Any], note: Any) -> None:
    notes[:] = [note] * len(notes)


def cpu_seconds() -> float:
    """Of this process, its threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(ranks: int, repeats: int) -> dict[str, Measured]:
    """What rank 0 of so many processes reports."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=measure, args=(rank, ranks, store, results, repeats))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while results.empty():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{ranks} ranks: not done in {LIMIT_SECONDS:.0f} s")
                time.sleep(0.1)
            report: dict[str, Measured] = results.get()
            for process in processes:
                process.join(timeout=20)
        finally:
            for process in processes:
                process.kill()
    return report


def slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: y at 0, y per x, and the share of the variance that this explains."""
    fit = statistics.linear_regression(xs, ys)
    return fit.intercept, fit.slope, statistics.correlation(xs, ys) ** 2


def main() -> None:
    """Measure, fit, extrapolate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes, too
    print(
        f"agreements: before {len(before(0))}, planned {len(planned(0))}, stock {len(stock(0))}; "
        f"{os.cpu_count()} cores"
    )
    reports: dict[int, dict[str, Measured]] = {}
    for ranks in options.ranks:
        reports[ranks] = run(ranks, options.repeats)
        for way, each in reports[ranks].items():
            sent = f"{each['bytes'] / 1024:9.1f} KB" if "bytes" in each else " " * 12
            print(
                f"{ranks:>5} ranks  {way:<20} {1e3 * each['wall']:9.2f} ms wall "
                f"{1e3 * each['cpu']:8.2f} ms CPU a rank {sent}",
                flush=True,
            )
    for way, against, name, in_a_row in WAYS:
        start, each, explained = slope(
            [against(ranks) for ranks in reports],
            [1e3 * report[way]["cpu"] for report in reports.values()],
        )
        print(f"{way}: {start:.2f} + {each:.3f} x {name} ms of CPU a rank (R^2 {explained:.3f})")
        for ranks in (1024, 4096):
            working, travelling = start + each * against(ranks), 1e3 * LATENCY_SECONDS
            print(
                f"    on paper, {ranks} ranks: {working:.0f} ms of work, and "
                f"{in_a_row(ranks) * travelling:.1f} ms for {in_a_row(ranks)} messages in a row"
            )


WAYS: list[tuple[str, Callable[[int], float], str, Callable[[int], int]]] = [
    ("before", float, "ranks", lambda n: 2 * (n - 1) * len(before(0))),
    ("gloo's all-reduce", float, "ranks", lambda n: 2 * (n - 1) * len(planned(0))),
    ("planned, then a step", rounds_of, "log2 ranks", lambda n: rounds_of(n) * len(planned(0))),
    ("planned, then a step", float, "ranks", lambda n: rounds_of(n) * len(planned(0))),
    ("stock step", rounds_of, "log2 ranks", lambda n: rounds_of(n) * len(stock(0))),
    ("stock step", float, "ranks", lambda n: rounds_of(n) * len(stock(0))),
]
"""Way, what its work grows with, and its messages that wait for each other."""


if __name__ == "__main__":
    main()
