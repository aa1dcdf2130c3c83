"""How many collectives among all ranks each phase of a job makes beside Megatron's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from kit.calls import my_samples, small_model
from kit.exactness import arguments, log_probs_of
from kit.model import adam
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.batch.messages import RankMessages
from mcore_batching.integrations.megatron_lm.forward_backward import run_packed
from mcore_batching.integrations.megatron_lm.stock_steps import StockSteps
from mcore_batching.megatron import forward_only, get_data_iterator, schedule_of, train_step
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

# Sizes, then samples.
EXCHANGE = {"all_to_all_single": 2}
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


def get_batch(data_iterator: Any) -> Any:
    """What `run_packed` replaces, as in a stock script."""
    raise NotImplementedError


def _forward_step(data_iterator: Any, model: Any) -> Any:
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(
        data_iterator
    )
    output = model(
        tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed_seq_params
    )

    def loss(losses: torch.Tensor) -> Any:
        total, count = (losses.float() * loss_mask).sum(), loss_mask.sum()
        return total, count.int(), {"lm loss": torch.stack((total.detach(), count)).clone()}

    return output, loss


def stock_step(
    args: Any,
    model: list[Any],
    samples: dict[str, Any],
    *,
    has_data: bool = True,
    forward_only: bool = False,
) -> None:
    """One step of a stock script, whose ordinary micro-batches hold one sample each."""
    batches = [
        {
            "tokens": tokens[None],
            "labels": tokens.roll(-1)[None],
            "loss_mask": torch.ones(1, len(tokens)),
            "position_ids": torch.arange(len(tokens))[None],
        }
        for tokens in samples["tokens"]
    ]
    run_packed(
        get_forward_backward_func(),
        args,
        StockSteps(args),
        forward_step_func=_forward_step,
        data_iterator=iter(batches) if has_data else None,
        model=model,
        num_microbatches=len(batches),
        micro_batch_size=1,
        forward_only=forward_only,
        seq_length=1,
    )


def phases_make_the_collectives_that_are_listed(dims: dict[str, Any]) -> None:
    """In the second of two rounds."""
    model = small_model(dims)
    optimizer = adam(model, distributed=False)
    shape = ParallelDims(**dims)
    args, staying = arguments(shape), arguments(shape, dynamic_batch_exchange=False)
    learning = arguments(shape, padded_vocab_size=VOCABULARY, dynamic_batch_cost_model="auto")
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
        with counted() as phases["plan of all ranks"]:
            schedule_of(iterators).step_plan(0)
        with counted() as phases["plan, data on one rank of a replica"]:
            get_data_iterator(args, model, on_one)
        with counted() as phases["plan, samples stay"]:
            iterators, _ = get_data_iterator(staying, model, samples)
            schedule_of(iterators).step_plan(0)
        with counted() as phases["plan, learnt costs"]:
            iterators, counts = get_data_iterator(learning, model, samples)
        with counted() as phases["train_step, learnt costs"]:
            train_step(packed_objective, learning, model, iterators, counts, optimizer)
        stock = arguments(shape, padded_vocab_size=VOCABULARY)
        with counted() as phases["stock step"]:
            stock_step(stock, model, samples)
        with counted() as phases["stock step, learnt costs"]:
            stock_step(learning, model, samples)
        with counted() as phases["stock evaluation"]:
            stock_step(stock, model, samples, forward_only=True)
        with counted() as phases["stock step, data on some ranks"]:
            stock_step(stock, model, samples, has_data=on_one is not None)
    if is_last_stage():  # what outputs are and their bytes go back, each behind its sizes
        assert phases["forward_only"].pop("all_to_all_single") == 4
    assert phases == EXPECTED, phases
