"""A job whose costs are learnt and grow, so that its plans change, against the reference."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from kit.exactness import arguments, difference
from kit.learning import HiddenCosts, own_clock
from kit.model import adam, local_part, named_parameters, sharded_model
from kit.objective import packed_objective
from kit.operations import passes_of
from kit.samples import CAP_TOKENS, make_samples, share, take
from mcore_batching.megatron import get_data_iterator, schedule_of, train_step
from mcore_batching.planning import CostModel, ParallelDims

COSTS = [
    CostModel(linear=1.0, quadratic=0.0, per_micro_batch=2000.0, backward_ratio=1.0),
    CostModel(linear=1.0, quadratic=1.0, per_micro_batch=0.0, backward_ratio=3.0),
]
"""What passes cost in the first half of the steps, and in the second."""


def compare(
    dims: dict[str, Any],
    kind: str,
    reference: str,
    spread: str = "fewer",
    planner: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Train on the same samples while costs are learnt, as the reference does without.

    Returns:
        for every step this rank's ``plan``, if costs were ``learnt``, and relative
        differences of the ``loss`` (on the last stage, else 0), ``grad_norm`` and ``weights``.
    """
    shape = ParallelDims(**dims)
    expected = torch.load(reference, weights_only=True)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = sharded_model(shape, kind, expected["weights"], ddp)
    optimizer = adam(model, distributed=False)
    settings = {
        "max_tokens_per_gpu": 2 * CAP_TOKENS // shape.context_parallel,
        "dynamic_batch_cost_model": "auto",
    }
    args = arguments(shape, **settings | (planner or {}))
    samples = make_samples()
    replica = parallel_state.get_data_parallel_rank()
    data = take(samples, share(samples, spread, replica, shape.data_parallel))
    costs = HiddenCosts(1e-5)
    costs.chunks = shape.virtual_pipeline
    seen = []
    with own_clock(costs):
        for number, step in enumerate(expected["trajectory"]):
            iterators, counts = get_data_iterator(args, model, data)
            schedule = schedule_of(iterators)
            costs.follow(schedule, COSTS[2 * number // len(expected["trajectory"])])
            with passes_of(model, costs.takes):
                result = train_step(packed_objective, args, model, iterators, counts, optimizer)
            seen.append(
                {
                    "plan": schedule.steps[0],
                    "learnt": schedule.learnt.seconds_per_unit is not None,
                    "loss": abs(result.metrics.get("loss", step["loss"]) / step["loss"] - 1),
                    "grad_norm": abs(result.grad_norm / step["grad_norm"] - 1),
                    "weights": max(
                        difference(parameter.detach(), local_part(name, whole, parameter))
                        for name, parameter in named_parameters(model)
                        for whole in [step["weights"][name]]
                    ),
                }
            )
    return seen
