"""Calls that hide differences between versions of Megatron."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.megatron import compat, prepare_packed_model
from mcore_batching.megatron.checks import settings
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.logits import why_not_fused
from mcore_batching.megatron.options import Options
from mcore_batching.planning import ParallelDims


def test_what_rows_have_beside_megatrons_fields_is_not_declared() -> None:
    """Transformer Engine's wrapper passes on every declared field but those it knows to drop."""
    params = compat.packed_seq_params(torch.tensor([0, 4], dtype=torch.int32), 4, [0, 4])
    assert params.host_cu_seqlens == (0, 4)
    assert "host_cu_seqlens" not in {field.name for field in dataclasses.fields(params)}


@pytest.mark.skipif(not hasattr(PackedSeqParams, "seq_idx"), reason="made by Mamba layers itself")
def test_mamba_layers_number_the_tokens_of_rows_as_megatron_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a row, and not where its maker did."""

    class Mixer:
        def _ssm_training(self, inputs: Any, packed_seq_params: Any = None) -> Any:
            return packed_seq_params and packed_seq_params.seq_idx

    name = "megatron.core.ssm.mamba_mixer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MambaMixer=Mixer))
    monkeypatch.setattr(settings, "current_dims", lambda chunks: ParallelDims())
    model: Any = torch.nn.Identity()
    model.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    prepare_packed_model(model)
    offsets, inputs = torch.tensor([0, 4, 12, 13], dtype=torch.int32), torch.zeros(13)
    expected = PackedSeqParams(cu_seqlens_q=offsets, total_tokens=13).seq_idx
    row = compat.packed_seq_params(offsets, 8, [0, 4, 12, 13])
    made = Mixer()._ssm_training(inputs, row)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)
    assert Mixer()._ssm_training(inputs, row) is made
    padded: Any = SimpleNamespace(cu_seqlens_q_padded=torch.tensor([0, 2, 3]), seq_idx=None)
    assert Mixer()._ssm_training(torch.zeros(3), padded).tolist() == [[0, 0, 1]]
    assert Mixer()._ssm_training(torch.zeros(3)) is None


@pytest.mark.parametrize(
    ("version", "frees_outputs", "waits"),
    [
        ("0.17.1", True, False),
        ("0.18.0rc1", True, True),
        ("0.19.2", True, True),
        ("0.19.2", False, False),
        ("1.0.0", True, True),
    ],
)
def test_who_waits_for_sends(
    version: str, frees_outputs: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    config = SimpleNamespace(deallocate_pipeline_outputs=frees_outputs)
    assert compat.waits_for_sends(config) is waits


OUTPUT_LAYERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({}, {"use_mup": False}, ""),  # a setting that some releases lack
    ({}, {"use_mup": True}, "scales its logits (--use-mup)"),
    ({"bias": torch.zeros(1)}, {}, "has a bias"),
    ({"gather_output": True}, {}, "gathers its output (parallel_output=False)"),
    ({"gtp_remat_size": 2}, {}, "gathers its weight (generalized tensor parallelism)"),
]


@pytest.mark.parametrize(("changes", "config", "reason"), OUTPUT_LAYERS)
def test_output_layers_that_are_more_than_a_product(
    changes: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    layer = object.__new__(ColumnParallelLinear)
    layer.__dict__.update({"bias": None, "gather_output": False, "gtp_remat_size": 1} | changes)
    chunk = SimpleNamespace(output_layer=layer, config=SimpleNamespace(**config))
    assert why_not_fused(chunk) == reason


def test_a_model_with_another_output_layer_cannot_be_fused() -> None:
    chunk = SimpleNamespace(output_layer=torch.nn.Identity(), config=SimpleNamespace())
    args = SimpleNamespace(use_dynamic_batch_size=True, dynamic_batch_fuse_output_layer=True)
    with pytest.raises(DynamicBatchArgumentError, match="the output layer is a Identity, so it"):
        settings.check_logits(Options.of(args), [chunk])
    settings.check_logits(Options.of(SimpleNamespace()), [chunk])


def test_all_losses_that_routers_record_are_scaled() -> None:
    def values(each: Any) -> Any:  # an object from 0.18 on
        return (each if isinstance(each, dict) else vars(each))["values"]

    recorded = compat._moe_metrics()
    before = dict(recorded)
    recorded.clear()
    group: Any = object()
    for name, groups in (("load_balancing_loss", {"reduce_group": group}), ("z_loss", {})):
        save_to_aux_losses_tracker(name, torch.tensor(6.0), layer_number=1, num_layers=1, **groups)
    # Of 4 slots one is of a row on two ranks, one of one on each.
    compat.scale_moe_metrics(4, rows=3.0, passes=2)
    assert [values(each).tolist() for each in recorded.values()] == [[8.0], [12.0]]
    recorded.clear()
    recorded.update(before)


def test_who_multiplies_auxiliary_losses_by_ranks() -> None:
    """megatron-core 0.16 to 0.18 by a rank's own tokens alone."""
    version = tuple(map(int, megatron.core.__version__.split(".")[:2]))
    assert compat.multiplies_by_ranks() == (version >= (0, 19))


@pytest.mark.skipif(
    not hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"),
    reason="this Megatron counts no hits",
)
def test_hits_of_multi_token_prediction_are_counted_by_megatron() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])[:, None]
    labels, mask = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 1.0, 0.0]])
    layer = SimpleNamespace(gather_output=True)
    guessed, trained = compat.multi_token_hits(logits, labels, mask, layer, None)
    assert (float(guessed), float(trained)) == (1.0, 2.0)


def test_layers_follow_the_groups_of_rows_while_they_run() -> None:
    """Every step asks for it. A router's losses stay logged by the model's group."""

    class Layer(torch.nn.Module):
        def forward(self, **unused: Any) -> tuple[Any, Any]:
            return self.pg_collection.cp, self.router.tp_cp_group

    layer: Any = Layer()
    layer.pg_collection = SimpleNamespace(cp="the model's")
    layer.router = SimpleNamespace(tp_cp_group="the model's")
    for _ in range(2):
        compat.let_rows_have_groups(layer)
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == (1, 1)
    of_row = SimpleNamespace(cp_group="the row's")
    assert layer(packed_seq_params=of_row) == ("the row's", "the model's")
    expert: Any = Layer()
    expert.pg_collection, expert.router = layer.pg_collection, layer.router
    for _ in range(2):
        compat.let_router_have_groups(expert, expert.router)
    assert expert(packed_seq_params=of_row) == ("the model's", "the row's")
    assert expert.router.models_group == "the model's"
    for each in (layer, expert):
        for params in (None, SimpleNamespace(cp_group=None)):
            assert each(packed_seq_params=params) == ("the model's", "the model's")


def test_layers_with_routers_take_the_mask_of_a_row() -> None:
    """Of any class, once, and from parameters that have one."""

    class Layer(torch.nn.Module):
        def forward(self, **given: Any) -> Any:
            return given.get("padding_mask")

    layers: Any = torch.nn.ModuleList([Layer(), Layer()])
    layers[0].mlp = SimpleNamespace(router="a router")
    for _ in range(2):
        compat.mask_padding(layers)
    assert [len(layer._forward_pre_hooks) for layer in layers] == [1, 0]
    row = SimpleNamespace(own_padding_mask="the row's")
    assert layers[0](packed_seq_params=row, padding_mask=None) == "the row's"
    assert layers[1](packed_seq_params=row) is None
    for params in (None, SimpleNamespace()):
        assert layers[0](packed_seq_params=params, padding_mask="given") == "given"
