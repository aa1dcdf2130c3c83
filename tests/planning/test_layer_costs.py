"""What layers cost, read from models' configs, and the stages that they add up to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from model_configs import DEEPSEEK, GLM, GPT_OSS, NEMOTRON, QWEN

from mcore_batching.planning import ConfigError, CostModel, ParallelDims
from mcore_batching.planning.costs.layer_costs import LayerCost, cost_model, costs_of_chunks
from mcore_batching.planning.costs.layers_of import config_of_json, first_guess

TINY: dict[str, Any] = {
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}


def letters(model: CostModel) -> dict[str, LayerCost]:
    return {letter: LayerCost(*costs) for letter, *costs in model.layer_costs}


def total(model: CostModel) -> LayerCost:
    costs = [letters(model)[each] for each in model.layers if each != "|"]
    return LayerCost(*map(sum, zip(*costs, strict=True)))


def stages(model: CostModel, count: int, chunks: int = 1) -> list[list[tuple[float, float]]]:
    """Cost of tokens and of pairs of each model chunk over the mean one's."""
    dims = ParallelDims(pipeline_parallel=count, virtual_pipeline=chunks)
    kinds, which = costs_of_chunks(model, dims)
    shares = [(kind.linear / model.linear, kind.quadratic / model.quadratic) for kind in kinds]
    return [[shares[kind] for kind in stage] for stage in which]


def test_a_small_transformer() -> None:
    # Of each layer 48 weights of attention, 96 of the feed-forward layer; the output layer has 40.
    dense = first_guess(TINY)
    assert dense.quadratic == pytest.approx(0.5 * 16 / 328)
    assert (dense.per_micro_batch, dense.backward_ratio) == (256, 2)
    assert first_guess(TINY | {"recompute_granularity": "full"}).backward_ratio == 3
    # A token meets 2 of 6 experts, whose weights a micro-batch reads all, and a router.
    routed = first_guess(
        TINY | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    )
    assert total(routed)[0] == 2 * (48 + 2 * 96 + 24) + 40
    assert total(routed).read == 2 * (48 + 6 * 96 + 24) + 40


@pytest.mark.parametrize(
    ("config", "active", "whole"),
    [
        (QWEN, 3.0, 34.2),
        (NEMOTRON, 12.2, 120.0),
        (GLM, 40.8, 743.0),
        (DEEPSEEK, 36.6, 670.1),
        (GPT_OSS, 5.1, 116.3),
    ],
    ids=("Qwen3.5-35B-A3B", "Nemotron-3-Super-120B-A12B", "GLM-5", "DeepSeek-V3", "gpt-oss-120b"),
)
def test_published_models_have_the_weights_that_they_are_said_to_have(
    config: dict[str, Any], active: float, whole: float
) -> None:
    """But for embeddings, of which a token meets one row."""
    found = total(first_guess(config))
    assert found.token / 1e9 == pytest.approx(active, rel=0.03)
    assert found.read / 1e9 == pytest.approx(whole, rel=0.01)


def test_pairs_of_tokens_cost_by_the_type_of_attention() -> None:
    # Of 40 layers of Qwen3.5 every fourth has any; 16 heads of size 256, half of pairs masked.
    assert total(first_guess(QWEN)).pair == 10 * 0.5 * 2 * 16 * 256
    # MLA's queries have 192 numbers, its values 128.
    assert total(first_guess(DEEPSEEK)).pair == 61 * 0.5 * 128 * (192 + 128)
    # DSA scores all pairs with a small indexer, and attends to 2048 tokens.
    glm = first_guess(GLM)
    assert total(glm).far_pair == 78 * 0.5 * 32 * 128
    assert glm.window == 2048
    near, far = glm.sample(2048) - 2048, glm.sample(100 * 2048) - 100 * 2048
    share = glm.beyond_window
    assert far / near == pytest.approx(share * 100**2 + (1 - share) * (100**2 - 99**2))
    # Every other layer of gpt-oss has a window of 128.
    assert (first_guess(GPT_OSS).window, first_guess(GPT_OSS).beyond_window) == (128, 0.5)
    assert first_guess(TINY | {"sliding_window": 9, "use_sliding_window": False}).window is None


def test_stages_of_the_layers_that_they_hold() -> None:
    qwen = first_guess(QWEN)
    assert qwen.layers == "aaab" * 10 + "V"
    ((_, first),), *_, ((tokens, last),) = stages(qwen, 4)
    assert (first, last) == (pytest.approx(0.8), pytest.approx(1.2))  # 2 and 3 of the 10
    assert tokens == pytest.approx(1.50, abs=0.01)  # a vocabulary of 248320
    ((tokens, _),) = stages(first_guess(QWEN | {"num_nextn_predict_layers": 1}), 4)[-1]
    assert tokens == pytest.approx(1.90, abs=0.01)
    # Dense layers first, as layers are counted out over the chunks of all stages.
    uneven = {"pipeline_model_parallel_size": 8, "decoder_last_pipeline_num_layers": 5}
    deepseek = first_guess(DEEPSEEK | uneven)
    assert deepseek.layers.startswith("aaabbbbb|bbbbbbbb|")
    shares = stages(deepseek, 4, 2)
    assert shares[0][0][0] < shares[1][0][0]
    assert shares[3][1][1] == pytest.approx(8 * 5 / 61)
    assert shares[0][1] == shares[1][1]


def test_a_hybrid_pattern_cuts_itself() -> None:
    config = NEMOTRON | {"hybrid_override_pattern": "MM*E|ME"}
    assert stages(first_guess(config), 2)[1][0][1] == 0.0  # no attention on the second stage
    assert first_guess(config | {"hybrid_override_pattern": "MM*E|ME/*E"}).layers == "MM*E|MEV"
    depth = first_guess(config | {"hybrid_override_pattern": "MM*E|ME/*E/*E"})
    assert letters(depth)["V"].pair == 2 * letters(depth)["*"].pair
    with pytest.raises(ConfigError, match="'X'"):
        first_guess(config | {"hybrid_override_pattern": "MX"})


def test_equal_stages_have_one_cost() -> None:
    layer = LayerCost(2.0, 1.0, 1.0, 2.0)
    assert stages(cost_model("a" * 8, {"a": layer}), 4) == []
    uneven = cost_model("aaa|aaaaa", {"a": layer})
    assert [share for ((share, _),) in stages(uneven, 2)] == [0.75, 1.25]
    # Cut for other stages than these, layers are cut evenly.
    assert stages(uneven, 4) == []


def test_costs_of_layers_travel_as_json() -> None:
    model = first_guess(GLM)
    assert CostModel.from_json(model.to_json()) == model
    for bad in (
        {"layers": "ax"},
        {"layer_costs": [["a", 1.0]]},
        {"layer_costs": [["a", -1, 0, 0, 0]]},
    ):
        with pytest.raises(ConfigError, match="layer_costs"):
            CostModel(**{"layers": "a", "layer_costs": [["a", 1, 1, 1, 1]]} | bad)


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "intermediate_size"])
def test_a_config_without_a_size_is_refused_by_name(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        first_guess({name: size for name, size in TINY.items() if name != missing})
    assert config_of_json(json.dumps({"text_config": TINY})).items() >= TINY.items()
