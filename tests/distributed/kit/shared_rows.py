"""Rows with context-parallel sizes of their own, under dynamic CP."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from kit.calls import Calls, on_all_ranks
from kit.samples import take
from mcore_batching.batch import token_mean
from mcore_batching.megatron import response_log_probs, schedule_of
from mcore_batching.megatron.options import Options
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, worker
from mcore_batching.planning.forest import PrefixTree, ways_to_cut

SIZES = {
    2: ((2, 2), (1, 1), (2, 2), (1, 1)),
    4: ((4, 4, 4, 4), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 1, 1)),
}
"""Ranks to the context-parallel size of each rank's row, slot by slot: sizes change from slot to
slot, and differ within one. As many slots as PP2 x VPP2 takes."""


def silent_placeholders(dims: ParallelDims) -> None:
    """Ranks of a replica run rows of their own, so that they need not ask for the same log-probs:
    the loss of one short sample asks for nothing in placeholders."""
    calls = Calls(dims, dynamic_batch_context_parallel=2)
    planned = calls.plan_of(take(calls.data, [0]))

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        if row.is_placeholder:
            return logits.new_zeros(()), {"policy": logits.new_zeros(())}
        share = token_mean(response_log_probs(logits, row), row, totals)
        return share, {"policy": share}

    rows = [len(row) for row in schedule_of(planned[0]).steps[0]]
    (first, rows), (second, others) = on_all_ranks(
        [calls.train_planned(planned, loss).metrics, rows]
    )
    assert sorted([rows, others]) == [[0], [1]]
    assert first == second


@contextlib.contextmanager
def mixed_sizes() -> Iterator[None]:
    """Plan as `SIZES` says, whatever the samples, under a cap at which that is legal."""
    planner_config = Options.planner_config

    def with_larger_cap(options: Options, dims: ParallelDims) -> PlannerConfig:
        config = planner_config(options, dims)
        return dataclasses.replace(config, max_tokens_per_gpu=1000, fill="placeholder")

    with (
        mock.patch.object(worker, "plan_step", _mixed_plan),
        mock.patch.object(Options, "planner_config", with_larger_cap),
    ):
        yield


def _mixed_plan(
    lengths: Sequence[int],
    dims: Any,
    config: Any,
    cost_model: Any,
    *,
    forest: Any = None,
    **kind: Any,
) -> StepPlan:
    """Whole prefix trees are placed as samples are."""
    trees = [PrefixTree((sample,), ((0, n),)) for sample, n in enumerate(lengths)]
    if forest is not None:
        trees, *_ = ways_to_cut(forest, dims, config, CostModel())
    slots = SIZES[dims.data_context_parallel]
    rows = [
        (size, slot, rank)
        for slot, sizes in enumerate(slots)
        for rank, size in enumerate(sizes)
        if rank % size == 0
    ]
    # The longest samples share ranks; one rank has a placeholder.
    rows.sort(key=lambda row: -row[0])
    rows.remove((1, 1, 0))
    longest = sorted(trees, key=lambda tree: -tree.size)
    micro_batches: list[list[tuple[int, ...]]] = [[()] * len(slots) for _ in slots[0]]
    for number, (size, slot, first) in enumerate(rows):
        for rank in range(first, first + size):
            samples = [i for tree in longest[number :: len(rows)] for i in tree.samples]
            micro_batches[rank][slot] = tuple(sorted(samples))
    sizes_by_rank = tuple(
        tuple(sizes[rank] if micro_batches[rank][slot] else 1 for slot, sizes in enumerate(slots))
        for rank in range(dims.data_context_parallel)
    )
    return StepPlan(
        micro_batches=tuple(map(tuple, micro_batches)),
        num_microbatches=len(slots),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=config,
        context_parallel=sizes_by_rank,
        cost_model=cost_model,
        **kind,
        trees=tuple(tree for tree in trees if len(tree.samples) > 1),
    )
