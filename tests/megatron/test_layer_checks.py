"""Layers that cannot run packed rows: found in a model by name, with what to set instead."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.stand_ins import stood_in
from megatron.core.transformer.enums import AttnMaskType

from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.layers import check_shared_prefixes, layer_problems
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.planning import ParallelDims

MEGATRON = tuple(map(int, version("megatron-core").split(".")[:2]))
CP2 = ParallelDims(context_parallel=2)
MULTIMODAL = "models.common.embeddings.rotary_pos_embedding.MultimodalRotaryEmbedding"


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
    """What is said of a model with two of this layer."""
    chunk = torch.nn.ModuleDict({"first": made, "second": made.__class__.__new__(made.__class__)})
    torch.nn.Module.__init__(chunk["second"])
    chunk["second"].__dict__.update({k: v for k, v in made.__dict__.items() if k[0] != "_"})
    settings = {"num_moe_experts": None, "tensor_model_parallel_size": 1} | changes
    settings |= {"recompute_granularity": None}
    chunk.config = SimpleNamespace(**{"deterministic_mode": False} | settings)
    return "\n".join(layer_problems([chunk], dims, pads_rows=pads_rows, row_ranks=row_ranks))


def test_gated_delta_nets_that_take_no_packed_rows() -> None:
    """Until 0.17, everywhere in deterministic mode and without silu, they raise in mid-forward."""
    made = layer("ssm.gated_delta_net.GatedDeltaNet")
    made.activation = "silu"
    if MEGATRON < (0, 18):
        said = problems(made)
        assert said.startswith("first is a GatedDeltaNet, which runs packed rows from Megatron-LM")
        assert "second" not in said
    else:
        assert problems(made) == ""
        assert "unset --deterministic-mode" in problems(made, deterministic_mode=True)
        made.activation = "gelu"
        assert "with gelu; its kernel has silu alone: set --swiglu" in problems(made)


def test_sparse_attention_that_takes_no_packed_rows() -> None:
    """Until 0.18 it asserts in mid-forward; later its indexer's loss counts padding."""
    made = layer("transformer.experimental_attention_variant.dsa.DSAttention")
    if MEGATRON < (0, 19):
        assert "from Megatron-LM 0.19 on" in problems(made, dsa_indexer_loss_coeff=0.0)
    else:
        assert problems(made, dsa_indexer_loss_coeff=0.0) == ""
        assert problems(made, dsa_indexer_loss_coeff=0.1, pads_rows=False) == ""
        assert "dsa_indexer_loss_coeff=0" in problems(made, dsa_indexer_loss_coeff=0.1)


@pytest.mark.parametrize(
    ("path", "dims", "mend"),
    [
        (
            "transformer.dot_product_attention.DotProductAttention",
            ParallelDims(),
            "mcore_batching.megatron.packed_layer_spec(config)",
        ),
        (MULTIMODAL, CP2, "set --context-parallel-size 1"),
        (MULTIMODAL, ParallelDims(), ""),
    ],
)
def test_layers_of_any_version(path: str, dims: ParallelDims, mend: str) -> None:
    """Megatron's local attention mixes samples; context-parallel ranks cut multimodal positions."""
    said = problems(layer(path), dims)
    assert mend in said
    assert bool(said) == bool(mend)


def test_mamba_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of packed rows, and Transformer Engine's where they are cut."""
    made = layer("ssm.mamba_mixer.MambaMixer")
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    found: list[Any] = [False, "causal_conv1d >= 1.4.0 is required"]
    monkeypatch.setattr(mixer, "_check_mamba_sequence_packing_support", lambda **_: found)
    assert "causal_conv1d >= 1.4.0 is required" in problems(made, ParallelDims())
    found[:] = [True, None]
    assert problems(made, ParallelDims()) == ""
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
    found, given = compat, PLAIN | changes
    monkeypatch.setattr(found, "is_engines_attention", lambda layer: hasattr(layer, "cp_comm_type"))
    monkeypatch.setattr(found, "engine_versions", lambda: (version, (9, 18)))
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
    alone = problems(made, ParallelDims(), **settings)
    assert bool(alone) == (given["softmax_type"] != "vanilla" and version < (2, 12))
    assert problems(made, ParallelDims(), row_ranks=2, **settings) == said


TP2 = ParallelDims(tensor_parallel=2)
TP2_SP = ParallelDims(tensor_parallel=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("columns", "dims", "mend"),
    [
        (10, TP2, "or build the model with Transformer Engine's spec and set --sequence-parallel"),
        (10, TP2_SP, "set --tensor-model-parallel-size 1, or build the model with Transformer"),
        (20, TP2, "without sequence parallelism: set --sequence-parallel"),
        (20, TP2_SP, ""),
        (10, ParallelDims(), ""),
    ],
)
def test_a_rotary_key_of_all_heads_whose_gradient_ranks_do_not_add_up(
    columns: int, dims: ParallelDims, mend: str
) -> None:
    """A local layer has a slice of 20 columns on each rank, Transformer Engine's has all."""
    made = layer("transformer.multi_latent_attention.MLASelfAttention")
    made.config = SimpleNamespace(kv_lora_rank=16, qk_pos_emb_head_dim=4)
    made.linear_kv_down_proj = SimpleNamespace(weight=torch.zeros(columns, 8))
    said = problems(made, dims)
    assert mend in said
    assert bool(said) == bool(mend)


@pytest.mark.skipif(MEGATRON < (0, 18), reason="refused anyway")
def test_an_output_norm_of_all_heads_whose_gradient_ranks_do_not_add_up() -> None:
    made = layer("ssm.gated_delta_net.GatedDeltaNet")
    made.activation = "silu"
    assert "output norm under tensor parallelism without sequence parallelism" in problems(
        made, TP2
    )
    assert problems(made, TP2_SP) == ""


def test_layers_recomputed_behind_a_frozen_embedding() -> None:
    """Their input needs no gradient, so that they get none, unless somebody lets it."""
    chunk = torch.nn.ModuleDict(
        {"embedding": torch.nn.Linear(1, 1), "decoder": torch.nn.LayerNorm(1)}
    )
    settings = {"num_moe_experts": None, "tensor_model_parallel_size": 1}
    chunk.config = SimpleNamespace(recompute_granularity="full", **settings)  # type: ignore[assignment]
    chunk.embedding, chunk.decoder = chunk.embedding, chunk.decoder

    def said() -> str:
        return "\n".join(layer_problems([chunk], ParallelDims(), pads_rows=False))

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


def test_a_layer_with_a_forward_pass_of_its_own_may_know_packed_rows() -> None:
    made = layer("ssm.gated_delta_net.GatedDeltaNet")
    own = type("GatedDeltaNet", (type(made),), {"forward": lambda self: None})
    made.__class__ = own
    assert problems(made, deterministic_mode=True) == ""
    assert problems(torch.nn.Linear(1, 1)) == ""


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
def test_samples_that_share_tokens_have_no_dropout(name: str) -> None:
    chunk: Any = torch.nn.ModuleList()
    chunk.config = SimpleNamespace(**{"hidden_dropout": 0.0, "attention_dropout": 0.0, name: 0.1})
    chunk.position_embedding_type = "rope"
    mend = f"would share dropout: set --{name.replace('_', '-')} 0"
    with pytest.raises(DynamicBatchArgumentError, match=mend):
        check_shared_prefixes([chunk])


def test_layers_that_are_alike_are_refused_once() -> None:
    """Of a hundred lines, each of another layer, nobody finds the setting that is wrong as well."""
    chunk: Any = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
    chunk.config = SimpleNamespace(hidden_dropout=0.0, attention_dropout=0.0)
    chunk.position_embedding_type = "rope"
    for each in chunk:
        each.attn_mask_type = AttnMaskType.no_mask
    with pytest.raises(DynamicBatchArgumentError) as refused:
        check_shared_prefixes([chunk])
    assert str(refused.value).splitlines()[1:] == [
        "  - 0 lets tokens see later ones (attn_mask_type no_mask): build the model with "
        "AttnMaskType.causal, or unset --dynamic-batch-share-prefixes"
    ]
