"""Jobs drawn at random: layout, model, lengths, settings, clocks and loss, all from a seed.

A drawn job is plain data that says everything but the values of its samples and weights, which
follow from its seed. Every choice has a random stream of its own, by its name: one more choice
leaves all others as they were. ``python -m kit.random_draw 17`` prints a job.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from kit.random_rollouts import Draw, drawn_rollouts

_NPROC = [1, 2, 2, 2, 3, 4, 4, 4]
_OUTSIDE = 0.04
"""How often something is drawn that does not go with the rest, and must be refused."""


def drawn_job(seed: int) -> dict[str, Any]:
    """The job of a seed, as JSON values."""
    draw = Draw(seed)
    nproc = draw.one("nproc", _NPROC)
    dims = _dims(draw, nproc)
    model = _model(draw, dims)
    per_token_loss = draw.chance("per-token loss", 0.6)
    planner = _planner(draw, dims, model, per_token_loss)
    return {
        "seed": seed,
        "nproc": nproc,
        "dims": dims,
        "model": model,
        "ddp": _ddp(draw) | {"per_token_loss": per_token_loss},
        "planner": planner,
        "mixed_sizes": _has_mixed_sizes(draw, dims, planner),
        "objective": _objective(draw),
        "clock": _clock(draw, planner),
        "rollouts": drawn_rollouts(draw, dims["data_parallel"]),
        "holders": draw.one("holders", ["all", "all", "first of replica"]),
        "blocking": dims["pipeline_parallel"] > 1 and draw.chance("blocking", 0.15),
        "turns": draw.chance("turns", 0.5),
        "loss_masks": draw.one("loss masks", ["none", "some", "some", "all 0", "weights"]),
    }


def _dims(draw: Draw, nproc: int) -> dict[str, Any]:
    layouts = [
        (data, pipeline, context, tensor)
        for data in range(1, nproc + 1)
        for pipeline in range(1, nproc + 1)
        for context in range(1, nproc + 1)
        for tensor in (1, 2, 4)
        if data * pipeline * context * tensor == nproc
    ]
    data, pipeline, context, tensor = draw.one("layout", layouts)
    dims = {
        "data_parallel": data,
        "pipeline_parallel": pipeline,
        "context_parallel": context,
        "tensor_parallel": tensor,
        "sequence_parallel": tensor > 1 and draw.chance("sequence parallel", 0.6),
    }
    if pipeline > 1 and draw.chance("virtual pipeline", 0.4):
        dims["virtual_pipeline"] = 2
        if draw.chance("group size", 0.3):
            dims["microbatch_group_size"] = pipeline + draw.one("group size, more", [0, 1, 2])
    return dims


def _model(draw: Draw, dims: dict[str, Any]) -> dict[str, Any]:
    """Kind, `TransformerConfig` settings and `GPTModel` options; sets the expert-parallel size."""
    kind = draw.one("kind", [*("dense",) * 4, "moe", "moe", "replay", "mla"])
    if kind == "mla" and dims["tensor_parallel"] > 1:  # refused of local layers
        kind = "dense"
    chunks = dims["pipeline_parallel"] * dims.get("virtual_pipeline", 1)
    layers = chunks if chunks > 2 else 2 * chunks
    settings: dict[str, Any] = {
        "num_layers": layers,
        "normalization": draw.one("norm", ["RMSNorm", "LayerNorm"]),
        "add_bias_linear": kind in ("dense", "mla") and draw.chance("bias", 0.3),
        "qk_layernorm": draw.chance("query and key norms", 0.25),
        # Weights so large that attention tells tokens and positions apart.
        "init_method_std": 0.1,
        "deallocate_pipeline_outputs": draw.chance("deallocate", 0.7),
    }
    if kind != "mla":
        least = dims["tensor_parallel"]
        groups = [size for size in (1, 2, 4) if size >= least]
        settings["num_query_groups"] = draw.one("query groups", groups)
    recompute = draw.one("recompute", [None, None, None, "full", "selective"])
    if recompute is not None:
        settings["recompute_granularity"] = recompute
    if recompute == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if kind in ("moe", "replay"):
        # Megatron itself asks for sequence parallelism beside tensor parallelism here.
        dims["sequence_parallel"] = dims["tensor_parallel"] > 1
        within = dims["data_parallel"] * dims["context_parallel"] * dims["tensor_parallel"]
        sizes = [size for size in (1, 2, 4) if within % size == 0]
        sizes = [s for s in sizes if s > 1] if dims["tensor_parallel"] > 1 else sizes
        dims["expert_parallel"] = draw.one("expert parallel", sizes)
        settings |= {
            "moe_router_score_function": draw.one("scores", ["softmax", "sigmoid"]),
            "moe_router_pre_softmax": draw.chance("pre-softmax", 0.5),
        }
        if draw.chance("shared experts", 0.3):
            settings["moe_shared_expert_intermediate_size"] = 32
    settings |= _later_tokens(draw, dims, layers)
    positions = ["rope", "rope", "rope"] if kind == "mla" else ["rope", "learned_absolute", "none"]
    options: dict[str, Any] = {
        "position_embedding_type": draw.one("positions", ["rope", "rope", *positions]),
        "share_embeddings_and_output_weights": draw.chance("tied embeddings", 0.3),
    }
    if draw.chance("rotary percent", 0.2) and kind != "mla":
        options["rotary_percent"] = 0.5
    if kind in ("dense", "moe") and draw.chance("hybrid", 0.15):
        _as_hybrid(draw, "*E" if kind == "moe" else "*-", chunks, settings, options)
    return {"kind": kind, "settings": settings, "options": options}


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
    depths = settings.get("mtp_num_layers", 0) * f"/{draw.one('later layers', [letters, '*'])}"
    for name in ("pipeline_model_parallel_layout", "num_layers_in_last_pipeline_stage"):
        settings.pop(name, None)
    settings |= {"is_hybrid_model": True, "num_layers": len("".join(held)), "qk_layernorm": False}
    options["hybrid_layer_pattern"] = "|".join(held) + depths


def _ddp(draw: Draw) -> dict[str, Any]:
    distributed = draw.chance("distributed optimizer", 0.35)
    return {
        "distributed_optimizer": distributed,
        "overlap": draw.chance("overlap", 0.3),
        "overlap_gather": distributed and draw.chance("overlapped gather", 0.3),
    }


def _planner(
    draw: Draw, dims: dict[str, Any], model: dict[str, Any], per_token_loss: bool
) -> dict[str, Any]:
    """``args`` of the engine."""
    ranks = dims["data_parallel"] * dims["context_parallel"]
    args: dict[str, Any] = {
        "dynamic_batch_plan_effort": draw.one("effort", [30, 100, 300]),
        "dynamic_batch_log_prob_chunk_tokens": draw.one("chunk", [1, 5, 64, 512]),
        "dynamic_batch_logits_in_model_dtype": draw.chance("model dtype", 0.3),
        "dynamic_batch_fuse_output_layer": draw.chance("fused output", 0.35),
        "dynamic_batch_no_planned_shapes": draw.chance("shapes exchanged", 0.1),
        "dynamic_batch_exchange": draw.chance("exchange", 0.75),
        "dynamic_batch_share_prefixes": draw.chance("shared prefixes", 0.5),
        # Experts' ranks wait for each other in every pass, so they learn nothing.
        "dynamic_batch_cost_model": draw.one(
            "costs", ["fixed", "auto" if dims.get("expert_parallel", 1) == 1 else "fixed"]
        ),
    }
    if draw.chance("without the flag", 0.06):
        size = draw.one("micro-batch size", [1, 2, 3])
        return args | {"use_dynamic_batch_size": False, "micro_batch_size": size}
    if draw.chance("padding of each", 0.2):
        args["dynamic_batch_pad_each_to"] = draw.one("padding of each, to", [2, 6, 8])
    if draw.chance("padding of all", 0.2):
        args["dynamic_batch_pad_total_to"] = draw.one("padding of all, to", [3, 16, 24])
    if draw.chance("samples of a row", 0.15):
        args["dynamic_batch_max_samples_per_row"] = draw.one("samples of a row, most", [1, 2, 5])
    if draw.chance("own packing", 0.3):
        args |= {
            "dynamic_batch_packing": draw.one("packing", ["first-fit", "first-fit-decreasing"]),
            "dynamic_batch_fill": draw.one("fill", ["split", "placeholder"]),
            "dynamic_batch_balance": draw.one("balance", ["auto", "cost", "tokens", "none"]),
        }
    known = model["kind"] != "mla" and per_token_loss
    outside = draw.chance("dynamic CP where it does not go", _OUTSIDE)
    if ranks > 1 and draw.chance("dynamic CP", 0.4) and (known or outside):
        sizes = sorted({1 << n for n in range(3) if 1 << n <= ranks} | {ranks})
        args["dynamic_batch_context_parallel"] = draw.one("dynamic CP, most", sizes)
        stays = draw.chance("dynamic CP of samples that stay", _OUTSIDE)
        args["dynamic_batch_exchange"] |= not stays
    goes = "dynamic_batch_context_parallel" not in args or outside
    least = _least_cap(dims, args)
    cap = math.ceil(draw.one("cap", [6, 20, 48, 48, 100, 1000]) / dims["context_parallel"])
    args["max_tokens_per_gpu"] = max(cap, least)
    if goes and draw.chance("forward cap", 0.2):
        forward = max(draw.one("forward cap, tokens", [1, 30, 300]), least)
        args["dynamic_batch_forward_only_max_tokens_per_gpu"] = forward
    return args


def _has_mixed_sizes(draw: Draw, dims: dict[str, Any], planner: dict[str, Any]) -> bool:
    """True where rows are shared as `kit.shared_rows.SIZES` says: plans seldom share short ones."""
    ranks = dims["data_parallel"] * dims["context_parallel"]
    may = planner.get("dynamic_batch_context_parallel") == ranks and ranks in (2, 4)
    may = (
        may
        and "microbatch_group_size" not in dims
        and "dynamic_batch_max_samples_per_row" not in planner
    )
    return may and draw.chance("mixed sizes", 0.6)


def _least_cap(dims: dict[str, Any], args: dict[str, Any]) -> int:
    """A cap under which a row has room for a token, however it is padded and shared."""
    shards = dims["tensor_parallel"] if dims["sequence_parallel"] else 1
    return math.lcm(
        2 * shards,
        args.get("dynamic_batch_pad_each_to", 1),
        args.get("dynamic_batch_pad_total_to", 1),
    )


def _objective(draw: Draw) -> dict[str, Any]:
    means = ["token", "sample", "trained sample"]
    old = draw.one("forward pass before", ["none", "old", "replaced"])
    return {
        "policy": draw.one("policy's mean", means),
        "terms": draw.one("terms", ["likelihood", "policy", "policy"]),
        "kl": draw.one("KL's mean", [None, None, *means]),
        "entropy": draw.one("entropy's mean", [None, None, *means]),
        "temperature": draw.one("temperature", [1.0, 1.0, 0.7]),
        # Log-probs of a forward pass before training: not made, added as a field, or in place of
        # the rollout's.
        "forward_only": old,
        "forward_entropy": draw.chance("entropies of the forward pass", 0.5),
    }


def _clock(draw: Draw, planner: dict[str, Any]) -> str:
    if planner["dynamic_batch_cost_model"] == "fixed":
        return "true"
    return draw.one("clock", ["true", "skewed", "noisy", "stalled", "backwards", "absurd"])


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(json.dumps(drawn_job(int(number))))
