"""Turns of an agent's trajectories: each computed by itself, in shared segments, or merged.

    python tests/benchmarks/bench_shared_prefixes.py [--data ../shared/data] [--trajectories 6]

The first table is planned: tokens, work and predicted end of a step of all recorded turns on
DP8×PP4 with the default costs, apart over shared. The second trains the first trajectories, each a
sixteenth as long, on one process of the CPU: processor time of a step, and how far its gradient is
from that of turns apart, with random advantages, the same for a token either way. Frameworks that
merge change advantages besides, or weigh anew.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from benchmark_cases import PP4, parser_of
from kit.harness import Job, results, run_jobs

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import Hosts, find_hosts
from mcore_batching.planning import CostModel, PlannerConfig, plan_step
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

CAP = 16384
VOCABULARY = 150_000
SHORTER = 16
"""Turns that are trained are shorter by this factor, so that a step takes seconds."""
Trajectories = list[list[tuple[int, int]]]
"""Prompt and response tokens of each turn."""


def drawn(trajectories: Trajectories) -> dict[str, list[Any]]:
    """Samples of random tokens, turn after turn, each beginning the next."""
    generator = torch.Generator().manual_seed(0)
    samples: dict[str, list[Any]] = {"tokens": [], "response_lengths": []}
    for turns in trajectories:
        whole = torch.randint(VOCABULARY, (max(map(sum, turns)),), generator=generator)
        samples["tokens"] += [whole[: sum(turn)].clone() for turn in turns]
        samples["response_lengths"] += [response for _, response in turns]
    return samples


def hosts_of(samples: dict[str, list[Any]], places: list[int]) -> Hosts:
    """Of some samples alone, as a rank that brings them finds them."""
    part = {name: [values[i] for i in places] for name, values in samples.items()}
    part["total_lengths"] = [len(tokens) for tokens in part["tokens"]]
    return find_hosts(Columns.read(part, DEFAULT_SCHEMA))


def planned(trajectories: Trajectories, name: str) -> tuple[str, ...]:
    """A row of the first table."""
    samples = drawn(trajectories)
    lengths, count = [len(tokens) for tokens in samples["tokens"]], len(samples["tokens"])
    shuffled = random.Random(0).sample(range(count), count)
    started = time.process_time()
    hosts = hosts_of(samples, shuffled)
    seconds = time.process_time() - started
    own = [lengths[i] for place, i in enumerate(shuffled) if hosts.host[place] == place]
    model, config = CostModel(), PlannerConfig(max_tokens_per_gpu=CAP)
    work, times = [], []
    for each in (lengths, own):
        work.append(sum(map(model.sample, each)))
        times.append(predicted_step_time(plan_step(each, PP4, config, model), each))
    return (
        *(name, f"{count:,}", f"{len(own):,}", f"{hosts.tokens:,}", f"{hosts.computed:,}"),
        f"{hosts.tokens / hosts.computed:.1f}",
        f"{work[0] / work[1]:.1f}",
        f"{times[0] / times[1]:.1f}",
        f"{seconds:.2f} s",
    )


def trained(trajectories: Trajectories, repeats: int) -> list[tuple[str, ...]]:
    """The rows of the second table."""
    short = [
        [(p // SHORTER, (p + r) // SHORTER - p // SHORTER) for p, r in turns]
        for turns in trajectories
    ]
    job = Job(
        "shared-prefixes",
        "kit.timing:shared_prefixes",
        1,
        {},
        {"trajectories": short, "max_tokens": CAP // SHORTER, "repeats": repeats},
        seconds=500.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        [ways] = results(run_jobs([job], Path(scratch))[job.name])
    return [
        (
            *(way, f"{found['samples']}", f"{found['tokens']:,}", f"{found['micro_batches']}"),
            f"{statistics.median(found['seconds']):.2f} s",
            *(f"{found[mean][0]:.1%}, {found[mean][1]:.3f}" for mean in ("sample", "token")),
        )
        for way, found in ways.items()
    ]


def main() -> None:
    """Plan, train, print both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--trajectories", type=int, default=6, help="that are trained")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    file = options.data / "tau_airline_turns.jsonl"
    if not file.exists():
        raise SystemExit(f"there is no {file}: set --data to its folder")
    read = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    rows = [planned(read[:n], f"{n} trajectories") for n in (len(read), 64)]
    columns = ("", "samples", "hosts", "tokens", "computed", "x", "work x", "predicted step x")
    columns = (*columns, "found in")
    print(Table(columns=columns, rows=tuple(rows)))
    columns = ("", "samples", "tokens", "micro-batches", "step", "sample mean: off by, cosine")
    columns = (*columns, "token mean")
    rows = trained(read[: options.trajectories], options.repeats)
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
