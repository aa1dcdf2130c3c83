"""Statistics of a step, and the memory that it takes on the first and the last stage, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.clock import clocks_of
from mcore_batching.planning.costs.layers_of import config_of_json
from mcore_batching.planning.plans.memory import ModelShape, PredictedMemory, predicted_memory
from mcore_batching.planning.schedule import Schedule
from mcore_batching.tools.explain import explain

PROPORTIONAL = CostModel(quadratic=0, per_micro_batch=0)


def test_by_hand() -> None:
    lengths = [6, 3, 9, 22]
    step = StepPlan(
        micro_batches=(((), (), (2,)), ((3,), (0, 1), ())),
        num_microbatches=3,
        sample_indices=(0, 1, 2, 3),
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=16, pad_each_to=4, fill="placeholder"),
        cost_model=PROPORTIONAL,
    )
    statistics = step_statistics(step, lengths)
    assert statistics.num_samples == 4
    assert statistics.num_microbatches == 3
    assert statistics.num_placeholders == 3
    assert statistics.num_oversize == 1
    assert statistics.real_tokens == 40
    assert statistics.padded_tokens == 24 + 8 + 4 + 12
    assert statistics.offered_tokens == 6 * 16
    assert statistics.fill == 40 / 96
    assert statistics.padding == 8 / 48
    assert statistics.heaviest_rank_cost == 31
    assert statistics.mean_rank_cost == 20
    assert statistics.rank_balance == 31 / 20
    assert statistics.slot_maxima_cost == 22 + 9 + 9
    assert statistics.slot_balance == 40 / 20
    # Of the fuller rank; one stage is the first and the last.
    assert statistics.peak_inflight_tokens == statistics.last_stage_inflight_tokens == 24
    doubled = statistics + statistics
    assert (doubled.num_samples, doubled.real_tokens, doubled.fill) == (8, 80, 40 / 96)
    assert step_statistics(step, lengths, CostModel(quadratic=0)).mean_rank_cost == 20 + 3 * 256


def test_a_step_without_samples_has_all_ratios() -> None:
    step = plan_step(
        [], ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8), PROPORTIONAL
    )
    statistics = step_statistics(step, [])
    assert (statistics.fill, statistics.padding) == (0, 0)
    assert (statistics.rank_balance, statistics.slot_balance) == (1, 1)
    assert statistics.num_placeholders == 2


def test_lengths_may_be_whatever_gives_them_once() -> None:
    lengths, groups = [5, 9, 3, 7], ["a", "a", "b", "c"]
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=16)
    step = plan_step(lengths, dims, config)
    assert plan_step(iter(lengths), dims, config) == step
    assert step_statistics(step, iter(lengths)) == step_statistics(step, lengths)
    assert explain(step, map(int, lengths)) == explain(step, lengths)
    by_group = plan_batch(iter(lengths), dims, config, groups=iter(groups), groups_per_step=1)
    assert [plan.sample_indices for plan in by_group.steps] == [(0, 1), (2,), (3,)]
    assert len(plan_batch([], dims, config, groups=[], groups_per_step=1).steps) == 1


def test_ranks_without_samples_are_simulated_once_together() -> None:
    few, many = (ParallelDims(data_parallel=ranks, pipeline_parallel=2) for ranks in (3, 4096))
    config, lengths = PlannerConfig(max_tokens_per_gpu=100), [50, 7, 90]
    placed = plan_step(lengths, few, config).micro_batches
    step = plan_step(lengths, many, config)
    assert step.micro_batches == placed + (((),),) * 4093
    assert step_statistics(step, lengths).num_placeholders == 4093
    clocks = clocks_of([[5.0], *[[1.0]] * 4095], Schedule(dims=many))
    assert len(clocks) == 4096
    assert len(set(map(id, clocks))) == 2


def test_statistics_count_a_shared_row_once() -> None:
    """The row of 18 tokens is padded to 20, of which each of its ranks has 10."""
    step = StepPlan(
        micro_batches=(((0,), (1,)), ((0,), ())),
        num_microbatches=2,
        sample_indices=(0, 1),
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=16, max_context_parallel=2),
        context_parallel=((2, 1), (2, 1)),
    )
    found = step_statistics(step, [18, 5])
    assert (found.real_tokens, found.padded_tokens, found.offered_tokens) == (23, 25, 4 * 16)
    assert (found.num_placeholders, found.largest_row_tokens) == (1, 10)
    said = explain(step, [18, 5], advice_seconds=0)
    assert "2 samples on 2 ranks: " in said
    assert "1 of size 2" in said.split("micro-batches by context-parallel size: ")[1]


SHAPE = ModelShape(layers=8, hidden=64, inner=16 * (4 + 2 + 2 + 4) + 3 * 256, vocab=1024)
LENGTHS = [100, 60, 30, 10]
# In multiples of 16: 112, 64, 32 and 16.
STEP = StepPlan(
    micro_batches=(((1, 3), (0,), (2,), ()),),
    num_microbatches=4,
    sample_indices=(0, 1, 2, 3),
    dims=ParallelDims(
        pipeline_parallel=2, context_parallel=2, tensor_parallel=4, sequence_parallel=True
    ),
    config=PlannerConfig(max_tokens_per_gpu=64, fill="placeholder"),
)


def test_tokens_in_flight_of_both_ends_of_the_pipeline() -> None:
    """A placeholder is held with its padding."""
    statistics = step_statistics(STEP, LENGTHS)
    assert statistics.peak_inflight_tokens == 80 + 112
    assert statistics.last_stage_inflight_tokens == statistics.largest_row_tokens == 112
    longer = step_statistics(STEP, [100, 60, 120, 10])
    assert longer.peak_inflight_tokens == 112 + 128
    both = statistics + longer
    assert (both.peak_inflight_tokens, both.largest_row_tokens) == (240, 128)
    padded = replace(STEP, config=replace(STEP.config, pad_total_to=64))
    assert step_statistics(padded, LENGTHS).peak_inflight_tokens == 128 + 128
    tail = replace(padded, micro_batches=(((), (), (2,), (0, 1, 3)),))
    assert step_statistics(tail, [1, 1, 10, 1]).peak_inflight_tokens == 64 + 64
    empty = replace(padded, micro_batches=(((),) * 4,), sample_indices=())
    assert step_statistics(empty, []).largest_row_tokens == 64


ROW = 112 // 2
"""Tokens of the largest row on one rank; of 192 in flight on the first stage it has 96."""
# Four of the eight layers keep their norms' inputs and outputs, and what tensor parallelism cuts.
LAYER = 2 * (4 * 64 / 4 + 16 * (4 + 2 + 2 + 4) / 4 + 3 * 256 / 4)
LOGITS, HIDDEN, WEIGHT = ROW * 256 * 6, ROW * 64 * 2, 256 * 64
DEPTH_LOGITS = ROW * 256 * 4


@pytest.mark.parametrize(
    ("shape", "forward_only", "first", "last", "logits"),
    [
        ({}, False, 96 * 4 * LAYER, ROW * 4 * LAYER, LOGITS),
        # Predicting further tokens takes a layer and logits each on the last stage.
        ({"depths": 2}, False, 96 * 4 * LAYER, ROW * 6 * LAYER, LOGITS + 2 * DEPTH_LOGITS),
        # A fused output layer holds hidden states, their gradient, and one of its weight.
        ({"fused_output": True}, False, 96 * 4 * LAYER, ROW * 4 * LAYER, 2 * HIDDEN + 6 * WEIGHT),
        (
            {"fused_output": True, "depths": 2},
            False,
            96 * 4 * LAYER,
            ROW * 6 * LAYER,
            4 * HIDDEN + 6 * WEIGHT,
        ),
        ({"recompute": True}, False, 96 * 4 * 2 * 64 / 4, ROW * 4 * 2 * 64 / 4, LOGITS),
        # Forward passes keep one layer, and the output layer's inputs.
        ({}, True, ROW * LAYER, ROW * LAYER, HIDDEN),
        ({"depths": 2}, True, ROW * LAYER, ROW * LAYER, HIDDEN),
        ({"fused_output": True}, True, ROW * LAYER, ROW * LAYER, HIDDEN),
    ],
)
def test_bytes_by_hand(
    shape: dict[str, Any], forward_only: bool, first: float, last: float, logits: float
) -> None:
    """On the last stage log-probs take three copies of a chunk's logits beside `logits`."""
    step = replace(STEP, forward_only=forward_only)
    found = predicted_memory(step_statistics(step, LENGTHS), step, replace(SHAPE, **shape))
    assert found == PredictedMemory(
        first_stage_bytes=first,
        last_stage_bytes=last + logits + 3 * 4 * ROW * 256,
        logit_bytes=logits,
    )


CONFIG = json.loads(
    """{"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 256, "vocab_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e6}"""
)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {}),
        ({"text_config": CONFIG, "hidden_size": 1, "vision_config": {"hidden_size": 1}}, {}),
        ({"hidden_act": "relu2"}, {"inner": 16 * (4 + 2 + 2 + 4) + 2 * 256}),
        ({"num_nextn_predict_layers": 1}, {"depths": 1}),
        # Of each token's activations in experts, those of the shared ones are a part.
        (EXPERTS | {"n_shared_experts": 1, "intermediate_size": None}, {}),
        ({"num_moe_experts": None, "moe_router_topk": 2}, {}),  # Megatron's default
        # No model is without groups or heads of a size: 0 stands above no other name's.
        ({"num_query_groups": 0, "kv_channels": 0, "head_dim": 16}, {}),
    ],
)
def test_the_shape_in_a_model_s_config_json(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    text = json.dumps(CONFIG | config)
    assert ModelShape.of(config_of_json(text)) == replace(SHAPE, **changes)
