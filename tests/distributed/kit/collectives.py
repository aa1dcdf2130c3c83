"""How many collectives among all ranks each phase of a job makes beside Megatron's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.model import adam
from kit.objective import packed_objective
from mcore_batching.batch.rank_messages import RankMessages
from mcore_batching.megatron import forward_only, get_data_iterator, schedule_of, train_step
from mcore_batching.megatron.data_iterator import plan_micro_batches
from mcore_batching.planning import ParallelDims

COUNTED: list[tuple[Any, str]] = [
    (RankMessages, "reduce"),
    (RankMessages, "gather"),
    (dist, "all_gather_object"),
    (dist, "broadcast_object_list"),
    (dist, "all_to_all_single"),
    (dist, "new_group"),
]


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Name of each kind of collective to the calls that this rank makes meanwhile."""
    counts: dict[str, int] = {}
    originals = [(owner, name, getattr(owner, name)) for owner, name in COUNTED]

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*arguments, **options)

        return call

    for owner, name, original in originals:
        setattr(owner, name, counting(name, original))
    try:
        yield counts
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def collectives_of_phases(dims: dict[str, Any], reference: str) -> dict[str, dict[str, int]]:
    """The collectives of each phase, in the second of two rounds."""
    model = small_model(dims, reference)
    optimizer = adam(model, distributed=False)
    shape = ParallelDims(**dims)
    args, exchanging = arguments(shape), arguments(shape, dynamic_batch_exchange=True)
    learning = arguments(shape, dynamic_batch_cost_model="auto")
    samples = my_samples(dims)
    on_one = samples if dist.get_rank() < shape.data_parallel else None
    phases: dict[str, dict[str, int]] = {}
    for _ in range(2):  # the first makes process groups
        with counted() as phases["plan"]:
            iterators, counts = get_data_iterator(args, model, samples)
        with counted() as phases["train_step"]:
            train_step(packed_objective, args, model, iterators, counts, optimizer)
        with counted() as phases["forward_only"]:
            forward_only(log_probs_of, args, model, iterators, counts)
        with counted() as phases["plans of all ranks"]:
            schedule_of(iterators).step_plan(0)
        with counted() as phases["plans of all ranks, again"]:
            schedule_of(iterators).step_plan(0)
        with counted() as phases["plan, data on one rank of a replica"]:
            get_data_iterator(args, model, on_one)
        with counted() as phases["plan, exchange"]:
            plan_micro_batches(exchanging, model, lambda: samples)
        with counted() as phases["plan, learnt costs"]:
            iterators, counts = get_data_iterator(learning, model, samples)
        with counted() as phases["train_step, learnt costs"]:
            train_step(packed_objective, learning, model, iterators, counts, optimizer)
    return phases
