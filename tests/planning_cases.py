"""Random planning problems, and a checker of plans that shares no code with the planner."""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    local,
    plan_step,
)
from mcore_batching.planning.config import placeholder_tokens
from mcore_batching.planning.local import fill_local, pack_local
from mcore_batching.tools.lengths_file import read_lengths


def examples(count: int) -> settings:
    """`count` random cases with --long, a third without; however slow the machine is."""
    return settings(
        max_examples=max(20, count * settings.default.max_examples // 300),
        suppress_health_check=[HealthCheck.too_slow],
    )


SIX_LENGTHS = [6, 4, 3, 9, 2, 14]
SIX_SAMPLES = StepPlan(
    micro_batches=(((0, 1), (3,)), ((2, 4), (5,))),
    num_microbatches=2,
    sample_indices=(0, 1, 2, 3, 4, 5),
    dims=ParallelDims(data_parallel=2),
    config=PlannerConfig(max_tokens_per_gpu=10),
)
"""A sound plan of samples of `SIX_LENGTHS`, the last of them over the cap."""


class Integer:
    """An object that is no int but converts to one, and hashes by identity, as Torch's do."""

    __hash__ = object.__hash__

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared as an object")

    def __index__(self) -> int:
        return self.value


@dataclass(frozen=True)
class Case:
    """One planning problem; `owners`: the rank of each sample, None where they may move."""

    lengths: list[int]
    dims: ParallelDims
    config: PlannerConfig
    owners: list[int] | None


def row_tokens(samples: Sequence[int], lengths: Sequence[int], step: StepPlan) -> int:
    """Padded tokens of a micro-batch, by counting up."""
    dims, config = step.dims, step.config
    alignment = 2 * dims.context_parallel if dims.context_parallel > 1 else 1
    alignment *= dims.tensor_parallel if dims.sequence_parallel else 1
    each = math.lcm(alignment, config.pad_each_to or 1)
    total = 0
    for sample in samples:
        padded = each
        while padded < lengths[sample]:
            padded += each
        total += padded
    row = math.lcm(alignment, config.pad_total_to or 1)
    return math.ceil(total / row) * row


def megatron_runs(count: int, dims: ParallelDims) -> bool:
    """The conditions of Megatron's schedules on the number of micro-batches."""
    if dims.virtual_pipeline == 1:
        return count >= 1
    stages = dims.pipeline_parallel
    group = dims.microbatch_group_size or stages
    return stages <= group <= count and (count % group == 0 or count % group >= stages)


def least_count(wanted: int, dims: ParallelDims) -> int:
    count = max(1, wanted)
    while not megatron_runs(count, dims):
        count += 1
    return count


def planned(case: Case, cost_model: CostModel | None = None) -> StepPlan:
    """The case's plan: of samples that may move, or that stay on the ranks of `owners`."""
    given = case.lengths, case.dims, case.config
    if case.owners is None:
        return plan_step(*given, cost_model)
    return plan_locally(*given, case.owners, cost_model)


def plan_locally(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    owners: Sequence[int],
    cost_model: CostModel | None = None,
) -> StepPlan:
    """The plan of ranks that agree on the largest count and move no sample, in one process."""
    ranks = range(dims.data_parallel)
    shards = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    problems = [
        Problem.of([lengths[i] for i in shard], dims, config, cost_model) for shard in shards
    ]
    packed = list(map(pack_local, problems))
    count = max(map(local.least_count, problems, packed))
    filled = [fill_local(problems[rank], packed[rank], count) for rank in ranks]
    return StepPlan(
        micro_batches=tuple(
            tuple(tuple(shard[i] for i in samples) for samples in rows)
            for shard, rows in zip(shards, filled, strict=True)
        ),
        num_microbatches=count,
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=config,
        scope="local",
        cost_model=problems[0].cost_model,
    )


def broken_invariants(step: StepPlan, lengths: Sequence[int]) -> set[str]:
    """Names of the invariants that a step over all of `lengths` breaks.

    Under dynamic CP a step of another shape or of blocks that do not agree breaks nothing else.
    """
    dims, config, most = step.dims, step.config, step.config.max_context_parallel
    ranks = dims.data_parallel * (1 if most is None else dims.context_parallel)
    sizes = step.context_parallel or [[1] * len(rank) for rank in step.micro_batches]
    counts = {len(rank) for rank in step.micro_batches}
    has_shape = len(step.micro_batches) == ranks and counts == {step.num_microbatches}
    broken = set()
    if not has_shape or not megatron_runs(step.num_microbatches, dims):
        broken.add("equal count")
    if most is not None and not has_shape:
        return broken
    if not blocks_agree(step, sizes):
        return {"blocks"}
    shares: dict[int, float] = defaultdict(float)
    for rank, rows in enumerate(step.micro_batches):
        for samples, size in zip(rows, sizes[rank], strict=True):
            is_legal = size == ranks or math.log2(size).is_integer()
            if not is_legal or size > (most or 1) or (size > 1 and not samples):
                broken.add("blocks")
            for sample in samples:
                shares[sample] += 1 / size
            of_sizes = (size, *dims.row_sizes(most)) if most else ()
            fits = [
                row_tokens(samples, lengths, replace(step, dims=on_size))
                <= config.max_tokens_per_gpu * on_size.context_parallel
                for on_size in map(dims.for_rows_on, of_sizes or [dims.context_parallel])
            ]
            may_be_over = config.on_oversize == "own-bin" and len(samples) == 1 and not any(fits)
            if not fits[0] and not may_be_over:
                broken.add("cap")
            if len(samples) > (config.max_samples_per_row or len(lengths)):
                broken.add("cap")
        own = [samples for samples, size in zip(rows, sizes[rank], strict=True) if size == 1]
        if config.fill == "split" and () in own and max(map(len, own)) > 1:
            broken.add("split before placeholder")
    if shares.keys() != set(range(len(lengths))) or any(
        abs(share - 1) > 1e-9 for share in shares.values()
    ):
        broken.add("exact cover")
    return broken


def blocks_agree(step: StepPlan, sizes: Sequence[Sequence[int]]) -> bool:
    """True if all ranks of each block have its size and its samples."""
    ranks = range(len(sizes))
    return all(
        other in ranks
        and sizes[other][slot] == size
        and step.micro_batches[other][slot] == step.micro_batches[rank][slot]
        for rank in ranks
        for slot, size in enumerate(sizes[rank])
        for other in range(rank - rank % size, rank - rank % size + size)
    )


@st.composite
def dims_list(draw: st.DrawFn) -> ParallelDims:
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    group = draw(st.none() | st.integers(stages, 2 * stages + 3))
    ranks, context = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    tensor, experts = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
    return ParallelDims(
        data_parallel=ranks,
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        context_parallel=context,
        tensor_parallel=tensor,
        expert_parallel=experts if ranks * context * tensor % experts == 0 else 1,
        sequence_parallel=draw(st.booleans()),
        microbatch_group_size=group,
    )


@st.composite
def cases(
    draw: st.DrawFn,
    fill: tuple[str, ...] = ("split", "split", "placeholder"),
    *,
    dynamic: bool = False,
) -> Case:
    """Of samples that may move, or that stay on their ranks; some under dynamic CP if `dynamic`."""
    dims = draw(dims_list())
    rows, most = [dims], None
    if dynamic and draw(st.sampled_from([False, False, True])):
        most = draw(st.sampled_from(dims.row_sizes(dims.data_context_parallel)))
        rows = [dims.for_rows_on(size) for size in dims.row_sizes(most)]
        fill = ("split",)
    options = {
        "packing": draw(st.sampled_from(["auto", "first-fit", "first-fit-decreasing"])),
        "balance": draw(st.sampled_from(["auto", "cost", "tokens", "none"])),
        "fill": draw(st.sampled_from(fill)),
        "pad_each_to": draw(st.sampled_from([None, None, 3, 8])),
        "pad_total_to": draw(st.sampled_from([None, None, 5, 16])),
        "max_samples_per_row": draw(st.sampled_from([None, None, 1, 2, 5])),
        # The default takes a tenth of a second a plan, and finds the same kinds of plans.
        "plan_effort": draw(st.sampled_from([1, 20, 100] if most is None else [1, 3, 10])),
        "max_context_parallel": most,
    }
    probe = PlannerConfig(max_tokens_per_gpu=1, **options)
    # A token has room in rows of every size.
    least = max(-(-placeholder_tokens(each, probe) // each.context_parallel) for each in rows)
    config = PlannerConfig(
        max_tokens_per_gpu=least + draw(st.sampled_from([0, 1, 7, 20, 64, 200])), **options
    )
    cap = config.max_tokens_per_gpu * (most or dims.context_parallel)
    any_length = st.integers(0, cap) | st.integers(0, max(1, cap // 5))
    kinds = (
        *(any_length | st.sampled_from([0, 1, cap, cap + 1, 3 * cap]),) * 3,
        st.sampled_from([cap // 2 + 1, cap // 2, cap // 3, 4, 1]),
        st.integers(0, cap // 6),
        st.integers(cap + 1, 4 * cap) | st.just(0),
    )
    lengths = draw(st.lists(draw(st.sampled_from(kinds)), max_size=30))
    owners = None
    if most is None and draw(st.booleans()):
        owners = draw(
            st.lists(
                st.integers(0, dims.data_parallel - 1),
                min_size=len(lengths),
                max_size=len(lengths),
            )
        )
    return Case(lengths, dims, config, owners)


def log_normal(count: int, seed: int, *, median: float, sigma: float, cap: int) -> list[int]:
    generator = random.Random(seed)
    return [
        max(1, min(cap, int(median * generator.lognormvariate(0, sigma)))) for _ in range(count)
    ]


def real_lengths(count: int) -> list[int]:
    """Total lengths of a serving trace, from the folder that ``MCORE_BATCHING_TEST_DATA`` names."""
    path = Path(os.environ.get("MCORE_BATCHING_TEST_DATA", ""), "azure_conv_lengths.txt")
    if not path.exists():
        pytest.skip("MCORE_BATCHING_TEST_DATA does not name a folder with azure_conv_lengths.txt")
    return read_lengths(str(path))[:count]
