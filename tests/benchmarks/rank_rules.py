"""Plans of frameworks that deal samples to ranks first: SkyRL's, and this package's in their place.

Hooked into verl and SkyRL, this package plans each rank's samples by `planning/local.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_cases import plan_locally

from mcore_batching.planning import Problem
from mcore_batching.tools.rules import Bins, Rule, karmarkar_karp, verl_work


def verl_shards(problem: Problem) -> Bins:
    """Samples of each rank by verl's balancing."""
    work = [verl_work(length) for length in problem.lengths]
    return karmarkar_karp(work, problem.num_ranks, equal_count=True)


def skyrl_shards(problem: Problem) -> Bins:
    """Samples of each rank: SkyRL deals consecutive ones."""
    ranks, count = problem.num_ranks, problem.num_samples
    ends = [-(-count * rank // ranks) for rank in range(ranks + 1)]
    return [list(range(ends[rank], ends[rank + 1])) for rank in range(ranks)]


def ours_on(shards_of: Callable[[Problem], Bins]) -> Rule:
    """This package's micro-batches of the samples that a framework deals to each rank."""

    def rule(problem: Problem) -> list[Bins]:
        owners = [0] * problem.num_samples
        for rank, shard in enumerate(shards_of(problem)):
            for sample in shard:
                owners[sample] = rank
        step = plan_locally(problem.lengths, problem.dims, problem.config, owners)
        return [list(map(list, rank)) for rank in step.micro_batches]

    return rule


def skyrl(source: Path) -> Rule:
    """SkyRL's packer, from a checkout, on every rank; its padding micro-batches are always last."""
    path = source / "skyrl/train/dataset/bin_packing.py"
    spec = importlib.util.spec_from_file_location("skyrl_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["skyrl_packing"] = module
    spec.loader.exec_module(module)

    def rule(problem: Problem) -> list[Bins]:
        packer = module.make_seq_packer("balanced", bin_capacity=problem.capacity)
        ranks = [
            [[shard[i] for i in held] for held in packer.pack([problem.tokens[s] for s in shard])]
            for shard in skyrl_shards(problem)
        ]
        most = max(map(len, ranks))
        return [[*rank, *([] for _ in range(most - len(rank)))] for rank in ranks]

    return rule
