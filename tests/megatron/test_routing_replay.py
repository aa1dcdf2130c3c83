"""Routed experts of rows, checked against the model before its pipeline starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.packing import pack
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, Schema, SchemaError, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.megatron import DynamicBatchArgumentError, routing

FIELD = "rollout_routed_experts"


def model(**changes: Any) -> list[Any]:
    """Chunks of a model of 4 layers, experts in every second one."""
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": 2,
        "moe_enable_routing_replay": True,
    }
    return [SimpleNamespace(config=TransformerConfig(**options | changes))]


def schedule(*experts: Any, schema: Schema = DEFAULT_SCHEMA, **others: Any) -> Any:
    """Samples of three tokens, in a step of one micro-batch."""
    count = len(experts)
    samples = {
        "tokens": [torch.tensor([1, 2, 3])] * count,
        "total_lengths": [3] * count,
        "response_lengths": [2] * count,
        FIELD: [*experts],
        **others,
    }
    return SimpleNamespace(
        rollout_data=Columns.read(samples, schema),
        steps=[(tuple(range(count)), ())],
        names_of=lambda indices: f"sample{list(indices)}",
    )


def check(model: list[Any], schedule: Any) -> None:
    routing.check_replay(model, schedule, 0)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (torch.zeros(2, 3, 2).long(), r"experts of 4 or 2 layers, 2 for each token.*\[2, 3, 2\]"),
        (torch.zeros(2, 4, 1).long(), r"2 for each token \(--moe-router-topk\)"),
        (torch.tensor([1, 4]).expand(2, 4, 2), r"from 0 to 3 \(.*\), found 1 to 4 of sample\[1\]"),
        (torch.tensor([-1, 2]).expand(2, 4, 2), r"\(--num-experts\), found -1 to 2 of sample\[1\]"),
    ],
)
def test_experts_that_the_model_lacks_are_refused(experts: Any, message: str) -> None:
    """By the sample's index in the batch; those of all layers or of routed ones are replayed."""
    for layers in (4, 2):
        check(model(), schedule([[[0, 3]] * layers] * 2))
    with pytest.raises(SchemaError, match=message):
        check(model(), schedule(torch.zeros_like(experts), experts))


def test_a_placeholder_gets_as_many_layers_as_the_model() -> None:
    """A rank that has no sample has not seen any."""
    fields = ("tokens", "total_lengths", "response_lengths", FIELD)
    fabricated = make_placeholder(DEFAULT_SCHEMA, fields, None)
    placeholder = pack(fabricated, sample_indices=(), row_alignment_tokens=6)
    found = routing._experts(placeholder, FIELD, model()[0].config)
    assert found.shape == (6, 4, 2)
    assert bool((found[..., 0] != found[..., 1]).all())
    assert found.unique().tolist() == [0, 1, 2, 3]


def test_what_is_not_replayed_is_left_alone() -> None:
    wrong = schedule(torch.zeros(2, 9, 9).long())
    for changes in ({"moe_enable_routing_replay": False}, {"num_moe_experts": None}):
        check(model(**changes), wrong)
    plain = schedule(torch.zeros(2, 9, 9).long())
    nothing = {name: [] for name in ("tokens", "total_lengths", "response_lengths")}
    plain.rollout_data = Columns.read(nothing, DEFAULT_SCHEMA)
    check(model(), plain)


def test_what_would_be_replayed_in_part_is_refused() -> None:
    experts = torch.tensor([0, 3]).expand(2, 4, 2)
    fused = model()
    fused[0].config.moe_router_fusion = True
    with pytest.raises(DynamicBatchArgumentError, match="unset --moe-router-fusion"):
        check(fused, schedule(experts))
    schema = DEFAULT_SCHEMA.declare("other", Kind.ROUTED_EXPERTS, length_offset=-1)
    with pytest.raises(DynamicBatchArgumentError, match=r"other .* Kind.METADATA"):
        check(model(), schedule(experts, schema=schema, other=[experts]))


def test_routers_route_by_themselves_after_a_pipeline_that_failed() -> None:
    """Also where the next forward pass has no recorded experts, as in an evaluation."""
    chunk, router = torch.nn.Module(), torch.nn.Module()
    (plain,) = model()
    chunk.config, chunk.router, router.router_replay = plain.config, router, RouterReplay()

    def replays_and_fails() -> None:
        with routing.replayed_step([chunk]):
            router.router_replay.set_target_indices(torch.zeros(3, 2, dtype=torch.int64))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        replays_and_fails()
    assert router.router_replay.router_replay_action is None
    assert router.router_replay.target_topk_idx is None
