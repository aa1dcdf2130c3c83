"""Settings, layers and models that cannot run packed rows, each with what to set instead."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kit.stand_ins import stood_in
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from refusals import refusals

from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.layers import (
    layer_problems,
    sharing_problems,
    unfit_for_later_tokens,
)
from mcore_batching.megatron.checks.settings import check_model_config
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.planning import ParallelDims, PlannerConfig

MEGATRON = tuple(map(int, version("megatron-core").split(".")[:2]))
ONE, SEVERAL = ParallelDims(), ParallelDims(data_parallel=4)
VIRTUAL = ParallelDims(pipeline_parallel=2, virtual_pipeline=2)
TP2, CP2 = ParallelDims(tensor_parallel=2), ParallelDims(context_parallel=2)
TP2_SP = ParallelDims(tensor_parallel=2, sequence_parallel=True)
CP2_TP2_SP = ParallelDims(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
NO_EXPERTS = {"num_moe_experts": None, "tensor_model_parallel_size": 1}


def layer(path: str) -> Any:
    """A layer of this class, of which nothing was made."""
    module, name = path.rsplit(".", 1)
    with stood_in("triton"):
        made = object.__new__(getattr(importlib.import_module(f"megatron.core.{module}"), name))
    torch.nn.Module.__init__(made)
    return made


def problems(
    made: Any,
    dims: ParallelDims = CP2,
    *,
    pads_rows: bool = True,
    row_ranks: int | None = None,
    **changes: Any,
) -> str:
    """What is said of a model with two layers like this one."""
    chunk = torch.nn.ModuleDict({"first": made, "second": copy.copy(made)})
    settings = {"deterministic_mode": False, "recompute_granularity": None} | NO_EXPERTS | changes
    chunk.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    said = "\n".join(layer_problems([chunk], dims, pads_rows=pads_rows, row_ranks=row_ranks))
    assert "second" not in said  # one of each kind
    return said


def later(since: tuple[int, int], kind: str) -> str:
    """What is said of a layer before a version of Megatron; empty from it on."""
    since_when = ".".join(map(str, since))
    said = f"first is {kind}, which runs packed rows from Megatron-LM {since_when} on: install"
    return said if since > MEGATRON else ""


def latent(columns: int) -> dict[str, Any]:
    """A local layer has a slice of 20 columns on each rank, Transformer Engine's has all."""
    shape = SimpleNamespace(kv_lora_rank=16, qk_pos_emb_head_dim=4)
    projection = SimpleNamespace(weight=torch.zeros(columns, 8))
    return {"config": shape, "linear_kv_down_proj": projection}


LOCAL = "transformer.dot_product_attention.DotProductAttention"
MULTIMODAL = "models.common.embeddings.rotary_pos_embedding.MultimodalRotaryEmbedding"
LATENT = "transformer.multi_latent_attention.MLASelfAttention"
GDN, NO_GDN = "ssm.gated_delta_net.GatedDeltaNet", later((0, 18), "a GatedDeltaNet")
DSA = "transformer.experimental_attention_variant.dsa.DSAttention"
NO_DSA = later((0, 19), "sparse attention")
SILU, GELU = {"activation": "silu"}, {"activation": "gelu"}
LOSS_OF_INDEXER = "dsa_indexer_loss_coeff"
LAYERS: list[tuple[str, dict[str, Any], ParallelDims, dict[str, Any], str]] = [
    # They mix samples, or cut positions that are cut already.
    (LOCAL, {}, ONE, {}, "mcore_batching.megatron.packed_layer_spec(config)"),
    (MULTIMODAL, {}, CP2, {}, "set --context-parallel-size 1"),
    (MULTIMODAL, {}, ONE, {}, ""),
    # Without packed rows, in deterministic mode and without silu they raise in mid-forward.
    (GDN, SILU, CP2, {}, NO_GDN),
    (GDN, SILU, CP2, {"deterministic_mode": True}, NO_GDN or "unset --deterministic-mode"),
    (GDN, GELU, CP2, {}, NO_GDN or "with gelu; its kernel has silu alone: set --swiglu"),
    # Until 0.18 it asserts in mid-forward; later its indexer's loss counts padding.
    (DSA, {}, CP2, {LOSS_OF_INDEXER: 0.0}, NO_DSA),
    (DSA, {}, CP2, {LOSS_OF_INDEXER: 0.1, "pads_rows": False}, NO_DSA),
    (DSA, {}, CP2, {LOSS_OF_INDEXER: 0.1}, NO_DSA or "dsa_indexer_loss_coeff=0"),
    # Weights that all heads share, with gradients that tensor-parallel ranks do not add up.
    (GDN, SILU, TP2, {}, "output norm under tensor parallelism without sequence parallelism"),
    (GDN, SILU, TP2_SP, {}, NO_GDN),
    (LATENT, latent(10), TP2, {}, "with Transformer Engine's spec and set --sequence-parallel"),
    (LATENT, latent(10), TP2_SP, {}, "set --tensor-model-parallel-size 1, or build the model with"),
    (LATENT, latent(20), TP2, {}, "without sequence parallelism: set --sequence-parallel"),
    (LATENT, latent(20), TP2_SP, {}, ""),
    (LATENT, latent(10), ONE, {}, ""),
]


@pytest.mark.parametrize(("path", "attributes", "dims", "settings", "mend"), LAYERS)
def test_a_layer_that_cannot_run_packed_rows_is_refused(
    path: str,
    attributes: dict[str, Any],
    dims: ParallelDims,
    settings: dict[str, Any],
    mend: str,
) -> None:
    made = layer(path)
    vars(made).update(attributes)
    said = problems(made, dims, **settings)
    assert mend in said
    assert bool(said) == bool(mend)


def test_a_layer_with_a_forward_pass_of_its_own_may_run_packed_rows() -> None:
    made = layer(GDN)
    made.__class__ = type("GatedDeltaNet", (type(made),), {"forward": lambda self: None})
    assert problems(made, deterministic_mode=True) == ""
    assert problems(torch.nn.Linear(1, 1)) == ""


def test_mamba_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of packed rows, and Transformer Engine's where they are cut."""
    made = layer("ssm.mamba_mixer.MambaMixer")
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    found: list[Any] = [False, "causal_conv1d >= 1.4.0 is required"]
    monkeypatch.setattr(mixer, "_check_mamba_sequence_packing_support", lambda **_: found)
    assert "causal_conv1d >= 1.4.0 is required" in problems(made, ONE)
    found[:] = [True, None]
    assert problems(made, ONE) == ""
    context = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    monkeypatch.setattr(context, "tex", None)
    assert "need Transformer Engine under context parallelism" in problems(made)


PLAIN = {"exchange": "p2p", "window": (-1, 0), "softmax_type": "vanilla", "fp8": None, "mla": False}
ENGINE = [
    ((2, 9), {}, ""),
    ((2, 9), {"exchange": "a2a"}, "by a2a from Transformer Engine 2.10 on, not in"),
    ((2, 10), {"exchange": "a2a"}, ""),
    ((2, 17), {"exchange": "all_gather"}, "from Transformer Engine 2.18 on, not in"),
    ((2, 18), {"exchange": "all_gather"}, ""),
    ((2, 18), {"exchange": "a2a+p2p"}, "from Transformer Engine 2.19 on, not in"),
    ((2, 19), {"exchange": "a2a+p2p"}, ""),
    ((2, 19), {"window": (128, 0)}, "do not have under p2p: set --cp-comm-type a2a"),
    ((2, 19), {"window": (128, 0), "exchange": "a2a"}, ""),
    ((2, 11), {"softmax_type": "learnable", "exchange": "a2a"}, "not in Transformer Engine 2.11"),
    ((2, 12), {"softmax_type": "learnable", "exchange": "a2a"}, ""),
    ((2, 12), {"softmax_type": "learnable"}, "not have under p2p: set --cp-comm-type a2a"),
    ((2, 14), {"mla": True, "exchange": "a2a"}, "2.14 does not exchange by a2a: set --cp-comm"),
    ((2, 14), {"mla": True}, ""),
    ((2, 15), {"mla": True, "exchange": "a2a"}, ""),
    ((2, 19), {"fp8": "hybrid"}, "unset --fp8-dot-product-attention"),
]


@pytest.mark.parametrize(("version", "changes", "mend"), ENGINE)
def test_what_transformer_engine_has_no_packed_rows_for(
    version: tuple[int, int],
    changes: dict[str, Any],
    mend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under context parallelism; of one rank it has all of it, but for sinks before 2.12."""
    given = PLAIN | changes
    monkeypatch.setattr(compat, "is_engines_attention", lambda it: hasattr(it, "cp_comm_type"))
    monkeypatch.setattr(compat, "engine_versions", lambda: (version, (9, 18)))
    made: Any = torch.nn.Linear(1, 1)
    made.cp_comm_type, made.window_size = given.pop("exchange"), given.pop("window")
    settings = {
        "multi_latent_attention": given.pop("mla"),
        "fp8_dot_product_attention": True,
        "fp8_multi_head_attention": False,
        **given,
    }
    said = problems(made, **settings)
    assert mend in said
    assert bool(said) == bool(mend)
    alone = problems(made, ONE, **settings)
    assert bool(alone) == (given["softmax_type"] != "vanilla" and version < (2, 12))
    assert problems(made, ONE, row_ranks=2, **settings) == said


def test_layers_recomputed_behind_a_frozen_embedding() -> None:
    """Their input needs no gradient, so that they get none, unless somebody lets it."""
    chunk = torch.nn.ModuleDict(
        {"embedding": torch.nn.Linear(1, 1), "decoder": torch.nn.LayerNorm(1)}
    )
    chunk.config = SimpleNamespace(recompute_granularity="full", **NO_EXPERTS)  # type: ignore[assignment]
    chunk.embedding, chunk.decoder = chunk.embedding, chunk.decoder

    def said() -> str:
        return "\n".join(layer_problems([chunk], ONE, pads_rows=False))

    assert said() == ""
    chunk.embedding.requires_grad_(False)
    assert "behind a frozen embedding without gradients" in said()
    assert "set --recompute-granularity selective" in said()
    chunk.config.recompute_granularity = "selective"
    assert said() == ""
    chunk.config.recompute_granularity = "full"
    hook = chunk.embedding.register_forward_hook(lambda *call: call[2].requires_grad_())
    assert said() == ""
    hook.remove()
    chunk.decoder.requires_grad_(False)
    assert said() == ""


NO_MASK = (
    "0 lets tokens see later ones (attn_mask_type no_mask): build the model with "
    "AttnMaskType.causal, or unset --dynamic-batch-share-prefixes"
)
BY_LENGTH = "may go by a sample's length: unset --dynamic-batch-share-prefixes"
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SHARING: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({"hidden_dropout": 0.1}, {}, "would share dropout: set --hidden-dropout 0"),
    ({"attention_dropout": 0.1}, {}, "would share dropout: set --attention-dropout 0"),
    ({"hidden_dropout": 0.1}, {"training": False}, ""),  # evaluation drops nothing
    ({}, {"position_embedding_type": "relative"}, "set --position-embedding-type rope"),
    ({}, {"rotary_pos_emb": torch.nn.Identity()}, f"embeddings Identity {BY_LENGTH}"),
    ({}, {"masks": AttnMaskType.no_mask}, NO_MASK),  # once, of three layers that are alike
    ({}, {"masks": AttnMaskType.padding_causal}, ""),
]
SOME_RELEASES = (
    "moe_hybridep_pad_uneven_dispatch_inputs",
    "mtp_detach_heads",
    "mtp_hsm",
    "sequence_packing_scheduler",
)
"""Fields that other releases of Megatron may have."""


def config(**changes: Any) -> TransformerConfig:
    """A configuration that is accepted, with fields set as Megatron's validation leaves them."""
    made = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2)
    made.overlap_p2p_comm, made.batch_p2p_comm = False, True
    for name, value in changes.items():
        assert hasattr(made, name) or name in SOME_RELEASES, f"this megatron-core has no {name}"
        setattr(made, name, value)
    return made


PER_TOKEN = {"calculate_per_token_loss": True}
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
EXPERTS = {"num_moe_experts": 4, DISPATCHER: "alltoall"}
FLEX = EXPERTS | {DISPATCHER: "flex"}
HYBRID_EP = FLEX | {BACKEND: "hybridep"}
LOSS = {**EXPERTS, "moe_aux_loss_coeff": 0.01}
Z_LOSS = {**EXPERTS, "moe_z_loss_coeff": 0.01}
DEPTH = {"mtp_num_layers": 1}


def routed(*kinds: str, **changes: Any) -> dict[str, Any]:
    kind = [*kinds] if len(kinds) > 1 else kinds[0]
    return {**EXPERTS, "moe_router_load_balancing_type": kind, **changes}


PLANNER = PlannerConfig(max_tokens_per_gpu=128)
SHARED = dataclasses.replace(PLANNER, max_context_parallel=4)
PAD_8, PAD_48 = (dataclasses.replace(PLANNER, pad_total_to=tokens) for tokens in (8, 48))
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WHOLE = {**DEPTH, "recompute_granularity": "full", "recompute_method": "uniform"}
BLOCKS = WHOLE | {"recompute_method": "block"}  # these layers ignore it


def checked(
    dims: ParallelDims = ONE,
    planner: PlannerConfig = PLANNER,
    is_later: bool | None = None,
    **changes: Any,
) -> None:
    """Check a configuration, as of a Megatron from 0.19 on, or before; None: of the one here."""
    names = ("multiplies_by_ranks", "recomputes_multi_token_rows")
    later = mock.patch.multiple(compat, **{name: lambda: is_later for name in names})
    with later if is_later is not None else contextlib.nullcontext():
        check_model_config(config(**changes), dims, planner)


ACCEPTED: list[tuple[ParallelDims, dict[str, Any]]] = [
    (ONE, {}),
    (ONE, {"overlap_p2p_comm": True}),  # without a pipeline nothing is sent
    (ParallelDims(pipeline_parallel=4), {}),
    (VIRTUAL, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    (ONE, EXPERTS),  # a load-balancing loss with coefficient 0
    (ONE, {**LOSS, **PER_TOKEN}),
    (ONE, FLEX | {BACKEND: "deepep"}),
    (ONE, EXPERTS | {BACKEND: "hybridep"}),
    (ONE, {**HYBRID_EP, "moe_hybridep_pad_uneven_dispatch_inputs": True}),
    (ONE, {"fp8": "hybrid", "planner": PAD_48}),
    *((SEVERAL, PER_TOKEN | changes | {"planner": SHARED}) for changes in ({}, LOSS, RECOMPUTED)),
    (SEVERAL, PER_TOKEN | LOSS | RECOMPUTED | {"recompute_modules": [], "planner": SHARED}),
    (ONE, Z_LOSS | PER_TOKEN | {"is_later": False}),
    (CP2, EXPERTS | PER_TOKEN | {"is_later": False}),
    (CP2, Z_LOSS | PER_TOKEN | {"is_later": True}),
]


@pytest.mark.parametrize(("dims", "changes"), ACCEPTED)
def test_accepted_combinations(dims: ParallelDims, changes: dict[str, Any]) -> None:
    checked(dims, **changes)


@pytest.mark.parametrize(
    "changes", [DEPTH, BLOCKS | {"is_later": False}, WHOLE | {"is_later": True}]
)
def test_further_tokens_are_predicted_from_017_on(changes: dict[str, Any]) -> None:
    said = "runs from Megatron-LM 0.17 on: unset --mtp-num-layers"
    refused: Any = pytest.raises(DynamicBatchArgumentError, match=said)
    with refused if MEGATRON < (0, 17) else contextlib.nullcontext():
        checked(**changes)


test_refused = refusals(__file__, globals())


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(DynamicBatchArgumentError) as caught:
        checked(VIRTUAL, **EXPERTS, moe_expert_capacity_factor=1.0, cuda_graph_impl="local")
    assert str(caught.value).count("\n  - ") == 3


ROPE, LEARNED = {"position_embedding_type": "rope"}, {"position_embedding_type": "learned_absolute"}
LAST, STAGES = {"post_process": True}, {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1}
OVERLAPPED = {**ROPE, "ddp_config": SimpleNamespace(overlap_grad_reduce=True)}
TIED = {"share_embeddings_and_output_weights": True}
UNTIE, DETACH = "--untie-embeddings-and-output-weights", {"mtp_detach_heads": True}
LATER_TOKENS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DEPTH, ROPE | LAST, "mtp_block_spec=packed_mtp_block_spec(config)"),
    (DEPTH, ROPE | LAST | {"mtp": None}, ""),
    (DEPTH, LEARNED, ""),
    (STAGES, LEARNED, "set --position-embedding-type rope"),
    (STAGES | DETACH, ROPE, ""),
    (STAGES | DETACH, OVERLAPPED, "unset --overlap-grad-reduce or unset --mtp-detach-heads"),
    (STAGES | DETACH, OVERLAPPED | TIED, UNTIE),
    (STAGES, OVERLAPPED | TIED, UNTIE),
    (STAGES | {"grad_sync_func": print}, OVERLAPPED | TIED, ""),  # aligned
    (STAGES, ROPE | TIED, ""),
    (STAGES | {"mtp_num_layers": None}, OVERLAPPED | TIED | LAST, ""),
]


@pytest.mark.parametrize(
    ("check", "settings", "attributes", "mend"),
    [
        *((sharing_problems, NO_DROPOUT | changes, ROPE | more, m) for changes, more, m in SHARING),
        *((unfit_for_later_tokens, *each) for each in LATER_TOKENS),
    ],
)
def test_models_that_cannot_share_tokens_or_predict_later_ones(
    check: Any, settings: dict[str, Any], attributes: dict[str, Any], mend: str
) -> None:
    chunk: Any = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
    chunk.config = config(**settings)
    for each in chunk:
        each.attn_mask_type = attributes.get("masks")
    vars(chunk).update(attributes)
    found = [*check([chunk])]
    assert len(found) == bool(mend)
    assert mend in "".join(found)
