"""Seeds whose jobs cover all pairs: layout and model, layout and feature, model and feature.

    python -m kit.covering 0 40000    prints some of these, which `test_exactness` lacks

What a job has is read from what is drawn of it, so that whatever is drawn anew has to be covered.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kit.random_draw import WORKERS, drawn_job

NUM_SEEDS = 4000
"""Of which the draw shows what goes together."""
LEAST_DRAWS = 6
"""Of these, for something to be covered."""
LEAST_SAMPLES = 6
"""Of a job that covers anything."""
ALONE = {
    *("add_bias_linear", "rotary_percent", "moe_shared_expert_intermediate_size"),
    *("mtp_use_repeated_layer", "mtp_detach_heads", "pipeline_model_parallel_layout"),
    *("none", "qk_layernorm", "num_layers_in_last_pipeline_stage", "softmax_type"),
    *("masks all 0", "masks none", "masks some", "masks weights", "bfloat16", "mtp_deep"),
    *("overlap_p2p_comm_warmup_flush", "messages one by one", "dsa_indexer_topk"),
    *(f"{name}_parallel of 4" for name in ("data", "pipeline", "context", "tensor")),
    *("dynamic_batch_logits_in_model_dtype", "dynamic_batch_max_samples_per_row"),
    *("kl term", "entropy term", "log-probs replaced", "costs learnt"),
    *("dynamic_batch_no_planned_shapes", "holders first of replica", "global_batch_size"),
    *(f"worker {fault}" for fault in WORKERS),
    *("banned infinite", "banned lowest", "recorded"),
}
"""What need not meet everything else."""


def layout_of(job: dict[str, Any]) -> set[str]:
    dims = job["dims"]
    sizes = ("data_parallel", "pipeline_parallel", "context_parallel", "virtual_pipeline")
    found = {name for name in (*sizes, "expert_parallel") if dims.get(name, 1) > 1}
    if dims["tensor_parallel"] > 1:
        found.add("sequence_parallel" if dims["sequence_parallel"] else "tensor_parallel")
    found |= {f"{name} of 4" for name in found if dims.get(name) == 4}
    return found or {"one process"}


def model_of(job: dict[str, Any]) -> set[str]:
    settings, options = job["model"]["settings"], job["model"]["options"]
    found = {job["model"]["kind"], options["position_embedding_type"], job["model"]["trained"]}
    found |= {name for name in ALONE if settings.get(name) or name in options or job.get(name)}
    found |= {name for name in ("mtp_num_layers", "window_size") if name in settings}
    found |= {"mtp_deep"} if settings.get("mtp_num_layers", 0) > 2 else set()
    found |= {"messages one by one"} if "batch_p2p_comm" in settings else set()
    found |= {"tied embeddings"} if options["share_embeddings_and_output_weights"] else set()
    found |= {"HybridModel"} if "hybrid_layer_pattern" in options else set()
    return (found | {*(job["balancing"] or ())}) - {"dense", "rope", "all"}


def features_of(job: dict[str, Any]) -> set[str]:
    """Settings of a job, its loss, its samples and their steps."""
    planner, objective, rollouts = job["planner"], job["objective"], job["rollouts"]
    flags = ("mixed_sizes", "turns", "blocking", "bfloat16", "fields", "recorded")
    found = {name for name in flags if job[name]}
    found |= {f"{name} {job[name]}" for name in ("worker", "banned") if job[name]}
    found |= {name for name, value in job["ddp"].items() if value}
    found |= {f"masks {job['loss_masks']}", f"mean of each {objective['policy']}"}
    found |= {f"{name} term" for name in ("kl", "entropy") if objective[name]}
    found |= {f"log-probs {objective['forward_only']}", f"holders {job['holders']}"}
    found |= {name for name, value in planner.items() if value is True}
    others = ("context_parallel", "forward_only_max_tokens_per_gpu", "max_samples_per_row")
    found |= {f"dynamic_batch_{name}" for name in (*others, "packing")} & planner.keys()
    recompute = job["model"]["settings"].get("recompute_granularity")
    for name, is_so in {
        "samples stay": not planner["dynamic_batch_exchange"],
        "means over micro-batches": not job["ddp"]["per_token_loss"],
        "rows padded": any("pad_" in name for name in planner),
        "costs learnt": planner["dynamic_batch_cost_model"] == "auto",
        f"recompute_{recompute}": recompute,
        "rollouts": len(rollouts) > 1,
    }.items():
        found |= {name} if is_so else set()
    for rollout in rollouts:
        found |= {"padded_to", "steps", "global_batch_size"} & rollout.keys()
        owners = {rank for _, _, rank in rollout["samples"]}
        found |= {"ranks without samples"} if len(owners) < job["dims"]["data_parallel"] else set()
        found |= {"lopsided"} if len(rollout["samples"]) > 40 else set()
    alike = {"dynamic_batch_exchange", "per_token_loss", "log-probs none", "holders all"}
    return found - alike - {"mean of each token", "masks some"}


def covered_by(job: dict[str, Any]) -> set[tuple[str, ...]]:
    """Pairs that a job has, and what it has of `ALONE`; nothing of a job that is refused, or that
    has hardly a sample to go wrong."""
    num_samples = sum(len(rollout["samples"]) for rollout in job["rollouts"])
    if job["refused"] or num_samples < LEAST_SAMPLES:
        return set()
    traits = layout_of(job), model_of(job), features_of(job)
    layout, model, features = (each - ALONE for each in traits)
    products = map(itertools.product, (layout, layout, model), (model, features, features))
    found: set[tuple[str, ...]] = set(itertools.chain(*products))
    return found | {(each,) for each in set().union(*traits) & ALONE}


def is_late(job: dict[str, Any]) -> bool:
    """True for a model that megatron-core 0.16 does not build, or that is refused there."""
    kind, traits = job["model"]["kind"], model_of(job)
    is_late = kind.startswith("hybrid") or kind == "mla" or "HybridModel" in traits
    return is_late or not traits.isdisjoint(("mtp_num_layers", "z_loss"))


@functools.cache
def to_be_covered(*, late: bool) -> frozenset[tuple[str, ...]]:
    """What the draw makes, without ``late`` that for every version of Megatron."""
    jobs = (job for job in map(drawn_job, range(NUM_SEEDS)) if late or not is_late(job))
    counts = Counter(itertools.chain(*map(covered_by, jobs)))
    return frozenset(each for each, count in counts.items() if count >= LEAST_DRAWS)


def uncovered(jobs: Iterable[dict[str, Any]], *, late: bool) -> frozenset[tuple[str, ...]]:
    """What none of the jobs covers, without ``late`` for every version of Megatron."""
    own = (covered_by(job) for job in jobs if late or not is_late(job))
    return to_be_covered(late=late).difference(*own)


def main(first: int, last: int) -> None:
    """Print seeds from `first` on that cover what the jobs of `test_exactness` do not."""
    from test_exactness import JOBS

    chosen = [job.parameters["job"] for job in JOBS]
    drawn = {seed: drawn_job(seed) for seed in range(first, last)}
    for late in (False, True):
        covers = {seed: covered_by(job) for seed, job in drawn.items() if late or not is_late(job)}
        while left := uncovered(chosen, late=late):
            # The most for their price: every rank has a model.
            best = max(covers, key=lambda seed: len(covers[seed] & left) / drawn[seed]["nproc"])
            if not covers[best] & left:
                print("not covered:", *sorted(left))
                break
            chosen.append(drawn[best])
            print(best)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
