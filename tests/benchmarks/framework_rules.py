"""Rules of other frameworks beside those of `mcore_batching.tools.rules`.

slime's, NeMo-RL's, SkyRL's and Megatron's rule for dynamic CP are their own functions, from
checkouts. AReaL's is written from its description. verl assigns samples to ranks first: hooked into
it, this package plans each rank's samples by `planning/local.py`.
"""

from __future__ import annotations

import collections
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.stand_ins import module_of
from planning_cases import plan_locally

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem, StepPlan
from mcore_batching.planning.placement import deal
from mcore_batching.tools.rules import (
    RULES,
    Bins,
    Rule,
    RuleFailureError,
    dealt,
    karmarkar_karp,
    legal_count,
    refuse_oversize,
    refuse_uneven,
    too_few,
    verl_work,
)


def slime(source: Path) -> Rule:
    """slime since its pull request 1926: pack first, then distribute by work."""
    sys.path.insert(0, str(source))
    schedule = module_of(source / "slime/utils/dp_schedule.py")
    # The work of the sizes of a 7B model, as in verl's rule.
    schedule.calculate_fwd_flops = lambda lengths, args: sum(map(verl_work, lengths))

    def rule(problem: Problem) -> list[Bins]:
        args = SimpleNamespace(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=problem.capacity,
            balance_data=True,
            balance_by_flops=False,
        )
        group = problem.dims.slots_per_group
        ranks = {"dp_size": problem.num_ranks, "cp_size": 1, "vpp_size": 2}
        try:
            partitions, micro_batches, *_ = schedule.build_dp_schedule(
                args,
                ranks | {"microbatch_group_size_per_vp_stage": group},
                problem.tokens,
                global_batch_size=problem.num_samples,
                rollout_indices=range(problem.num_samples),
            )
        except AssertionError as error:
            raise RuleFailureError(f"slime asserts: {error}") from error
        return [
            [[samples[i] for i in held] for held in rank]
            for samples, rank in zip(partitions, micro_batches, strict=True)
        ]

    return rule


def nemo_rl(source: Path) -> Rule:
    """NeMo-RL: modified first-fit-decreasing (Johnson and Garey, 1985), dealt round-robin."""
    algorithms = module_of(source / "nemo_rl/data/packing/algorithms.py")

    def rule(problem: Problem) -> list[Bins]:
        refuse_oversize(problem, "NeMo-RL's packer raises")
        packer = algorithms.get_packer(
            "modified_first_fit_decreasing",
            problem.capacity,
            bin_count_multiple=problem.num_ranks,
        )
        return dealt(packer.pack(problem.tokens), problem.num_ranks)

    return rule


def skyrl(source: Path) -> Rule:
    """SkyRL's packer on every rank; its padding micro-batches are always last."""
    with mock.patch.dict(sys.modules):
        module = module_of(source / "skyrl/train/dataset/bin_packing.py")

    def rule(problem: Problem) -> list[Bins]:
        packer = module.make_seq_packer("balanced", bin_capacity=problem.capacity)
        # SkyRL gives ranks consecutive samples.
        count, places = problem.num_samples, range(problem.num_ranks + 1)
        ends = [-(-count * rank // problem.num_ranks) for rank in places]
        ranks = [
            [[first + i for i in held] for held in packer.pack([*problem.tokens[first:end]])]
            for first, end in itertools.pairwise(ends)
        ]
        most = max(map(len, ranks))
        return [[*rank, *([] for _ in range(most - len(rank)))] for rank in ranks]

    return rule


def areal(problem: Problem) -> list[Bins]:
    """AReaL: longest sample first to the rank with fewest tokens, equally many samples to each.

    On a rank samples open a minimum of micro-batches, twice the stages in a pipeline; the others go
    to those with room. The minimum rises until all ranks have the same count.
    """
    refuse_oversize(problem, "AReaL's packer raises")
    sizes, ranks, stages = problem.tokens, problem.num_ranks, problem.dims.pipeline_parallel
    refuse_uneven(len(sizes), ranks)
    shards = deal(sizes, [0.0] * ranks, [len(sizes) // ranks] * ranks)
    minimum, packs = 2 * stages if stages > 1 else 1, list[Bins]()
    while not packs or min(map(len, packs)) < minimum:
        packs = []
        for shard in shards:
            # A rank's own count must be a multiple of the stages: it packs again with more.
            least = minimum
            while len(shard) >= least and len(bins := _at_least(shard, least, problem)) % stages:
                least += stages - least % stages
            if len(shard) < least:
                raise too_few(len(shard), least)
            packs.append(sorted(map(sorted, bins)))
        minimum = max(map(len, packs))
    return packs


def _at_least(samples: Sequence[int], minimum: int, problem: Problem) -> Bins:
    """So many micro-batches or more: each sample goes to that with room and the fewest samples, of
    these the emptiest."""
    bins: Bins = []
    tokens: list[int] = []
    for sample in samples:
        size = problem.tokens[sample]
        room = [k for k, held in enumerate(tokens) if held + size <= problem.capacity]
        if len(bins) < minimum or not room:
            bins.append([sample])
            tokens.append(size)
        else:
            place = min(room, key=lambda k: (len(bins[k]), tokens[k]))
            bins[place].append(sample)
            tokens[place] += size
    return bins


STATED_RULES: dict[str, Rule] = RULES | {"AReaL": areal}
"""Those that need no checkout."""


def ours_on_verls_ranks(problem: Problem) -> list[Bins]:
    """This package's micro-batches of the samples that verl's balancing gives each rank."""
    work = [verl_work(length) for length in problem.lengths]
    owners = [0] * problem.num_samples
    for rank, shard in enumerate(karmarkar_karp(work, problem.num_ranks, equal_count=True)):
        for sample in shard:
            owners[sample] = rank
    step = plan_locally(problem.lengths, problem.dims, problem.config, owners)
    return [list(map(list, rank)) for rank in step.micro_batches]


def megatron_scheduling(source: Path, name: str) -> Any:
    """A module with rules, of Megatron-LM's dev branch. What it imports is empty: the rules use
    nothing of it."""
    path = source / "megatron/core/datasets" / f"{name}.py"
    imported = {
        part
        for line in re.findall(r"^from (\S+) import|^import (\S+)", path.read_text(), re.MULTILINE)
        for whole in line
        for part in itertools.accumulate(whole.split("."), "{}.{}".format)
        if whole.startswith(("torch", "megatron"))
    }
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in imported}):
        return module_of(path)


def megatron_dynamic_plan(
    source: Path,
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
) -> StepPlan:
    """One step by `default_dynamic_cp` of Megatron's dev branch, which asserts where it cannot."""
    step_of = megatron_scheduling(source, "data_schedule_utils").next_hdp_group_packing_aware
    # The rule knows no largest size: any row may be spread over all ranks.
    ranks, slots = dims.data_context_parallel, []
    left = sorted(enumerate(lengths), key=lambda sample: -sample[1])
    while left:
        _, left, _, of_ranks = step_of(left, ranks, config.max_tokens_per_gpu)
        # Ranks of a row list the same samples. Larger rows come first, so that each begins at a
        # multiple of its size, as plans here must.
        sizes = collections.Counter(tuple(sorted(samples)) for samples in of_ranks)
        slots.append([(row, size) for row, size in sizes.most_common() for _ in range(size)])
    of_ranks = list(zip(*slots, strict=True))
    return StepPlan(
        micro_batches=tuple(tuple(samples for samples, _ in rank) for rank in of_ranks),
        num_microbatches=legal_count(of_ranks, dims),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=replace(config, max_context_parallel=ranks),
        context_parallel=tuple(tuple(size for _, size in rank) for rank in of_ranks),
        cost_model=cost_model,
    )
