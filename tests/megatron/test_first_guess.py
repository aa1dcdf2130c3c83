"""The cost model of a model's shape, read from Megatron's config."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_batching.megatron.topology import first_guess
from mcore_batching.planning import CostModel

VOCABULARY = 10
SHAPE = {"hidden_size": 8, "ffn_hidden_size": 12, "num_layers": 2, "num_attention_heads": 2}
SAME = {"hidden": 8, "layers": 2, "heads": 2, "gated": False}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, {"ffn": 12, "vocab": 10}),
        (
            {"gated_linear_unit": True, "num_query_groups": 1, "kv_channels": 3},
            {"ffn": 12, "vocab": 10, "gated": True, "groups": 1, "head_dim": 3},
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            {"ffn": 12, "vocab": 10, "recompute": True},
        ),
        ({"window_size": (7, 0)}, {"ffn": 12, "vocab": 10, "window": 8}),
        ({"window_size": (7, 0), "window_attn_skip_freq": 2}, {"ffn": 12, "vocab": 10}),
        ({"window_size": (-1, -1)}, {"ffn": 12, "vocab": 10}),
        (
            {
                "num_moe_experts": 8,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 6,
                "moe_shared_expert_intermediate_size": 4,
                "expert_model_parallel_size": 2,
            },
            {"ffn": 6, "vocab": 10, "experts_per_token": 2, "experts_held": 4, "shared_ffn": 4},
        ),
    ],
    ids=("dense", "grouped", "recomputed", "window", "windows", "no-window", "experts"),
)
def test_costs_of_a_transformer(config: dict[str, Any], shape: dict[str, Any]) -> None:
    guess = first_guess(VOCABULARY, TransformerConfig(**SHAPE, **config))
    assert guess == CostModel.from_model(**SAME | shape)


def test_the_output_layer_is_left_out_where_its_size_is_not_known() -> None:
    guess = first_guess(None, TransformerConfig(**SHAPE))
    assert guess == CostModel.from_model(**SAME, ffn=12)


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": 0},
        {"ffn_hidden_size": 0},
        {"ffn_hidden_size": None, "num_moe_experts": 4, "moe_ffn_hidden_size": None},
        {"num_layers": 0},
    ],
    ids=str,
)
def test_a_model_of_another_shape_has_the_default_costs(odd: dict[str, Any]) -> None:
    config = TransformerConfig(**SHAPE)
    for name, value in odd.items():
        setattr(config, name, value)
    assert first_guess(VOCABULARY, config) == CostModel()
    assert first_guess(VOCABULARY, ModelParallelConfig()) == CostModel()


def test_latent_attention_is_guessed_by_its_heads() -> None:
    assert first_guess(VOCABULARY, MLATransformerConfig(**SHAPE)).quadratic > 0
