"""Time and bytes of one agreement between ranks, beside gathering a report of every rank.

    python tests/benchmarks/bench_agreement.py [--ranks 2 8 32 64] [--repeats 10]

Real gloo processes without a model, two ranks a replica. All share this machine's cores, so the
wall clock shows the work of all ranks together; the processor time of one rank is what a rank with
a core of its own spends. Bytes are those that a rank sends.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.messages import MESSAGE_BYTES
from mcore_batching.tools.report import Table

SETTINGS = {f"setting_{i}": i for i in range(30)}
FIELDS = {f"field_{i}": "TOKENS" for i in range(8)}
RANKS_PER_REPLICA = 2


def read_samples(consensus: Consensus) -> None:
    """The agreement that starts a step: equal settings and fields, the counts of samples."""
    with consensus.agreement("reading settings and samples") as agree:
        agree.same("settings", SETTINGS)
        agree.same("fields", FIELDS)
        longest = agree.max("longest", 4096)
        samples = agree.sum("samples", 16)
    assert (longest.value, samples.value) == (4096, 16 * len(consensus.replicas))


def after_pipeline(consensus: Consensus) -> None:
    """The agreement that ends a step: equal names of metrics, maxima and sums of the log line."""
    with consensus.agreement("after the pipeline") as agree:
        agree.same("names of metrics", ["kl", "loss"])
        agree.same("tokens", consensus.rank // RANKS_PER_REPLICA, within="replica")
        agree.max("maxima", [4096.0] * 13)
        agree.sum("sums", [1.0] * 12)


def gathered_reports(ranks: int) -> int:
    """What replaces a short message where a rank failed: everybody's report; bytes sent."""
    report = {"stage": "reading settings and samples", "same": [repr(SETTINGS), repr(FIELDS)]}
    reports: list[Any] = [None] * ranks
    dist.all_gather_object(reports, report)
    assert all(each == report for each in reports)
    return (ranks - 1) * (8 + len(pickle.dumps(report)))


def measure(rank: int, ranks: int, folder: str, repeats: int) -> None:
    """One process; rank 0 writes what it found into the folder."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout
    )
    replicas = [[i, i + 1] for i in range(0, ranks, RANKS_PER_REPLICA)]
    consensus = Consensus(dist.group.WORLD, replicas=replicas)
    sent = math.ceil(math.log2(ranks)) * MESSAGE_BYTES
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "barrier alone": (lambda: None, 0),
        "reading samples": (lambda: read_samples(consensus), sent),
        "after the pipeline": (lambda: after_pipeline(consensus), sent),
        "all reports gathered": (lambda: gathered_reports(ranks), gathered_reports(ranks)),
    }
    found = {}
    for name, (call, sent_bytes) in calls.items():
        call()
        walls, began = [], time.process_time()
        for _ in range(repeats):
            dist.barrier()
            started = time.perf_counter()
            call()
            walls.append(time.perf_counter() - started)
        cpu = torch.tensor([(time.process_time() - began) / repeats / ranks])
        dist.all_reduce(cpu)
        found[name] = (statistics.median(walls), float(cpu), sent_bytes)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))


def run(ranks: int, repeats: int) -> list[tuple[str, ...]]:
    """Table rows of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, folder, repeats
        multiprocessing.start_processes(measure, arguments, nprocs=ranks, start_method="fork")
        found = pickle.loads(Path(folder, "found").read_bytes())
    _, barrier, _ = found.pop("barrier alone")
    return [
        (
            str(ranks),
            name,
            f"{1000 * wall:.1f} ms",
            f"{1000 * max(0.0, cpu - barrier):.1f} ms",
            f"{sent / 1024:.1f} KB",
        )
        for name, (wall, cpu, sent) in found.items()
    ]


def main() -> None:
    """Measure each number of ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if any(ranks < 2 or ranks % RANKS_PER_REPLICA for ranks in options.ranks):
        parser.error(f"--ranks takes multiples of {RANKS_PER_REPLICA}")
    print(f"{os.cpu_count()} cores, medians of {options.repeats}")
    rows = [row for ranks in options.ranks for row in run(ranks, options.repeats)]
    columns = ("ranks", "agreement", "wall clock, all ranks", "CPU a rank", "sent by a rank")
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
