"""Jobs that train on multi-turn batches of the sizes that verl and SkyRL were tested with.

Every rank makes the whole batch, and the first computes the reference in the same process: plain
``[samples, length]`` forward passes over samples of one length, each optimizer step's loss in one
piece, `torch.optim.AdamW`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from kit.exactness import arguments, difference, log_probs_of
from kit.model import CLIP_GRAD, adam, local_part, named_parameters, sharded_model
from kit.objective import packed_objective, plain_objective
from kit.reference import plain_adam, plain_log_probs, plain_model
from kit.samples import VOCABULARY, take
from mcore_batching.megatron import forward_only, get_data_iterator, train_step
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims, PlannerConfig, group_steps, plan_batch
from mcore_batching.planning.plans.validation import validate_plan
from mcore_batching.rl import compute_advantages, pad_batch, real_samples
from mcore_batching.rl.real_samples import real_indices

TRAJECTORIES_PER_PROMPT = {"verl": 8, "skyrl": 5, "few": 4}
PROMPTS = {"verl": 45, "skyrl": 256, "few": 15}
PROMPTS_PER_STEP = {"verl": 15, "skyrl": 128, "few": 5}
NUM_SEQUENCES_OF_SKYRL = 3509
MOST_TURNS = 5
CAP_TOKENS = {"verl": 256, "skyrl": 1024, "few": 32}
MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 1,
}


def multi_turn_batch(system: str, seed: int) -> dict[str, list[Any]]:
    """A sample for each turn, in the order in which an asynchronous rollout finishes them.

    Random turns; for SkyRL's layout so many that there are 3509 sequences.
    """
    generator = random.Random(seed)
    each = TRAJECTORIES_PER_PROMPT[system]
    turns = [1] * (PROMPTS[system] * each)
    if system != "skyrl":
        turns = [generator.randint(1, MOST_TURNS) for _ in turns]
    while system == "skyrl" and sum(turns) < NUM_SEQUENCES_OF_SKYRL:
        trajectory = generator.randrange(len(turns))
        turns[trajectory] += turns[trajectory] < MOST_TURNS
    ids = [trajectory for trajectory, count in enumerate(turns) for _ in range(count)]
    generator.shuffle(ids)
    responses = [generator.randint(0, 4) for _ in ids]
    totals = [max(1, response + generator.randint(0, 3)) for response in responses]
    rewards = [float(generator.random() < 0.3) for _ in turns]
    uniform = torch.Generator(device="cpu").manual_seed(seed)

    def draw(length: int) -> torch.Tensor:
        return torch.rand(length, generator=uniform, device="cpu")

    return {
        "tokens": [(draw(total) * VOCABULARY).long() for total in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": [(draw(response) > 0.2).int() for response in responses],
        "rollout_log_probs": [-4.0 - draw(response) for response in responses],
        "ref_log_probs": [-4.0 - draw(response) for response in responses],
        "rewards": [rewards[trajectory] for trajectory in ids],
        "trajectory_ids": ids,
        "uids": [f"prompt {trajectory // each}" for trajectory in ids],
        "sample_indices": list(range(len(ids))),
    }


def steps_by_prompt(batch: dict[str, Any], system: str, dims: ParallelDims) -> list[list[int]]:
    """Sample indices of every optimizer step, from a plan by groups."""
    plan = plan_batch(
        batch["total_lengths"],
        dims,
        PlannerConfig(max_tokens_per_gpu=CAP_TOKENS[system]),
        groups=batch["uids"],
        groups_per_step=PROMPTS_PER_STEP[system],
    )
    validate_plan(plan, batch["total_lengths"])
    return [list(step.sample_indices) for step in plan.steps]


def shares_by_position(
    batch: dict[str, Any],
    steps: Sequence[Sequence[int]],
    ranks: int,
    padded: bool,
    system: str = "verl",
) -> list[list[dict[str, Any]]]:
    """verl's way: advantages of the whole batch, padded, then cut into parts for the ranks.

    Returns:
        batches [steps][ranks]. Groups are split over ranks: their advantages are there already.
    """
    multiple = math.lcm(ranks, PROMPTS_PER_STEP[system] * TRAJECTORIES_PER_PROMPT[system])
    batch = with_advantages(batch, steps)
    shares = []
    for part in (take(batch, step) for step in steps):
        if padded:
            part = pad_batch(part, multiple, pad_token_id=0)
        size = len(part["tokens"])
        ends = [size * rank // ranks for rank in range(ranks + 1)]
        shares.append([take(part, range(ends[r], ends[r + 1])) for r in range(ranks)])
    return shares


def shares_by_group(
    batch: dict[str, Any], steps: Sequence[Sequence[int]], ranks: int, padded: bool
) -> list[list[dict[str, Any]]]:
    """Whole groups to each rank, which computes its advantages itself; then padded alike.

    Returns:
        batches [steps][ranks], advantages and padding samples in those of this rank alone.
    """
    shares = []
    for part in (take(batch, step) for step in steps):
        prompts = group_steps(part["uids"], 1)
        shares.append(
            [take(part, [i for prompt in prompts[r::ranks] for i in prompt]) for r in range(ranks)]
        )
    rank = parallel_state.get_data_parallel_rank()
    mine = [step[rank] for step in shares]
    group = parallel_state.get_data_parallel_group()
    own_steps = consecutive(mine)
    whole = with_advantages(joined(mine), own_steps, group)
    mine = [take(whole, step) for step in own_steps]
    for step, own in zip(shares, mine, strict=True):
        most = max(len(share["tokens"]) for share in step)
        step[rank] = pad_batch(own, most, pad_token_id=0) if padded else own
    return shares


SHARES = {
    "verl": shares_by_position,
    "skyrl": shares_by_group,
    "few": functools.partial(shares_by_position, system="few"),
}


def with_advantages(
    batch: dict[str, Any], steps: Sequence[Sequence[int]], group: Any = None
) -> dict[str, Any]:
    """The batch with step-wise advantages, normalised by step."""
    advantages = compute_advantages(batch, step_wise=True, normalize=True, steps=steps, group=group)
    return {**batch, "advantages": advantages}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch of several."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


def consecutive(parts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Indices of each part's samples in what `joined` makes of them."""
    ends = [0, *itertools.accumulate(len(part["tokens"]) for part in parts)]
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


def train(system: str, dims: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Train on a batch with padding samples and without, and plainly.

    Returns:
        what the steps held, and the largest relative differences to the plain run.
    """
    shape = ParallelDims(**dims)
    batch = multi_turn_batch(system, seed)
    steps = steps_by_prompt(batch, system, shape)
    # Once, since the processes share few cores.
    box = [plain_run(batch, steps) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    (plain,) = box
    assert plain is not None
    args = arguments(shape, max_tokens_per_gpu=CAP_TOKENS[system])
    report: dict[str, Any] = {
        "last_stage": is_last_stage(),
        "step_sizes": [len(step) for step in steps],
        "metrics": plain["metrics"],
        "grad_norms": plain["grad_norms"],
    }
    rank = parallel_state.get_data_parallel_rank()
    for name in ("unpadded", "padded"):
        shares = SHARES[system](batch, steps, shape.data_parallel, padded=name == "padded")
        report[name] = engine_run(shape, args, [step[rank] for step in shares], plain)
    return report


def plain_run(batch: dict[str, Any], steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Weights before and after all steps, log-probs before, metrics and norms of each step."""
    model = plain_model("dense", **MODEL)
    device = next(model.parameters()).device
    batch = {
        key: [v.to(device) if torch.is_tensor(v) else v for v in values]
        for key, values in with_advantages(batch, steps).items()
    }
    parameters = dict(named_parameters([model]))
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.no_grad():
        log_probs = [values.cpu() for values in _responses(model, batch)]
    optimizer = plain_adam(model)
    metrics, norms = [], []
    for part in (take(batch, step) for step in steps):
        values = plain_objective(_responses(model, part), part)
        optimizer.zero_grad()
        values["loss"].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)))
        optimizer.step()
        metrics.append({name: float(value.detach()) for name, value in values.items()})
    return {
        "weights": weights,
        "updated": {name: p.detach().clone() for name, p in parameters.items()},
        "metrics": metrics,
        "grad_norms": norms,
        "log_probs": log_probs,
    }


def _responses(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Log-probs of every response, samples of one length at a time."""
    found: list[Any] = [None] * len(batch["tokens"])
    by_length: dict[int, list[int]] = {}
    for index, total in enumerate(batch["total_lengths"]):
        by_length.setdefault(total, []).append(index)
    for total, indices in by_length.items():
        tokens = torch.stack([batch["tokens"][i] for i in indices])
        rows = plain_log_probs(model, tokens)
        for row, i in zip(rows, indices, strict=True):
            found[i] = row[total - batch["response_lengths"][i] :]
    return found


def engine_run(
    shape: ParallelDims, args: Any, mine: list[dict[str, Any]], plain: dict[str, Any]
) -> dict[str, Any]:
    """Every step of this rank's shares by the engine, compared with the plain run."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = sharded_model(shape, "dense", plain["weights"], ddp, **MODEL)
    optimizer = adam(model, distributed=False)
    data = joined(mine)
    iterators, counts = get_data_iterator(args, model, data, steps=consecutive(mine))
    outputs = forward_only(log_probs_of, args, model, iterators, counts)
    found = outputs.get("log_probs", [])
    results = [
        train_step(packed_objective, args, model, iterators, counts, optimizer, step=step)
        for step in range(len(counts))
    ]
    weights = {
        name: max(
            difference(parameter.detach(), local_part(key, against[key], parameter))
            for key, parameter in named_parameters(model)
        )
        for name, against in (("weights", plain["updated"]), ("moved", plain["weights"]))
    }
    return {
        **weights,
        "num_samples": [len(part["tokens"]) for part in mine],
        "indices": [real_samples(part)["sample_indices"] for part in mine],
        "uids": [real_samples(part)["uids"] for part in mine],
        "micro_batches": list(counts),
        "num_outputs": len(found),
        "log_probs": max(
            (
                difference(found[i].cpu(), plain["log_probs"][data["sample_indices"][i]])
                for i in (real_indices(data) if found else [])
            ),
            default=0.0,
        ),
        "trained": [result.totals.num_samples for result in results],
        "updates": sum(result.update_successful for result in results),
        "metrics": [result.metrics for result in results],
        "grad_norms": [result.grad_norm for result in results],
    }
