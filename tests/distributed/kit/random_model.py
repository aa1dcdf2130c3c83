"""Random choices by name, and the model that is drawn by them: layers, attention, experts, what is
trained of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

HYBRID_LAYERS = {
    "dense": "*-",
    "moe": "*E",
    "hybrid-mamba": "M*-",
    "hybrid-gdn": "G*-",
    "hybrid-mla": "+-",
    "hybrid-dsa": "D-",
}
"""Kinds of `kit.model` that may be a `HybridModel`, and layers that its stages are made of."""
STATE_SPACE = ("mamba", "hybrid-mamba", "hybrid-gdn")
LATENT = ("mla", "hybrid-mla", "hybrid-dsa")
"""With multi-latent attention, which is refused under tensor parallelism."""


class Draw:
    """Named random choices of a seed, but for those that are forced."""

    def __init__(self, seed: int, forced: Mapping[str, Any]) -> None:
        self._seed = seed
        self._forced = {name.replace("_", " "): value for name, value in forced.items()}

    def stream(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def one(self, name: str, choices: Sequence[Any]) -> Any:
        return self._forced.get(name, self.stream(name).choice(choices))

    def chance(self, name: str, probability: float) -> bool:
        return bool(self._forced.get(name, self.stream(name).random() < probability))


def drawn_model(draw: Draw, dims: dict[str, Any]) -> dict[str, Any]:
    """Kind, `TransformerConfig` settings, `GPTModel` options and what is trained.

    Sets the expert-parallel size, and sequence parallelism where the model needs it.
    """
    kind = _kind(draw, dims)
    chunks = dims["pipeline_parallel"] * dims.get("virtual_pipeline", 1)
    layers = 4 if kind == "mamba" else chunks if chunks > 2 else 2 * chunks
    settings: dict[str, Any] = {
        "num_layers": layers,
        "normalization": draw.one("norm", ["RMSNorm", "LayerNorm"]),
        "add_bias_linear": kind in ("dense", "mla") and draw.chance("bias", 0.3),
        "qk_layernorm": draw.chance("query and key norms", 0.25),
        # Weights so large that attention tells tokens and positions apart.
        "init_method_std": 0.1,
        "deallocate_pipeline_outputs": draw.chance("deallocate", 0.7),
    }
    if kind not in LATENT:
        groups = [size for size in (1, 2, 4) if size >= dims["tensor_parallel"]]
        settings["num_query_groups"] = draw.one("query groups", groups)
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    recompute = draw.one("recompute", [None, None, None, "full", "selective"])
    settings |= {"recompute_granularity": recompute} if recompute else {}
    settings |= full if recompute == "full" else {}
    # Ways of Megatron's in which stages send each other what they made.
    if dims.get("virtual_pipeline", 1) > 1:
        if draw.chance("overlapped warm-up", 0.3):
            settings["overlap_p2p_comm_warmup_flush"] = True
    elif dims["pipeline_parallel"] > 1 and draw.chance("messages one by one", 0.3):
        settings["batch_p2p_comm"] = False
    if kind in ("moe", "replay"):
        settings |= _experts(draw, dims)
    if kind == "hybrid-dsa" and draw.chance("sparse", 0.4):  # else attention is to all keys
        settings["dsa_indexer_topk"] = 6
    if kind != "mamba":
        settings |= _later_tokens(draw, dims, layers)
    few = ["rope", "rope", "rope"] if kind in LATENT else ["rope", "learned_absolute", "none"]
    options: dict[str, Any] = {
        "position_embedding_type": draw.one("positions", ["rope", "rope", *few]),
        "share_embeddings_and_output_weights": draw.chance("tied embeddings", 0.3),
    }
    if draw.chance("rotary percent", 0.2) and kind not in LATENT:
        options["rotary_percent"] = 0.5
    model = {"kind": kind, "settings": settings, "options": options, "trained": "all"}
    if kind.startswith("hybrid") or (kind in HYBRID_LAYERS and draw.chance("hybrid", 0.15)):
        _as_hybrid(draw, HYBRID_LAYERS[kind], chunks, settings, options)
    else:
        _attention(draw, dims, model)
    return model


def is_known_on_shared_rows(model: dict[str, Any]) -> bool:
    """True if rows of this model may lie on several ranks, under dynamic CP."""
    is_known = model["kind"] not in (*LATENT, *STATE_SPACE)
    return is_known and model["options"]["position_embedding_type"] != "mrope"


def drawn_balancing(
    draw: Draw, dims: dict[str, Any], model: dict[str, Any], per_token_loss: bool
) -> dict[str, float] | None:
    """Coefficients of auxiliary losses, of experts or of sparse attention's indexer, which are set
    in the model; None: it has none."""
    settings = model["settings"]
    plain = model["kind"] == "moe" and "hybrid_layer_pattern" not in model["options"]
    # An indexer's loss is refused where anything is padded, as for context parallelism.
    plain = plain or (model["kind"] == "hybrid-dsa" and dims["context_parallel"] == 1)
    plain = plain and "mtp_num_layers" not in settings
    if not plain or not per_token_loss or not draw.chance("auxiliary losses", 0.5):
        return None
    if model["kind"] == "hybrid-dsa":
        # Weights so large that the indexer's distribution is not the attention's by itself: else
        # the loss is a difference of equals, all rounding.
        settings |= {"dsa_indexer_loss_coeff": 0.1, "init_method_std": 0.2}
        return {"indexer_loss": 0.1}
    losses = draw.one(
        "which losses",
        [["aux_loss"], ["seq_aux_loss"], ["z_loss"], ["aux_loss", "seq_aux_loss", "z_loss"]],
    )
    weights = {"aux_loss": 2e-2, "seq_aux_loss": 3e-2, "z_loss": 1e-2}
    balancing = [loss for loss in losses if loss != "z_loss"]
    settings |= {
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": balancing or "none",
        "moe_aux_loss_coeff": [weights[loss] for loss in balancing] or 0.0,
        "moe_z_loss_coeff": weights["z_loss"] if "z_loss" in losses else None,
    }
    return {loss: weights[loss] for loss in losses}


def _kind(draw: Draw, dims: dict[str, Any]) -> str:
    """A kind of `kit.model` that this layout takes."""
    kind: str = draw.one("kind", [*("dense",) * 4, "moe", "moe", "replay", "mla"])
    if kind == "dense" and draw.chance("other layers", 0.5):
        kind = draw.one("other layer", [*[*HYBRID_LAYERS][2:], "mamba", "mamba"])
    tensor = dims["tensor_parallel"]
    if kind in LATENT and tensor > 1:
        kind = "dense"
    if kind in STATE_SPACE and (tensor * dims["context_parallel"] > 2 or tensor > 2):
        kind = "dense"  # two groups of heads are all there are
    if kind == "mamba" and "virtual_pipeline" in dims:
        kind = "dense"
    if kind == "hybrid-gdn":  # wrong gradients otherwise, and refused
        dims["sequence_parallel"] = tensor > 1
    return kind


def _experts(draw: Draw, dims: dict[str, Any]) -> dict[str, Any]:
    # Megatron itself asks for sequence parallelism beside tensor parallelism here.
    dims["sequence_parallel"] = dims["tensor_parallel"] > 1
    within = dims["data_parallel"] * dims["context_parallel"] * dims["tensor_parallel"]
    sizes = [n for n in (1, 2, 4) if within % n == 0 and (n > 1 or dims["tensor_parallel"] == 1)]
    dims["expert_parallel"] = draw.one("expert parallel", sizes)
    settings: dict[str, Any] = {
        "moe_router_score_function": draw.one("scores", ["softmax", "sigmoid"]),
        "moe_router_pre_softmax": draw.chance("pre-softmax", 0.5),
    }
    if draw.chance("shared experts", 0.3):
        settings["moe_shared_expert_intermediate_size"] = 32
    return settings


def _attention(draw: Draw, dims: dict[str, Any], model: dict[str, Any]) -> None:
    """Windows, learnt sinks and multimodal positions; a dense model may be trained in part."""
    settings, options = model["settings"], model["options"]
    variant = draw.one("attention", [*(None,) * 4, "window", "sinks", "mrope"])
    if model["kind"] in ("dense", "moe", "replay"):
        if variant in ("window", "sinks"):
            settings |= {"window_size": (5, 0), "window_attn_skip_freq": 2}
        if variant == "sinks":
            settings["softmax_type"] = "learnable"
        if variant == "mrope" and dims["context_parallel"] == 1:
            settings["mrope_section"] = [2, 1, 1]
            options["position_embedding_type"] = "mrope"
            options.pop("rotary_percent", None)
    if model["kind"] == "dense" and "mtp_num_layers" not in settings:
        # The layers that adapters are made of take no whole input where sequences are cut.
        parts = ["frozen"] if dims["sequence_parallel"] else ["frozen", "lora"]
        model["trained"] = draw.one("trained", [*("all",) * 2 * len(parts), *parts])
    if model["trained"] == "frozen" and settings.get("recompute_granularity") == "full":
        model["trained"] = "all"  # Megatron computes no gradients then, and it is refused


def _later_tokens(draw: Draw, dims: dict[str, Any], layers: int) -> dict[str, Any]:
    """Multi-token prediction, and stages of unlike numbers of layers."""
    if not draw.chance("multi-token prediction", 0.3):
        return {}
    settings: dict[str, Any] = {
        "mtp_num_layers": draw.one("depths", [1, 1, 2, 3, 5]),
        "mtp_loss_scaling_factor": draw.one("scaling factor", [0.1, 0.3, 2.0]),
        "mtp_use_repeated_layer": draw.chance("repeated layer", 0.3),
    }
    if draw.chance("detached heads", 0.15):
        settings["mtp_detach_heads"] = True
    chunks = dims["pipeline_parallel"] * dims.get("virtual_pipeline", 1)
    if dims["pipeline_parallel"] > 1 and draw.chance("layout of stages", 0.5):
        held = ["t"] * chunks  # each chunk but the last needs something to run
        for number in range(layers - chunks):
            held[draw.one(f"layer {number}", range(chunks))] += "t"
        if draw.chance("no layer beside the last", 0.5):
            held[-2:] = [held[-2] + held[-1], ""]
        last = "m" * settings["mtp_num_layers"] + "L"
        settings["pipeline_model_parallel_layout"] = "E" + "|".join(held) + last
    elif dims["pipeline_parallel"] > 1 and draw.chance("layers of the last stage", 0.3):
        virtual, others = dims.get("virtual_pipeline", 1), dims["pipeline_parallel"] - 1
        last = virtual * draw.one("layers of the last stage, number", [1, 2])
        settings["num_layers_in_last_pipeline_stage"] = last
        settings["num_layers"] = last + others * virtual * draw.one("layers of others", [1, 2])
    return settings


def _as_hybrid(
    draw: Draw, letters: str, chunks: int, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """Make the model a `HybridModel` of these layers, cut anywhere but that no stage is empty."""
    held = [draw.one(f"chunk {chunk}", [letters, *letters]) for chunk in range(chunks)]
    if letters not in "".join(held):
        held[-1] = letters
    later = [letters, letters if letters in ("+-", "D-") else "*"]
    depths = settings.get("mtp_num_layers", 0) * f"/{draw.one('later layers', later)}"
    for name in ("pipeline_model_parallel_layout", "num_layers_in_last_pipeline_stage"):
        settings.pop(name, None)
    settings |= {"is_hybrid_model": True, "num_layers": len("".join(held)), "qk_layernorm": False}
    options["hybrid_layer_pattern"] = "|".join(held) + depths
