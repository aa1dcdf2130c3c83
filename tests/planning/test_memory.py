"""Memory that a plan asks of the first and of the last stage, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    StepPlan,
    step_statistics,
)
from mcore_batching.planning.costs.layers_of import config_of_json
from mcore_batching.planning.plans.memory import ModelShape, PredictedMemory, predicted_memory

SHAPE = ModelShape(layers=8, hidden=64, inner=16 * (4 + 2 + 2 + 4) + 3 * 256, vocab=1024)
LENGTHS = [100, 60, 30, 10]
DIMS = ParallelDims(
    pipeline_parallel=2, context_parallel=2, tensor_parallel=4, sequence_parallel=True
)
# In multiples of 16: 112, 64, 32 and 16.
STEP = StepPlan(
    micro_batches=(((1, 3), (0,), (2,), ()),),
    num_microbatches=4,
    sample_indices=(0, 1, 2, 3),
    dims=DIMS,
    config=PlannerConfig(max_tokens_per_gpu=64, fill="placeholder"),
)


def memory(step: StepPlan, shape: ModelShape = SHAPE) -> PredictedMemory:
    return predicted_memory(step_statistics(step, LENGTHS), step, shape)


def test_tokens_in_flight_of_both_ends_of_the_pipeline() -> None:
    statistics = step_statistics(STEP, LENGTHS)
    assert statistics.peak_inflight_tokens == 80 + 112
    assert statistics.last_stage_inflight_tokens == statistics.largest_row_tokens == 112
    longer = step_statistics(STEP, [100, 60, 120, 10])
    assert longer.peak_inflight_tokens == 112 + 128
    both = statistics + longer
    assert (both.peak_inflight_tokens, both.largest_row_tokens) == (240, 128)


def test_a_placeholder_is_held_with_its_padding() -> None:
    padded = replace(STEP, config=replace(STEP.config, pad_total_to=64))
    statistics = step_statistics(padded, LENGTHS)
    assert statistics.peak_inflight_tokens == 128 + 128
    tail = replace(padded, micro_batches=(((), (), (2,), (0, 1, 3)),))
    assert step_statistics(tail, [1, 1, 10, 1]).peak_inflight_tokens == 64 + 64
    empty = replace(padded, micro_batches=(((),) * 4,), sample_indices=())
    assert step_statistics(empty, []).largest_row_tokens == 64


def test_bytes_by_hand() -> None:
    """One rank has half of a row's tokens, four of the eight layers, a quarter of what is cut."""
    norms = 4 * 64 / 4
    attention, feed_forward = 16 * (4 + 2 + 2 + 4) / 4, 3 * 256 / 4
    per_token = 4 * 2 * (norms + attention + feed_forward)
    logits = 56 * 256 * 6
    assert memory(STEP) == PredictedMemory(
        first_stage_bytes=96 * per_token,
        last_stage_bytes=56 * per_token + logits + 3 * 4 * 56 * 256,
        logit_bytes=logits,
    )


def test_predicting_further_tokens_takes_a_layer_and_logits_on_the_last_stage() -> None:
    """Four layers are a stage's, so that two more are half of that; the first stage has none."""
    further = replace(SHAPE, depths=2)
    without, found = memory(STEP), memory(STEP, further)
    logits = 56 * 256 * 2 * 4
    assert found.first_stage_bytes == without.first_stage_bytes
    assert found.logit_bytes == without.logit_bytes + logits
    layers = without.first_stage_bytes * (56 / 96) * 2 / 4
    assert found.last_stage_bytes == without.last_stage_bytes + logits + layers
    forward = replace(STEP, forward_only=True)
    assert memory(forward, further) == memory(forward)


def test_a_fused_output_layer_holds_hidden_states_and_a_gradient_of_its_weight() -> None:
    fused = replace(SHAPE, fused_output=True)
    hidden, weight = 56 * 64 * 2, 256 * 64
    found = memory(STEP, fused)
    assert found.logit_bytes == 2 * hidden + weight * (4 + 2)
    without = memory(STEP)
    assert found.last_stage_bytes - found.logit_bytes == (
        without.last_stage_bytes - without.logit_bytes
    )
    assert memory(STEP, replace(fused, depths=2)).logit_bytes == found.logit_bytes + 2 * hidden
    assert memory(replace(STEP, forward_only=True), fused).logit_bytes == hidden


def test_recomputation_and_forward_passes_keep_less() -> None:
    kept = memory(STEP, replace(SHAPE, recompute=True)).first_stage_bytes
    assert kept == 96 * 4 * 2 * 64 / 4
    forward = memory(replace(STEP, forward_only=True))
    assert forward.first_stage_bytes == memory(STEP).first_stage_bytes * (112 / 192) / 4
    assert forward.logit_bytes == 56 * 64 * 2  # the output layer's inputs, as fused


CONFIG = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "rope_theta": 1e6,
}


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
