"""Jobs drawn at random: layout, model, lengths, settings, clocks and loss, all from a seed.

A drawn job is plain data that says everything but the values of its samples and weights, which
follow from its seed. Every choice has a random stream of its own, by its name: one more choice
leaves all others as they were. Any may be forced. ``python -m kit.random_draw 17`` prints a job.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from typing import Any

from kit.harness import Job, JobFailedError
from kit.objective import MEANS_OF_THE_PAGE
from kit.random_model import Draw, drawn_balancing, drawn_model, is_known_on_shared_rows

_NPROC = [1, 2, 2, 2, 3, 4, 4, 4]
WORKERS = ("in line", "killed", "stopped", "late", "absent", "out of memory")
_OUTSIDE = 0.04
"""How often something is drawn that does not go with the rest, and must be refused."""
_FLAGS = {
    "logits_in_model_dtype": ("model dtype", 0.3),
    "fuse_output_layer": ("fused output", 0.35),
    "no_planned_shapes": ("shapes exchanged", 0.1),
    "exchange": ("exchange", 0.75),
    "share_prefixes": ("shared prefixes", 0.5),
}
"""Name and probability of the choice of a flag."""
LONGEST = 160
"""Tokens of a sample."""
LOPSIDED = (40, 3, 0, 1)
"""Samples of each data-parallel rank where they lie unevenly."""
NEAR_TIE = 5e-6
"""Between two experts of which a router takes one, in logits: rounding may choose the other."""


def drawn_job(seed: int, **forced: Any) -> dict[str, Any]:
    """The job of a seed, as JSON values; choices named in ``forced`` (with ``_`` for spaces) are
    what is given there."""
    draw = Draw(seed, forced)
    nproc = draw.one("nproc", _NPROC)
    dims = _dims(draw, nproc)
    model = drawn_model(draw, dims)
    per_token_loss = draw.chance("per-token loss", 0.6)
    balancing = drawn_balancing(draw, dims, model, per_token_loss)
    planner = _planner(draw, dims, model, per_token_loss)
    count = draw.one("rollouts", [1, 1, 2, 3])
    rollouts = [
        _rollout(draw, f"rollout {n}", dims["data_parallel"], most_steps=6 // count)
        for n in range(count)
    ]
    if model["options"]["position_embedding_type"] == "mrope":
        # Position ids of no sample at all would have no axes.
        rollouts = [each for each in rollouts if each["samples"]] or [{"samples": [[9, 4, 0]]}]
    if balancing:  # of which rows count as a whole
        planner["dynamic_batch_share_prefixes"] = False
        for rollout in rollouts:
            rollout.pop("padded_to", None)
        if "indexer_loss" in balancing:  # refused with padding
            planner = {name: value for name, value in planner.items() if "pad_" not in name}
    half = _is_half(draw, model, rollouts)
    # Scripts set logits of forbidden entries to -inf, or to the lowest number, if there are logits.
    banned = draw.one("banned", [*(None,) * 5, "infinite", "lowest"])
    banned = None if planner["dynamic_batch_fuse_output_layer"] else banned
    return {
        "seed": seed,
        "nproc": nproc,
        "dims": dims,
        "model": model,
        "ddp": _ddp(draw, model) | {"per_token_loss": per_token_loss},
        "refused": _is_refused(dims, model, planner, per_token_loss),
        "bfloat16": half,
        "planner": planner,
        "mixed_sizes": _has_mixed_sizes(draw, dims, planner),
        "objective": _objective(draw) | ({"page": None} if half else {}),
        "clock": _clock(draw, planner),
        "rollouts": rollouts,
        "balancing": balancing,
        "worker": _worker(draw, planner, rollouts),
        "holders": draw.one("holders", ["all", "all", "first of replica"]),
        "blocking": dims["pipeline_parallel"] > 1 and draw.chance("blocking", 0.15),
        "turns": draw.chance("turns", 0.5),
        "banned": banned,
        "fields": draw.chance("further fields", 0.3),
        "recorded": draw.chance("recorded", 0.2),
        "loss_masks": draw.one("loss masks", ["none", "some", "some", "all 0", "weights"])
        if not balancing
        else "some",
    }


def _dims(draw: Draw, nproc: int) -> dict[str, Any]:
    sizes = itertools.product(*[range(1, nproc + 1)] * 3, (1, 2, 4))
    layouts = [layout for layout in sizes if math.prod(layout) == nproc]
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


def _is_refused(
    dims: dict[str, Any], model: dict[str, Any], planner: dict[str, Any], per_token_loss: bool
) -> bool:
    """True for rows of several sizes where they do not go, and for positions learnt by two"""
    goes = is_known_on_shared_rows(model) and per_token_loss and planner["dynamic_batch_exchange"]
    learns = model["options"]["position_embedding_type"] == "learned_absolute"
    learns = learns and "mtp_num_layers" in model["settings"] and dims["pipeline_parallel"] > 1
    return learns or ("dynamic_batch_context_parallel" in planner and not goes)


def _is_half(draw: Draw, model: dict[str, Any], rollouts: list[dict[str, Any]]) -> bool:
    """True for bfloat16: a dense model, and one step, after which rounding is all there is."""
    one = len(rollouts) == 1 and not {"steps", "global_batch_size"} & {*rollouts[0]}
    dense = model["kind"] == "dense" and model["trained"] != "lora"
    return one and dense and draw.chance("bfloat16", 0.15)


def _ddp(draw: Draw, model: dict[str, Any]) -> dict[str, Any]:
    distributed = draw.chance("distributed optimizer", 0.35)
    # Parameters without a gradient are never reduced, as those of an indexer that no loss trains.
    overlaps = model["kind"] != "hybrid-dsa"
    return {
        "distributed_optimizer": distributed,
        "overlap": overlaps and draw.chance("overlap", 0.3),
        "overlap_gather": overlaps and distributed and draw.chance("overlapped gather", 0.3),
    }


def _planner(
    draw: Draw, dims: dict[str, Any], model: dict[str, Any], per_token_loss: bool
) -> dict[str, Any]:
    ranks = dims["data_parallel"] * dims["context_parallel"]
    args: dict[str, Any] = {
        "dynamic_batch_plan_effort": draw.one("effort", [30, 100, 300]),
        # Experts' ranks wait for each other in every pass, so they learn nothing.
        "dynamic_batch_cost_model": draw.one(
            "costs", ["fixed", "auto" if dims.get("expert_parallel", 1) == 1 else "fixed"]
        ),
    }
    args |= {f"dynamic_batch_{flag}": draw.chance(*by) for flag, by in _FLAGS.items()}
    if draw.chance("as they come", 0.06):
        return args | {
            "dynamic_batch_max_samples_per_row": draw.one("micro-batch size", [1, 2, 3]),
            "dynamic_batch_packing": "first-fit",
            "dynamic_batch_fill": "placeholder",
            "dynamic_batch_balance": "none",
        }
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
    known = per_token_loss and is_known_on_shared_rows(model)
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
    may = may and "microbatch_group_size" not in dims
    may = may and "dynamic_batch_max_samples_per_row" not in planner
    return may and draw.chance("mixed sizes", 0.6)


def _least_cap(dims: dict[str, Any], args: dict[str, Any]) -> int:
    """A cap under which a row has room for a token, however it is padded and shared."""
    shards = dims["tensor_parallel"] if dims["sequence_parallel"] else 1
    padded = (args.get(f"dynamic_batch_pad_{name}_to", 1) for name in ("each", "total"))
    return math.lcm(2 * shards, *padded)


def _objective(draw: Draw) -> dict[str, Any]:
    means = ["token", "sample", "trained sample"]
    old = draw.one("forward pass before", ["none", "old", "replaced"])
    return {
        "policy": draw.one("policy's mean", means),
        "terms": draw.one("terms", ["likelihood", "policy", "policy"]),
        "kl": draw.one("KL's mean", [None, None, *means]),
        "entropy": draw.one("entropy's mean", [None, None, *means]),
        "temperature": draw.one("temperature", [1.0, 1.0, 0.7]),
        "chunk_tokens": draw.one("chunk", [1, 5, 64, 512]),
        # Log-probs of a forward pass before training: not made, added as a field, or in place of
        # the rollout's.
        "forward_only": old,
        "forward_entropy": draw.chance("entropies of the forward pass", 0.5),
        "page": draw.one("loss of the page", [None, None, *MEANS_OF_THE_PAGE]),
    }


def _worker(draw: Draw, planner: dict[str, Any], rollouts: list[dict[str, Any]]) -> str | None:
    """What happens to the process that plans later steps, if it is asked for any."""
    asked = any({"steps", "global_batch_size"} & {*rollout} for rollout in rollouts)
    fault = asked and planner["dynamic_batch_exchange"] and draw.chance("fault of the worker", 0.25)
    return draw.one("worker", WORKERS) if fault else None


def _clock(draw: Draw, planner: dict[str, Any]) -> str:
    if planner["dynamic_batch_cost_model"] == "fixed":
        return "true"
    return draw.one("clock", ["true", "skewed", "noisy", "stalled", "backwards", "absurd"])


def _rollout(draw: Draw, name: str, ranks: int, most_steps: int) -> dict[str, Any]:
    """Samples ``[total, response, data-parallel rank]`` and the steps that they are trained in."""
    stream = draw.stream(f"{name}, samples")
    lengths = _lengths(stream)
    owners = _owners(stream, len(lengths), ranks)
    if ranks > 1 and draw.chance("lopsided", 0.15):
        owners = [rank for rank, count in enumerate(LOPSIDED[:ranks]) for _ in range(count)]
        lengths = [stream.randint(1, 24) for _ in owners]
    how = stream.choice(["any", "any", "any", "0", "1", "2", "all", "few tokens"])
    samples = [
        [n, _response(stream, how, n), rank] for n, rank in zip(lengths, owners, strict=True)
    ]
    if draw.chance(f"{name}, samples of no tokens", 0.1):
        for sample in samples[::3]:
            sample[:2] = [0, 0]
    samples.sort(key=lambda sample: sample[2])
    rollout: dict[str, Any] = {"samples": samples}
    steps = draw.one(f"{name}, steps", ["one", "one", "global batch size", "groups", "dealt out"])
    if steps == "global batch size" and samples:
        least = math.ceil(len(samples) / most_steps)
        rollout["global_batch_size"] = stream.randint(least, max(least, len(samples)))
    elif steps == "groups":
        rollout["steps"] = _steps_of_groups(stream, len(samples), most_steps)
    elif steps == "dealt out":  # some of them empty, on all ranks
        cut: list[list[int]] = [[] for _ in range(stream.randint(1, most_steps))]
        for sample in stream.sample(range(len(samples)), len(samples)):
            stream.choice(cut).append(sample)
        rollout["steps"] = cut
    if steps in ("one", "groups") and draw.chance(f"{name}, padding samples", 0.2):
        rollout["padded_to"] = draw.one(f"{name}, padded to", [2, 4, 8])
    return rollout


def _lengths(stream: random.Random) -> list[int]:
    kind = stream.choice(
        ["tiny", "equal", "long-tailed", "long-tailed", "giant", "few", "over the cap", "none"]
    )
    count = stream.randint(3, 20)
    if kind == "none" and stream.random() < 0.6:  # else too often
        kind = "few"
    if kind == "tiny":
        return [stream.randint(1, 4) for _ in range(count)]
    if kind == "equal":
        return [stream.randint(1, 40)] * count
    if kind == "giant":
        return [LONGEST, *(stream.randint(1, 12) for _ in range(count))]
    if kind == "few":
        return [stream.randint(1, 50) for _ in range(stream.randint(1, 3))]
    if kind == "over the cap":
        return [stream.randint(40, LONGEST) for _ in range(min(count, 7))]
    if kind == "none":
        return []
    return [max(1, min(LONGEST, round(stream.lognormvariate(2.7, 0.9)))) for _ in range(count)]


def _response(stream: random.Random, how: str, total: int) -> int:
    if how == "few tokens":
        how = stream.choice(["0", "1", "1", "2"])
    if how == "any":
        edge = stream.choice([0, 1, 2, total, total - 1, None, None, None, None, None])
        return min(total, stream.randint(0, total) if edge is None else edge)
    return total if how == "all" else min(int(how), total)


def _owners(stream: random.Random, count: int, ranks: int) -> list[int]:
    """The data-parallel rank of each sample."""
    spread = stream.choice(["even", "random", "one rank", "uneven", "last none"])
    if spread == "even":
        return [number * ranks // max(count, 1) for number in range(count)]
    if spread == "one rank":
        return [stream.randrange(ranks)] * count
    if spread == "uneven":
        return [min(number, ranks - 1) for number in range(count)]
    populated = max(ranks - 1, 1) if spread == "last none" else ranks
    return [stream.randrange(populated) for _ in range(count)]


def _steps_of_groups(stream: random.Random, count: int, most_steps: int) -> list[list[int]]:
    """Steps of whole groups of one to four samples each, as many groups in each."""
    groups: list[list[int]] = []
    left = list(range(count))
    stream.shuffle(left)  # groups lie on any ranks
    while left:
        size = stream.randint(1, 4)
        groups.append(left[:size])
        left = left[size:]
    each = max(1, math.ceil(len(groups) / most_steps))
    steps = [groups[i : i + each] for i in range(0, len(groups), each)]
    return [[i for group in step for i in group] for step in steps] or [[]]


def job_of(seed: int, name: str | None = None, **forced: Any) -> Job:
    """The job of a seed, but for choices that are forced; see `drawn_job`."""
    drawn = drawn_job(seed, **forced)
    name, given = name or f"random-{seed}", {"job": drawn}
    return Job(name, "kit.random_jobs:compare", drawn["nproc"], None, given)


def verdict(job: Job, outcome: list[dict[str, Any]] | JobFailedError) -> tuple[str, str]:
    """``"equal"``, ``"refused"``, ``"not built"``, ``"near tie"`` or ``"wrong"``, and why."""
    if isinstance(outcome, JobFailedError):
        return "wrong", str(outcome)
    for kind in ("failed", "not built", "refused"):
        said = [rank[kind] for rank in outcome if kind in rank]
        if said and (kind == "failed" or len(said) == len(outcome)):
            return ("wrong" if kind == "failed" else kind), said[0]
        if said:
            return "wrong", f"refused on {len(said)} of {len(outcome)} ranks: {said[0]}"
    if len({str(rank["counts"]) for rank in outcome}) > 1:
        return "wrong", f"counts differ: {[rank['counts'] for rank in outcome]}"
    found = {
        f"rank {number}": {n: round(v, 2) for n, v in rank["differences"].items() if v > 1}
        | ({"wrong": rank["wrong"]} if rank["wrong"] else {})
        for number, rank in enumerate(outcome)
    }
    found = {rank: values for rank, values in found.items() if values}
    if not found:
        return "equal", ""
    said = "times the tolerance: " + json.dumps(found)[:3000]
    return ("near tie" if outcome[0]["gap"] < NEAR_TIE else "wrong"), said


def report(job: Job, said: str) -> str:
    """The seed as a command, the job as a line of JSON, and what was wrong."""
    seed = job.parameters["job"]["seed"]
    return (
        f"MCORE_BATCHING_RANDOM_SEEDS={seed} pytest tests/distributed/test_random_exactness.py\n"
        f"{json.dumps(job.parameters['job'])}\n{said}"
    )


if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(json.dumps(drawn_job(int(number))))
