"""What an optimizer step counts as, and steps that nothing is trained in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from kit.calls import my_samples, small_model
from kit.exactness import arguments
from kit.guarantees import error_of
from kit.model import adam, sharded_model
from kit.objective import packed_objective
from kit.samples import make_samples, take
from mcore_batching.megatron import get_data_iterator, train_step
from mcore_batching.planning import ParallelDims, group_steps
from mcore_batching.rl import pad_batch
from mcore_batching.rl.real_samples import real_indices

PROMPTS, TRAJECTORIES, PROMPTS_PER_STEP = 4, 2, 2


def scheduler_of(optimizer: Any, num_samples: int) -> OptimizerParamScheduler:
    """Megatron's own, linear from 1e-3 to 0 over so many samples."""
    for group in optimizer.param_groups:  # as an OptimizerConfig with these writes them
        group["max_lr"], group["min_lr"] = 1e-3, 0.0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=num_samples,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=num_samples,
        wd_incr_style="constant",
    )


def learning_rates(dims: dict[str, Any], reference: str, turns: int) -> None:
    """A step counts as what is said of it, whatever turns it holds, or as the global batch size.

    Megatron's scheduler took the turns of a step for samples. Here steps hold 2 prompts of 2
    trajectories, each of so many samples.
    """
    model = small_model(dims, reference)
    shape = ParallelDims(**dims)
    args = arguments(shape)
    uids = [prompt for prompt in range(PROMPTS) for _ in range(TRAJECTORIES * turns)]
    mine = range(parallel_state.get_data_parallel_rank(), len(uids), shape.data_parallel)
    data = {
        name: list(itertools.islice(itertools.cycle(values), len(mine)))
        for name, values in make_samples().items()
    }
    # Turns of one trajectory lie on several ranks.
    steps = [
        [place for place, sample in enumerate(mine) if sample in step]
        for step in group_steps(uids, PROMPTS_PER_STEP)
    ]
    increment = PROMPTS_PER_STEP * TRAJECTORIES
    optimizer = adam(model, distributed=False)
    scheduler = scheduler_of(optimizer, 2 * len(steps) * increment)
    # Steps that can be read once: a check that read them lost the whole batch.
    planned = get_data_iterator(args, model, data, steps=(iter(step) for step in steps))

    def trained(planned: Any, scheduler: Any, **options: Any) -> tuple[float, int]:
        result = train_step(
            packed_objective, args, model, *planned, optimizer, scheduler, **options
        )
        assert result.update_successful
        return float(optimizer.param_groups[0]["lr"]), result.consumed_samples

    declared = get_data_iterator(
        args, model, data | {"dynamic_global_batch_size": increment}, steps=steps
    )
    told: list[tuple[Any, dict[str, Any]]] = [(planned, {"increment": increment}), (declared, {})]
    prompts = [
        trained(each, scheduler, step=step, **options)
        for each, options in told
        for step in range(len(steps))
    ]
    assert [rate for rate, _ in prompts] == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)
    assert [consumed for _, consumed in prompts] == [increment] * 4
    # Never guessed.
    for options, text in (
        ({}, "ConfigError: no global_batch_size (--global-batch"),
        ({}, "set increment to what lr_decay_steps counts a step as"),
        ({"increment": 0}, "increment must be 1 or more, got 0"),
        ({"increment": 2.5}, "increment must be an integer, got 2.5"),
    ):
        assert text in error_of(lambda options=options: trained(planned, scheduler, **options))
    args.global_batch_size = 3
    planned = get_data_iterator(args, model, data)
    number = len(planned[1])
    scheduler = scheduler_of(optimizer, 3 * number)
    samples = [trained(planned, scheduler, step=step) for step in range(number)]
    # The last, short one too: Megatron's decay is so many steps of a whole batch.
    left = [1e-3 * (number - 1 - step) / number for step in range(number)]
    assert number == -(-8 * turns // 3)
    assert [rate for rate, _ in samples] == pytest.approx(left, abs=1e-9)
    assert [consumed for _, consumed in samples] == [3] * number


def nothing_to_train(
    dims: dict[str, Any],
    reference: str,
    kind: str = "dense",
    planner: dict[str, Any] | None = None,
    distributed_optimizer: bool = False,
) -> None:
    """Steps without samples, or of padding samples alone, change nothing after one that left
    momentum: this moved the weights by 6.6e-3, and padding samples a router's bias."""
    settings: dict[str, Any] = {}
    if kind == "moe":  # counted tokens move the bias
        settings = {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
        }
    shape = ParallelDims(**dims)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=distributed_optimizer,
        overlap_param_gather=distributed_optimizer,
    )
    weights = torch.load(reference, weights_only=True)["weights"]
    model = sharded_model(shape, kind, weights, ddp, **settings)
    optimizer = adam(model, distributed_optimizer, distributed_optimizer)
    scheduler = scheduler_of(optimizer, 100)
    args = arguments(shape, **(planner or {}))
    data = my_samples(dims)
    count, first = len(data["tokens"]), parallel_state.get_data_parallel_rank() == 0
    padded = pad_batch(data, count + 3, pad_token_id=0)
    real = set(real_indices(padded))
    padding = take(padded, [i for i in range(count + 3) if i not in real])
    # The fields of all ranks must be the same.
    data = take(padded, sorted(real))
    none = take(data, [])
    everything = list(range(count))
    cases: dict[str, tuple[dict[str, Any], Any, int]] = {
        "empty step": (data, [[], everything, []], 2),
        "padding": (padding, None, 0),
        "padding on one rank": (padding if first else none, None, 0),
        "no samples": (none, None, 0),
    }

    def train(data: dict[str, Any], steps: Any, step: int) -> Any:
        planned = get_data_iterator(args, model, data, steps=steps and map(torch.tensor, steps))
        return train_step(
            packed_objective, args, model, *planned, optimizer, scheduler, step=step, increment=5
        )

    train(data, None, 0)
    for name, case in cases.items():
        before = _state(model, optimizer, scheduler)
        result = train(*case)
        after = _state(model, optimizer, scheduler)
        assert (result.update_successful, result.consumed_samples) == (False, 0), name
        assert result.metrics.get("loss", 0.0) == 0.0, name
        assert [key for key in before if not torch.equal(before[key], after[key])] == [], name
    before = _state(model, optimizer, scheduler)
    # Masked samples are samples: unpacked, too, their step is an update.
    masked = data | {"loss_masks": [torch.zeros(n) for n in data["response_lengths"]]}
    for samples in (masked, data):
        result = train(samples, None, 0)
        assert (result.update_successful, result.consumed_samples) == (True, 5)
    after = _state(model, optimizer, scheduler)
    assert sum(not torch.equal(before[key], after[key]) for key in before) > 10


def _state(model: list[Any], optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers, of Adam's moments and of the scheduler's place."""
    state = {"scheduler": torch.tensor(scheduler.num_steps)}
    for number, chunk in enumerate(model):
        if chunk.ddp_config.overlap_param_gather:  # else the next forward pass gathers them
            chunk.start_param_sync(force_sync=True)
        for name, value in unwrap_model(chunk).state_dict().items():
            if torch.is_tensor(value):
                state[f"{number}.{name}"] = value.detach().clone()
    for part, each in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for number, of_parameter in enumerate(each.optimizer.state.values()):
            for name, value in of_parameter.items():
                state[f"{part}.{number}.{name}"] = torch.as_tensor(value).detach().clone()
    return state
