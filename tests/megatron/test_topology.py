"""The first guess of what a model costs, which every job makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_batching.megatron.topology import first_guess
from mcore_batching.planning import CostModel

ARGS = SimpleNamespace(padded_vocab_size=1024)
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_guess_is_of_the_models_shape() -> None:
    narrow, wide = (
        first_guess(ARGS, TransformerConfig(**SHAPE | {"hidden_size": size})) for size in (64, 512)
    )
    assert narrow.quadratic > wide.quadratic > 0
    assert first_guess(ARGS, MLATransformerConfig(**SHAPE)).quadratic > 0


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
def test_a_model_of_another_shape_is_trained_all_the_same(odd: dict[str, Any]) -> None:
    config = TransformerConfig(**SHAPE)
    for name, value in odd.items():
        setattr(config, name, value)
    assert first_guess(ARGS, config) == CostModel()
    assert first_guess(ARGS, SimpleNamespace()) == CostModel()
