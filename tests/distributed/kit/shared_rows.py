"""Jobs under dynamic CP, whose rows have context-parallel sizes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import unwrap_model

from kit import exactness
from kit.calls import Calls
from kit.cpu_kernels import stand_in_for_kernels
from kit.guarantees import on_all_ranks
from kit.model import small_model
from kit.samples import take
from kit.stand_ins import stood_in
from mcore_batching.batch import token_mean
from mcore_batching.megatron import (
    DynamicBatchArgumentError,
    check_settings,
    response_log_probs,
    schedule_of,
)
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


def refused_models(dims: ParallelDims) -> None:
    """Models whose layers do not follow a row's own group are refused, each by what it has."""

    class OwnAttention(SelfAttention):  # type: ignore[misc]
        pass

    with stood_in("triton"):
        from megatron.core.ssm.mamba_mixer import MambaMixer
    stand_in_for_kernels()
    mixer = object.__new__(MambaMixer)
    torch.nn.Module.__init__(mixer)
    attention, core = "self_attention, a SelfAttention", torch.nn.Identity()
    args = exactness.arguments(dims, dynamic_batch_context_parallel=1)
    for module, name, value, text in (
        ("", "position_embedding_type", "mrope", "position embeddings mrope slice by a fixed"),
        ("1.self_attention", "core_attention", core, f"layers.1.{attention} with Identity, is not"),
        (
            "2.self_attention",
            "__class__",
            OwnAttention,
            "2.self_attention, a OwnAttention with Pac",
        ),
        ("3", "mixer", mixer, "layers.3.mixer is a state-space layer"),
    ):
        model = small_model(dims)
        check_settings(args, model)
        bare = unwrap_model(model[0])
        setattr(bare.decoder.layers.get_submodule(module) if module else bare, name, value)
        with pytest.raises(DynamicBatchArgumentError) as refused:
            check_settings(args, model)
        assert text in str(refused.value)
        assert "unset --dynamic-batch-context-parallel" in str(refused.value)


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
