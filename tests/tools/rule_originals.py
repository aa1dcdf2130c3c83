"""The frameworks' own packing functions, to hold `mcore_batching.tools.rules.rules` against.

Each is loaded from the checkout that an environment variable names, or from an installed package,
by itself: what a module imports and these functions do not use is an empty stand-in. All-reduces
over ranks are carried out by a loop here. Without checkout or package the test is skipped.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mcore_batching.planning import Problem
from mcore_batching.tools.rules.rule_parts import Bins
from mcore_batching.tools.rules.rules import verl_work

Original = Callable[[Problem], list[Bins]]


def load_alone(folder: Path, file: str, **stand_ins: Any) -> Any:
    """One module, without the start-up of the package that it lies in."""
    path = folder / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def checkout(variable: str) -> Path:
    """The folder that an environment variable names."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout")
    return Path(os.environ[variable])


def installed(package: str) -> Path:
    """Its folder."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def group_of(problem: Problem) -> int | None:
    """The interleaved schedule's group; None without one."""
    return problem.dims.group_size if problem.dims.virtual_pipeline > 1 else None


def until_counts_agree(
    rank_of: Callable[[list[int], int], Bins], shards: Bins, least: int
) -> list[Bins]:
    """Every rank packed into as many micro-batches as the most of any rank, until all agree."""
    while True:
        ranks = [rank_of(shard, least) for shard in shards]
        least = max(map(len, ranks))
        if all(len(rank) == least for rank in ranks):
            return ranks


def slime() -> Original:
    source = checkout("MCORE_BATCHING_SLIME_SCHEDULED")
    balancing = load_alone(source, "slime/utils/seqlen_balancing.py")
    flops = SimpleNamespace(
        calculate_fwd_flops=lambda lengths, args: sum(map(args.work.__getitem__, lengths))
    )
    module = load_alone(
        source,
        "slime/utils/dp_schedule.py",
        **{"slime.utils.seqlen_balancing": balancing, "slime.utils.flops_utils": flops},
    )

    def plan(problem: Problem) -> list[Bins]:
        dims, number = problem.dims, problem.num_samples
        args = SimpleNamespace(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=problem.capacity,
            balance_data=True,
            balance_by_flops=False,
            work={size: verl_work(size) for size in problem.tokens},
        )
        config = {
            "dp_size": dims.data_parallel,
            "cp_size": 1,
            "vpp_size": dims.virtual_pipeline,
            "microbatch_group_size_per_vp_stage": dims.group_size,
        }
        partitions, slots, _, _ = module.build_dp_schedule(
            args,
            config,
            problem.tokens,
            global_batch_size=number,
            rollout_indices=list(range(number)),
        )
        return [
            [[part[i] for i in samples] for samples in rank]
            for part, rank in zip(partitions, slots, strict=True)
        ]

    return plan


def verl(source: Path | None = None) -> Original:
    torch = pytest.importorskip("torch")
    tools = SimpleNamespace(index_select_tensor_dict=lambda batch, part: None)
    module = load_alone(
        source or checkout("MCORE_BATCHING_VERL_SOURCE"),
        "verl/utils/seqlen_balancing.py",
        **{
            "verl": ModuleType("verl"),
            "verl.protocol": SimpleNamespace(DataProto=object),
            "verl.utils": SimpleNamespace(tensordict_utils=tools),
            "verl.utils.device": SimpleNamespace(get_device_name=lambda: "cpu"),
        },
    )

    def plan(problem: Problem) -> list[Bins]:
        work = [int(w) for w in module.calculate_workload(torch.tensor(problem.lengths)).tolist()]
        shards = module.get_seqlen_balanced_partitions(work, problem.num_ranks, equal_size=True)
        for shard in shards:
            shard.sort(key=lambda i: (work[i], i))
            shard[:] = shard[::2] + shard[1::2][::-1]

        def rank_of(shard: list[int], least: int) -> Bins:
            mask = torch.zeros(len(shard), max(problem.tokens), dtype=torch.long)
            for row, sample in enumerate(shard):
                mask[row, : problem.tokens[sample]] = 1
            _, parts = module.rearrange_micro_batches(
                {"input_ids": mask, "attention_mask": mask},
                problem.capacity,
                num_batches_divided_by=group_of(problem),
                min_num_micro_batch=least,
            )
            return [[shard[i] for i in part] for part in parts]

        return until_counts_agree(rank_of, shards, 1)

    return plan


def nemo_rl() -> Original:
    source = checkout("MCORE_BATCHING_NEMO_RL_SOURCE")
    module = load_alone(source, "nemo_rl/data/packing/algorithms.py")

    def plan(problem: Problem) -> list[Bins]:
        ranks = problem.num_ranks
        packer = module.ModifiedFirstFitDecreasingPacker(
            bin_capacity=problem.capacity, bin_count_multiple=ranks
        )
        bins = packer.pack(list(problem.tokens))
        return [bins[rank::ranks] for rank in range(ranks)]

    return plan


def areal() -> Original:
    pytest.importorskip("numba")
    module = load_alone(
        installed("areal"),
        "utils/seqpack.py",
        **{"areal": ModuleType("areal"), "areal.utils": SimpleNamespace(logging=logging)},
    )
    # NumPy's default sort leaves the order of equal lengths open; the rule keeps input order.
    argsort = module.np.argsort
    module.np = SimpleNamespace(
        array=module.np.array,
        argmin=module.np.argmin,
        argsort=lambda values: argsort(values, kind="stable"),
        ndarray=module.np.ndarray,
    )

    def plan(problem: Problem) -> list[Bins]:
        stages = problem.dims.pipeline_parallel
        shards = module.balanced_greedy_partition(list(problem.tokens), problem.num_ranks)

        def rank_of(shard: list[int], least: int) -> Bins:
            sizes = [problem.tokens[i] for i in shard]
            groups = module.ffd_allocate(sizes, problem.capacity, least, stages)
            # Rank-local order is that of sample numbers here and of dispatch there.
            return sorted(sorted(shard[int(i)] for i in group) for group in groups)

        return until_counts_agree(rank_of, shards, 2 * stages if stages > 1 else 1)

    return plan
