"""Costs of Megatron's models: guessed by the config's shape, and learnt from times of passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import JobMemory
from mcore_batching.megatron.timing import CostLearner, TimedStep, learner_of
from mcore_batching.megatron.topology import first_guess
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.costs import layers_of
from mcore_batching.planning.plans.memory import ModelShape
from mcore_batching.planning.schedule import Pass

VOCABULARY = 10
SHAPE = {"hidden_size": 8, "ffn_hidden_size": 12, "num_layers": 4, "num_attention_heads": 2}
SAME = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "vocab_size": 10,
}


WINDOW, FULL = {"window_size": (7, 0)}, {"recompute_granularity": "full"}
SHARED = {"expert_model_parallel_size": 2, "moe_shared_expert_intermediate_size": 4}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 6} | SHARED
PUBLISHED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
PUBLISHED |= {"expert_model_parallel_size": 2, "shared_expert_intermediate_size": 4}
TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "grouped": (
        {"gated_linear_unit": True, "num_query_groups": 1, "kv_channels": 3},
        {"hidden_act": "silu", "num_key_value_heads": 1, "head_dim": 3},
    ),
    "recomputed": (FULL | {"recompute_method": "uniform", "recompute_num_layers": 1}, FULL),
    "window": (WINDOW, {"sliding_window": 8}),
    "windows": (
        WINDOW | {"window_attn_skip_freq": 2},
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "no-window": ({"window_size": (-1, -1)}, {}),
    "experts": (
        EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
        PUBLISHED | {"first_k_dense_replace": 1},
    ),
    "mtp": ({"mtp_num_layers": 2}, {"num_nextn_predict_layers": 2}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_costs_of_a_transformer(name: str) -> None:
    """The same from Megatron's config as from the model's published one."""
    config, published = TRANSFORMERS[name]
    guess = first_guess(VOCABULARY, TransformerConfig(**SHAPE, **config))
    assert guess == layers_of.first_guess(SAME | published)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            {
                "num_layers": 6,
                "virtual_pipeline_model_parallel_size": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            "a|aa|aa|aV",
        ),
        ({"pipeline_model_parallel_layout": "Ettt|tL"}, "aaa|aV"),
    ],
    ids=("embedding-and-loss-interleaved", "layout"),
)
def test_layers_of_uneven_pipelines(config: dict[str, Any], layers: str) -> None:
    made = TransformerConfig(
        **SHAPE | config, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    assert first_guess(VOCABULARY, made).layers == layers


def test_layers_of_a_hybrid_model() -> None:
    config = TransformerConfig(**SHAPE, mamba_head_dim=4, mamba_num_groups=2, mamba_state_dim=4)
    model = SimpleNamespace(hybrid_layer_pattern="M*|M-/*-")
    assert first_guess(VOCABULARY, config, model).layers == "M*|M-V"


def test_the_output_layer_is_left_out_where_its_size_is_not_known() -> None:
    guess = first_guess(None, TransformerConfig(**SHAPE))
    assert guess == layers_of.first_guess(SAME | {"vocab_size": 0})


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": 0},
        {"ffn_hidden_size": 0},
        {"ffn_hidden_size": None, "num_moe_experts": 4, "moe_ffn_hidden_size": None},
        {"num_layers": 0},
        {"is_hybrid_model": True},  # whose pattern nobody knows
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
    config = MLATransformerConfig(
        **SHAPE,
        q_lora_rank=6,
        kv_lora_rank=5,
        qk_head_dim=4,
        qk_pos_emb_head_dim=2,
        v_head_dim=3,
    )
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4}
    sizes |= {"qk_rope_head_dim": 2, "v_head_dim": 3}
    assert first_guess(VOCABULARY, config) == layers_of.first_guess(SAME | sizes)


def test_memory_is_predicted_for_the_configs_shape() -> None:
    """Of experts counts what a token is sent to."""
    shape: dict[str, Any] = {"layers": 4, "hidden": 8, "recompute": False, "depths": 0}
    vocabulary, attention = {"vocab_size": VOCABULARY}, 2 * (2 + 2) * 4
    dense = vars(TransformerConfig(**SHAPE)) | vocabulary
    made = ModelShape.of(dense)
    assert made == ModelShape(**shape, vocab=VOCABULARY, inner=attention + 2 * 12)
    experts = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 6}
    sparse = TransformerConfig(**SHAPE, **experts, moe_shared_expert_intermediate_size=5)
    made = ModelShape.of(vars(sparse) | vocabulary)
    assert made == ModelShape(**shape, vocab=VOCABULARY, inner=attention + 2 * (3 * 6 + 5))


ORDER = [Pass(kind, chunk, slot) for kind in ("F", "B") for chunk in (0, 1) for slot in (0, 1, 2)]


class Mark:
    """A mark of a device, at a time; without one the device has not got to it."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return self.seconds is not None

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * float(end.seconds - self.seconds)


def marks() -> list[Any]:
    """Slot n takes n + 1 s a pass, backward passes twice as long; between passes 100 s pass."""
    found, now = [], 0.0
    for each in ORDER:
        took = (each.slot + 1.0) * (2 if each.kind == "B" else 1)
        found += [Mark(now), Mark(now + took)]
        now += took + 100.0
    return found


def test_a_row_takes_its_passes_through_all_chunks() -> None:
    step = TimedStep([(5,), (), (3, 4)], ORDER, marks())
    assert step.is_over
    assert [tuple(row) for row in step.timed_rows()] == [((5,), 6.0), ((3, 4), 18.0)]
    assert not TimedStep([(5,)], ORDER, [*marks()[:-1], Mark(None)]).is_over


def test_expert_parallel_ranks_are_refused() -> None:
    learner, shape = CostLearner(), CostModel()
    with pytest.raises(DynamicBatchArgumentError) as refused:
        learner.begin(shape, ParallelDims(data_parallel=2, expert_parallel=2))
    said = str(refused.value)
    assert said.startswith("--dynamic-batch-cost-model auto learns")
    assert "expert-parallel ranks wait for each other in every one: set it to fixed" in said
    assert learner.begin(shape, ParallelDims(data_parallel=2)).cost_model is shape


def test_an_actor_and_a_critic_have_learners_of_their_own() -> None:
    actor, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    job: Any = SimpleNamespace(memory=JobMemory(None))
    assert learner_of(job, [actor]) is learner_of(job, [actor]) is not learner_of(job, [critic])
