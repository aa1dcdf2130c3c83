"""How many collectives among all ranks each phase of a job makes beside Megatron's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from kit.calls import Calls, stock_step
from kit.exactness import arguments
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.batch.messages import RankMessages
from mcore_batching.megatron import get_data_iterator, schedule_of, train_step
from mcore_batching.megatron.job import JobConsensus
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

COUNTED: list[tuple[Any, str]] = [
    (RankMessages, "reduce"),
    (RankMessages, "gather"),
    (dist, "all_gather_object"),
    (JobConsensus, "broadcast"),
    (dist, "all_to_all_single"),
    (dist, "new_group"),
]

# Sizes, then samples: pickled, and their tensors' bytes.
EXCHANGE = {"all_to_all_single": 3}
# Reading, with all lengths; the plan, and its broadcast; its arrival; that all samples are here.
PLAN = {"reduce": 4, "gather": 1, "broadcast": 1, **EXCHANGE}
# Collating, and after the pipeline; the next step's lengths, where there are any, are gathered too.
STOCK_STEP = PLAN | {"reduce": 6}
# Who has data; then lengths are gathered again. The data, and the plan.
SHARED = {"reduce": 2, "gather": 2, "broadcast": 1}
EXPECTED = {
    "plan": PLAN,
    # Collating, and after the pipeline.
    "train_step": {"reduce": 2},
    # Reading the arguments, collating, and after the pipeline.
    "forward_only": {"reduce": 3},
    "plan of all ranks": {},
    "plan, data on one rank of a replica": {n: PLAN[n] + SHARED.get(n, 0) for n in PLAN},
    # Reading, packing, filling; all ranks' lengths, and their micro-batches.
    "plan, samples stay": {"reduce": 3, "gather": 2},
    # What was measured travels with the settings.
    "plan, learnt costs": PLAN,
    "train_step, learnt costs": {"reduce": 2},
    "stock step": STOCK_STEP,
    "stock step, learnt costs": STOCK_STEP,
    "stock evaluation": STOCK_STEP,
    "stock step, data on some ranks": {n: STOCK_STEP[n] + SHARED.get(n, 0) for n in STOCK_STEP},
}
"""With two stages: one collective more is a choice."""


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Name of each kind of collective to the calls that this rank makes meanwhile."""
    counts: dict[str, int] = {}

    def counting(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in COUNTED:
            stack.enter_context(mock.patch.object(owner, name, counting(owner, name)))
        yield counts


def phases_make_the_collectives_that_are_listed(dims: ParallelDims) -> None:
    """In the second of two rounds."""
    calls = Calls(dims)
    staying = arguments(dims, dynamic_batch_exchange=False)
    stock = arguments(dims, padded_vocab_size=VOCABULARY)
    learning = arguments(dims, padded_vocab_size=VOCABULARY, dynamic_batch_cost_model="auto")
    model, data = calls.model, calls.data
    on_one = data if dist.get_rank() < dims.data_parallel else None
    phases: dict[str, dict[str, int]] = {}
    for _ in range(2):  # the first makes process groups
        with counted() as phases["plan"]:
            planned = calls.plan()
        with counted() as phases["train_step"]:
            calls.train_planned(planned)
        with counted() as phases["forward_only"]:
            calls.forward(data_iterator=planned[0], num_microbatches=planned[1])
        with counted() as phases["plan of all ranks"]:
            schedule_of(planned[0]).step_plan(0)
        with counted() as phases["plan, data on one rank of a replica"]:
            calls.plan_of(on_one)
        with counted() as phases["plan, samples stay"]:
            iterators, _ = get_data_iterator(staying, model, data)
            schedule_of(iterators).step_plan(0)
        with counted() as phases["plan, learnt costs"]:
            iterators, counts = get_data_iterator(learning, model, data)
        with counted() as phases["train_step, learnt costs"]:
            train_step(packed_objective, learning, model, iterators, counts, calls.optimizer)
        with counted() as phases["stock step"]:
            stock_step(stock, model, data)
        with counted() as phases["stock step, learnt costs"]:
            stock_step(learning, model, data)
        with counted() as phases["stock evaluation"]:
            stock_step(stock, model, data, forward_only=True)
        with counted() as phases["stock step, data on some ranks"]:
            stock_step(stock, model, data, has_data=on_one is not None)
    if is_last_stage():  # outputs go back, behind their sizes
        assert phases["forward_only"].pop("all_to_all_single") == 3
    assert phases == EXPECTED, phases
