"""Costs of samples and rows; of layers, read from models' configs, and the stages that they add up
to.

Sizes of published models are those of their repositories' `config.json`, as far as costs depend on
them, and of the launch scripts of slime and miles for the same models.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    plan_step,
    validate_plan,
)
from mcore_batching.planning.costs.cost import (
    LayerCost,
    costs_of_chunks,
    costs_of_stage,
    cut_layers,
    sum_of,
)
from mcore_batching.planning.costs.layers_of import (
    config_of_json,
    cost_model,
    first_guess,
    layers_of_chunks,
)

QWEN = config_of_json(
    """{"hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": 248320,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "attn_output_gate": true, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512}"""
)
NEMOTRON = config_of_json(
    """{"hidden_size": 4096, "vocab_size": 131072,
    "hybrid_override_pattern":
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 512,
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376, "mlp_hidden_act": "relu2"}"""
)
OF_DEEPSEEK = config_of_json(
    """{"first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 2048, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64}"""
)
GLM = OF_DEEPSEEK | config_of_json(
    """{"hidden_size": 6144, "num_hidden_layers": 78, "vocab_size": 154880,
    "intermediate_size": 12288, "num_attention_heads": 64, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 2048}"""
)
DEEPSEEK = OF_DEEPSEEK | config_of_json(
    """{"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
    "intermediate_size": 18432, "num_attention_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "v_head_dim": 128}"""
)
GPT_OSS = config_of_json(
    """{"hidden_size": 2880, "num_hidden_layers": 36, "vocab_size": 201088,
    "sliding_window": 128, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880}"""
) | {"layer_types": ["sliding_attention", "full_attention"] * 18}
TINY = config_of_json(
    """{"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10}"""
)


def letters(model: CostModel) -> dict[str, LayerCost]:
    return {letter: LayerCost(*costs) for letter, *costs in model.layer_costs}


def stages(model: CostModel, count: int, chunks: int = 1) -> list[list[tuple[float, float]]]:
    """Cost of tokens and of pairs of each model chunk over the mean one's."""
    dims = ParallelDims(pipeline_parallel=count, virtual_pipeline=chunks)
    kinds, which = costs_of_chunks(model, dims)
    shares = [(kind.linear / model.linear, kind.quadratic / model.quadratic) for kind in kinds]
    return [[shares[kind] for kind in stage] for stage in which]


@pytest.mark.parametrize(
    ("config", "active", "whole", "far_pair", "window"),
    [
        # Of 40 layers every fourth has attention: 16 heads of size 256, half of the pairs masked.
        (QWEN, 3.0, 34.2, 10 * 0.5 * 2 * 16 * 256, None),
        (NEMOTRON, 12.2, 120.0, 8 * 0.5 * 2 * 32 * 128, None),
        # DSA scores all pairs with a small indexer, and attends to 2048 tokens.
        (GLM, 40.8, 743.0, 78 * 0.5 * 32 * 128, 2048),
        # MLA's queries have 192 numbers, its values 128.
        (DEEPSEEK, 36.6, 670.1, 61 * 0.5 * 128 * (192 + 128), None),
        # Every other layer has a window of 128.
        (GPT_OSS, 5.1, 116.3, 18 * 0.5 * 2 * 64 * 64, 128),
    ],
    ids=("Qwen3.5-35B-A3B", "Nemotron-3-Super-120B-A12B", "GLM-5", "DeepSeek-V3", "gpt-oss-120b"),
)
def test_published_models_have_the_weights_that_they_are_said_to_have(
    config: dict[str, Any], active: float, whole: float, far_pair: float, window: int | None
) -> None:
    """But for embeddings, of which a token meets one row."""
    model = first_guess(config)
    found = sum_of([letters(model)[each] for each in model.layers])
    assert found.token / 1e9 == pytest.approx(active, rel=0.03)
    assert found.read / 1e9 == pytest.approx(whole, rel=0.01)
    assert (found.far_pair, model.window) == (far_pair, window)
    assert CostModel.from_json(model.to_json()) == model


MLA = {"hidden_size": 2, "hybrid_layer_pattern": "*", "num_attention_heads": 3, "v_head_dim": 11}
MLA |= {"kv_lora_rank": 13, "q_lora_rank": 17, "qk_nope_head_dim": 5, "qk_rope_head_dim": 7}
DSA = MLA | {"index_n_heads": 3, "index_head_dim": 5, "index_topk": 9}
DELTA_NET = {"hidden_size": 2, "hybrid_layer_pattern": "G", "linear_num_key_heads": 3}
DELTA_NET |= {"linear_key_head_dim": 5, "linear_num_value_heads": 7, "linear_value_head_dim": 11}
MAMBA = {"hidden_size": 2, "hybrid_layer_pattern": "M", "mamba_num_heads": 3}
MAMBA |= {"mamba_head_dim": 5, "n_groups": 7, "ssm_state_size": 11}
ROUTED = TINY | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEPTHS = ROUTED | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 2}


@pytest.mark.parametrize(
    ("config", "letter", "costs"),
    [
        # 2·17 + 17·3·12 of queries, 2·(13 + 7) + 13·3·16 of keys and values, 3·11·2 of the output.
        (MLA, "*", (1376, 34.5, 34.5, 1376)),
        (MLA | {"q_lora_rank": None}, "*", (802, 34.5, 34.5, 802)),
        # The indexer's 17·3·5 + 2·(5 + 3).
        (DSA, "*", (1376 + 271, 42, 7.5, 1376 + 271)),
        (DSA | {"q_lora_rank": None}, "*", (802 + 46, 42, 7.5, 802 + 46)),
        # 2·(2·15 + 3·77 + 2·7); of the state 3·77·5, of chunks 64·(35 + 77).
        (DELTA_NET, "G", (550 + 1155 + 7168, 0, 0, 550)),
        # 2·(3·15 + 2·77 + 3); of the state 2·15·11, of chunks 64·(77 + 15).
        (MAMBA, "M", (404 + 330 + 5888, 0, 0, 404)),
        # 48 weights of attention, 96 of the feed-forward layer.
        (TINY, "a", (48 + 96, 4, 4, 48 + 96)),
        (TINY | {"num_key_value_heads": None}, "a", (64 + 96, 4, 4, 64 + 96)),
        # A token meets 2 of 6 experts, whose weights a micro-batch reads all, and a router.
        (ROUTED, "a", (48 + 2 * 96 + 24, 4, 4, 48 + 6 * 96 + 24)),
        (ROUTED | {"expert_model_parallel_size": 3}, "a", (264, 4, 4, 48 + 2 * 96 + 24)),
        (ROUTED | {"moe_latent_size": 2}, "a", (184, 4, 4, 48 + 6 * 48 + 24 + 16)),
        (TINY, "V", (40, 0, 0, 40)),
        # The last layer again for each depth, a projection of twice the size, the output layer.
        (DEPTHS, "V", (40 + 2 * (264 + 32 + 40), 8, 8, 40 + 2 * (648 + 32 + 40))),
    ],
)
def test_layers_by_hand(config: dict[str, Any], letter: str, costs: tuple[float, ...]) -> None:
    assert letters(first_guess(config))[letter] == costs


def test_a_model_by_hand() -> None:
    """Two layers and the output layer, relative to a token's work."""
    made = first_guess(ROUTED)
    assert made.quadratic == pytest.approx(2 * 4 / (2 * 264 + 40))
    assert made.per_micro_batch == pytest.approx(256 * (2 * 648 + 40) / (2 * 264 + 40))
    assert made.backward_ratio == 2
    assert first_guess(TINY | {"recompute_granularity": "full"}).backward_ratio == 3
    assert first_guess(TINY | {"window_size": (7, 0)}).window == 8
    assert first_guess(TINY | {"sliding_window": 9, "use_sliding_window": False}).window is None


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"decoder_sparse_step": 3}, "aaba"),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, "abab"),
        ({"first_k_dense_replace": 3}, "aaab"),
        # A layer more, of multi-token prediction.
        ({"layer_types": ["full_attention", *["sliding_attention"] * 4]}, "abbb"),
    ],
    ids=("step", "named", "first", "attention"),
)
def test_layers_in_their_order(config: dict[str, Any], layers: str) -> None:
    made = first_guess(ROUTED | {"num_hidden_layers": 4, "sliding_window": 8} | config)
    assert made.layers == layers + "V"


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({}, []),
        ({"decoder_first_pipeline_num_layers": 2}, [2, 5, 5]),
        ({"num_layers_in_last_pipeline_stage": 4}, [4, 4, 4]),
        (
            {"num_layers_in_first_pipeline_stage": 1, "decoder_last_pipeline_num_layers": 3},
            [1, 8, 3],
        ),
        ({"account_for_embedding_in_pipeline_split": True}, [3, 4, 4]),
        (
            {
                "virtual_pipeline_model_parallel_size": 2,
                "decoder_last_pipeline_num_layers": 8,
            },
            [1, 1, 4, 1, 1, 4],
        ),
    ],
    ids=("even", "first", "last", "both", "embedding", "chunks"),
)
def test_layers_of_uneven_stages(config: dict[str, Any], counts: list[int]) -> None:
    layers = 11 if "account_for_embedding_in_pipeline_split" in config else 12
    assert layers_of_chunks({"pipeline_model_parallel_size": 3} | config, layers) == counts
    assert layers_of_chunks(config, layers) == []  # a single stage


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


def test_stages_keep_windows_and_reads_of_their_own() -> None:
    near, far = LayerCost(4.0, 2.0, 0.0, 2.0), LayerCost(4.0, 6.0, 6.0, 10.0)
    output = LayerCost(2.0, 0.0, 0.0, 0.0)
    costs = {"n": near, "f": far, "V": output}
    model = cost_model("nnffV", costs, window=8)
    ((first, last), _) = costs_of_chunks(model, ParallelDims(pipeline_parallel=2))
    assert (first.beyond_window, last.beyond_window) == (0.0, 1.0)
    assert last.per_micro_batch == 5 * first.per_micro_batch
    # Chunks n and f of the first stage, n and fV of the second.
    interleaved = ParallelDims(pipeline_parallel=2, virtual_pipeline=2)
    stage = costs_of_stage(model, interleaved, 0)
    assert (stage.beyond_window, stage.quadratic) == (0.75, model.quadratic)
    assert stage.linear == pytest.approx(4 / 4.5)
    assert cost_model("n", costs, window=8).window == 8
    whole = cost_model("f", costs, window=8)
    assert (whole.window, whole.backward_ratio) == (None, 2.0)
    assert cost_model("f", costs).beyond_window == 0.0
    # An output layer of unknown size, alone on its stage.
    ((_, last), _) = costs_of_chunks(
        cost_model("nf|V", costs | {"V": LayerCost()}), ParallelDims(pipeline_parallel=2)
    )
    assert last.linear == 0.0
    assert cut_layers("aaaaaV", 2) == "aaa|aaV"


def test_a_hybrid_pattern_cuts_itself() -> None:
    config = NEMOTRON | {"hybrid_override_pattern": "MM*E|ME"}
    assert stages(first_guess(config), 2)[1][0][1] == 0.0  # no attention on the second stage
    assert first_guess(config | {"hybrid_override_pattern": "MM*E|ME/*E"}).layers == "MM*E|MEV"
    depth = first_guess(config | {"hybrid_override_pattern": "MM*E|ME/*E/*E"})
    assert letters(depth)["V"].pair == 2 * letters(depth)["*"].pair
    usual = first_guess(config | {"hybrid_override_pattern": "M*E", "mtp_num_layers": 2})
    assert usual.layer_costs[-1] == depth.layer_costs[-1]
    sparse = first_guess(config | {"hybrid_override_pattern": "MDE"})
    assert letters(sparse)["D"] == letters(depth)["*"]
    heads = {"mamba_num_heads": None, "mamba_head_dim": None}
    assert letters(first_guess(config | heads))["M"] == letters(depth)["M"]


def test_equal_stages_have_one_cost() -> None:
    layer = LayerCost(2.0, 1.0, 1.0, 2.0)
    assert stages(cost_model("a" * 8, {"a": layer}), 4) == []
    uneven = cost_model("aaa|aaaaa", {"a": layer})
    assert [share for ((share, _),) in stages(uneven, 2)] == [0.75, 1.25]
    # Cut for other stages than these, layers are cut evenly.
    assert stages(uneven, 4) == []


@pytest.mark.parametrize(
    ("config", "same"),
    [
        # A size of 0 is none; a job's 0 of what a model may be without is its own.
        (TINY | {"num_key_value_heads": 0}, TINY | {"num_key_value_heads": 2}),
        (TINY | {"head_dim": 0, "sliding_window": 0}, TINY),
        (ROUTED | {"moe_intermediate_size": 0}, ROUTED),  # as intermediate_size is 8, too
        (TINY | {"mtp_num_layers": 0, "num_nextn_predict_layers": 1}, TINY),
        (ROUTED | {"num_moe_experts": 0}, TINY),
        # The first name counts, and of older models others.
        (TINY | {"num_layers": 3, "num_hidden_layers": 2}, TINY | {"num_hidden_layers": 3}),
        (
            {"n_embd": 4, "n_inner": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10},
            TINY | {"num_key_value_heads": None},
        ),
        # Mixtral's experts have the size of what would be the dense layer.
        (ROUTED | {"moe_intermediate_size": None}, ROUTED),
        (
            ROUTED | {"ffn_hidden_size": 6, "moe_intermediate_size": None},
            ROUTED | {"moe_intermediate_size": 6},
        ),
        # transformers' head size counts the rotary part, not Megatron's of the same name.
        (DEEPSEEK | {"qk_head_dim": 192, "head_dim": 64}, DEEPSEEK),
        (DEEPSEEK | {"qk_nope_head_dim": None, "qk_head_dim": 128}, DEEPSEEK),
    ],
)
def test_names_and_sizes_that_mean_the_same(config: dict[str, Any], same: dict[str, Any]) -> None:
    assert first_guess(config) == first_guess(same)


def test_stages_are_of_the_same_kinds_for_rows_of_every_size() -> None:
    """Costs may be learnt as 0 for one rank; shared rows add a constant, in which stages differ."""
    costs = [["a", 1, 0.001, 20.0, 5.0], ["b", 2, 0.0, 10.0, 1.0], ["o", 3, 0, 5, 2.0]]
    model = CostModel(quadratic=0.0, per_micro_batch=0.0, layers="ababababo", layer_costs=costs)
    dims = ParallelDims(data_parallel=16, pipeline_parallel=4, virtual_pipeline=2)
    kinds = {costs_of_chunks(model.on_ranks(size), dims)[1] for size in (1, 2, 16)}
    assert len(kinds) == 1
    config = PlannerConfig(max_tokens_per_gpu=1000, max_context_parallel=16, plan_effort=1)
    lengths = [*[900] * 8, 1900, 3900]
    validate_plan(plan_step(lengths, dims, config, model), lengths)


def test_cost_of_samples_and_micro_batches() -> None:
    model = CostModel()
    assert model.sample(0) == 0
    assert model.sample(24576) == 2 * 24576
    assert model.micro_batch([]) == 256
    assert model.micro_batch([24576, 12288]) == 256 + 2 * 24576 + 12288 * 1.5
    assert model.backward_ratio == 2
    assert CostModel(linear=2, quadratic=3, per_micro_batch=5).micro_batch([1, 10]) == 330
    model = CostModel(quadratic=1.0, window=4, beyond_window=0.25)
    assert [model.sample(length) for length in (2, 6)] == [2 + 4, 6 + 36 - 0.75 * 4]


COSTS = CostModel(
    linear=2.0, quadratic=0.5, backward_ratio=1.5, window=7, context_parallel_overhead=0.25
)


def test_cost_model_round_trip_with_and_without_what_a_record_notes() -> None:
    assert CostModel.from_json(COSTS.to_json()) == COSTS
    assert CostModel.from_json("\ufeff" + COSTS.to_json()) == COSTS
    document = json.loads(COSTS.to_json()) | {"seconds_per_unit": 1e-6}
    assert CostModel.from_json(json.dumps(document)) == COSTS
    del document["window"]
    assert CostModel.from_json(json.dumps(document)) == dataclasses.replace(COSTS, window=None)


def test_costs_of_a_row_grow_with_each_doubling_of_its_size() -> None:
    """By a share of its work and a fixed part; on one rank not at all."""
    model = CostModel(context_parallel_overhead=0.25, context_parallel_fixed=40.0)
    assert model.on_ranks(1) == model
    alone = model.sample(8000)
    for size, doublings in ((2, 1), (4, 2), (8, 3), (3, 2), (6, 3)):
        rows = model.on_ranks(size)
        assert rows.sample(8000) == pytest.approx(alone * 1.25**doublings / size, rel=1e-12)
        assert rows.per_micro_batch == model.per_micro_batch + 40.0 * doublings
    free = CostModel(context_parallel_overhead=0.0, context_parallel_fixed=0.0)
    assert free.on_ranks(4).micro_batch([8000]) == pytest.approx(256 + alone / 4)
