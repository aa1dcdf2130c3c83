"""Jobs that check a guarantee on every rank: what must hold though something is scarce or wrong.

A job raises where it does not hold. Many are the known faults of other systems.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.utils import get_model_config, unwrap_model

from kit.calls import (
    Calls,
    equal,
    error_of,
    is_last_rank,
    loss_with,
    my_samples,
    on_all_ranks,
    printed,
    stock_step,
)
from kit.model import arguments, named_parameters, quick_model, small_model
from kit.objective import log_probs_by_lengths, log_probs_of, packed_objective
from kit.samples import VOCABULARY, make_samples, take
from kit.worker import keep_data_parallel_group, remake_groups
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.messages import RankMessages
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS
from mcore_batching.megatron import (
    ForwardFailedError,
    forward_only,
    get_data_iterator,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job import JobConsensus, job_of
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.megatron.watch import FailureWatch
from mcore_batching.planning import ParallelDims, step_statistics
from mcore_batching.rl import pad_batch

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
EXPERT_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
}
"""Settings with which the tokens that routers count move their bias."""


def replicas_begin_alike(dims: ParallelDims) -> None:
    """Ranks with random numbers of their own get the same weights."""
    torch.manual_seed(dist.get_rank())
    model = quick_model(dims, 8)
    sums = [float(weight.double().sum()) for _, weight in named_parameters(model)]
    assert on_all_ranks(sums) == [sums] * dist.get_world_size()


def later_steps(dims: ParallelDims) -> None:
    """Rollouts of three steps, of which the later ones are planned while earlier ones run; those
    that nobody trains on leave nothing behind."""
    calls = Calls(dims, "empty", global_batch_size=5)

    def rollout() -> Any:
        return calls.plan_of(my_samples(dims, "empty"))

    def plan_of(rollout: Any) -> list[Any]:
        schedule = schedule_of(rollout[0])
        return [schedule.plan_digest, schedule.num_microbatches, schedule.steps]

    at_first = plan_of(rollout())
    kept, counts = [rollout() for _ in range(3)], at_first[1]
    assert repr(kept[0][1]) == f"[{counts[0]}, and 2 being planned]"
    del kept[0], kept[1]
    assert plan_of(rollout()) == at_first  # though two were abandoned
    found = kept[0][1]
    assert (list(found), found == counts, repr(found)) == (counts, True, repr(counts))
    assert plan_of(rollout()) == at_first


def found_by_lengths(dims: ParallelDims) -> None:
    """slime's functions step through the logits by lengths: padded samples would shift them."""
    calls = Calls(dims, dynamic_batch_pad_each_to=12)
    if dims.context_parallel > 1:
        with pytest.raises(ValueError, match="padded to 12, not 4; let it take micro_batch"):
            calls.forward(log_probs_by_lengths)
        return
    pairs = zip(
        calls.forward(log_probs_by_lengths)["log_probs"], calls.forward()["log_probs"], strict=True
    )
    assert max(float((a - b).abs().max()) for a, b in pairs if a.numel()) < 1e-5


def slime_style(dims: ParallelDims) -> None:
    """A function with slime's keywords, which returns a pair, runs; and so does `get_next`."""
    calls = Calls(dims, "empty")

    def f(
        logits: Any, *, args: Any, unconcat_tokens: Any, with_entropy: bool = False, **lengths: Any
    ) -> Any:
        assert args is not None
        assert not with_entropy
        totals, responses = lengths["total_lengths"], lengths["response_lengths"]
        assert [len(tokens) for tokens in unconcat_tokens] == list(totals)
        of_samples = zip(responses, totals, strict=True)
        sums = [logits.new_full((n,), float(total)) for n, total in of_samples]
        with torch.enable_grad():
            slices = [logits[0, :2].requires_grad_() * 1.0, *[logits[0, :1]] * (len(sums) - 1)]
        return torch.empty(0), {"lengths": sums, "slices": slices}

    outputs = calls.forward(f)
    for value in itertools.chain(*outputs.values()):
        assert not value.requires_grad
        # A slice would keep the logits of its whole row.
        assert value.untyped_storage().nbytes() == value.nbytes
    if is_last_stage():
        lengths = zip(calls.data["total_lengths"], calls.data["response_lengths"], strict=True)
        expected = [[float(total)] if response else [] for total, response in lengths]
        assert [each.unique().tolist() for each in outputs["lengths"]] == expected
        assert len({value.data_ptr() for value in outputs["slices"]}) == len(expected)
    first, keys = calls.iterators[0], ("tokens", "rewards", "values")
    for indices in first.micro_batch_indices:
        drawn = first.get_next(key for key in keys)
        assert drawn["values"] is None
        assert len(drawn["tokens"]) == max(1, len(indices))


def router_counts_real_tokens(dims: ParallelDims, kind: str, per_rank: int) -> None:
    """The mask has a broadcast bug upstream; padding and placeholders must not move the bias.

    Only the first stage of a GPTModel scatters the mask over tensor-parallel ranks by itself.
    ``per_rank`` routers count on each rank; tensor-parallel ranks each count a part.
    """
    # Samples stay, so that the last rank has placeholders alone.
    staying = {"dynamic_batch_exchange": False, "dynamic_batch_pad_each_to": 16}
    calls = Calls(dims, "empty", EXPERT_BIAS | {"kind": kind}, **staying)
    counted: list[int] = []

    def record(model_chunks: Any, *unused: Any, **also_unused: Any) -> None:
        buffers = itertools.chain(*(chunk.named_buffers() for chunk in model_chunks))
        counted.extend(int(b.sum()) for n, b in buffers if n.endswith("local_tokens_per_expert"))

    get_model_config(calls.model[0]).finalize_model_grads_func = record
    calls.train()
    tensor_parallel = parallel_state.get_tensor_model_parallel_rank()
    place = dist.get_rank() - tensor_parallel
    sharing = on_all_ranks(counted)[place : place + dims.tensor_parallel]
    together = [sum(each) for each in zip(*sharing, strict=True)]
    assert together == [2 * sum(calls.data["total_lengths"])] * per_rank
    if dims.data_parallel > 1 and is_last_rank():
        assert not any(together)


def padding_moves_nothing(dims: ParallelDims) -> None:
    """Padding samples that all ranks have alone, or one, move no weights by the momentum that is
    left, and no router's bias."""
    calls = Calls(dims, model=EXPERT_BIAS | {"kind": "moe"})
    calls.train()
    count = len(calls.data["tokens"])
    padded = pad_batch(calls.data, count + 3, pad_token_id=0)
    padding = take(padded, [i for i, is_padding in enumerate(padded["is_padding"]) if is_padding])
    none, is_first = take(padded, []), parallel_state.get_data_parallel_rank() == 0

    def state() -> list[torch.Tensor]:
        values = (unwrap_model(chunk).state_dict().values() for chunk in calls.model)
        tensors = filter(torch.is_tensor, itertools.chain(*values))
        return [each.clone() for each in tensors]

    for data in (padding, padding if is_first else none):
        before = state()
        done = calls.train_planned(calls.plan_of(data))
        assert (done.update_successful, done.consumed_samples) == (False, 0)
        assert equal(state(), before)
    assert calls.train().update_successful
    assert sum(not torch.equal(a, b) for a, b in zip(state(), before, strict=True)) > 10


def groups_made_anew(dims: ParallelDims) -> None:
    """As slime does where it offloads a model: ranks agree and watch over the present groups, and
    the job goes on, twice. What one rank says of a failure before concerns nobody after; a new job
    knows nothing of the former."""
    keep_data_parallel_group()
    first: list[torch.Tensor] = []
    ended: list[Any] = []
    for number in range(3):
        if number:
            remake_groups(dims, number)
        model = small_model(dims)
        args = arguments(dims, dynamic_batch_exchange=False)  # as in slime
        iterators, counts = get_data_iterator(args, model, my_samples(dims))
        found = forward_only(log_probs_of, args, model, iterators, counts)["log_probs"]
        first = first or found
        assert found
        assert equal(found, first)
        job = job_of(args)
        watch = job.watch
        assert isinstance(watch, FailureWatch)
        assert job.consensus not in ended
        assert watch not in ended
        watching = [each._thread.is_alive() for each in (*ended[1::2], watch)]
        assert watching == [False] * number + [True]
        assert watch.is_joined("here", dist.get_world_size())
        assert not _is_printed_again(args, model)
        ended += [job.consensus, watch]
        if number < 2 and dist.get_rank() == 0:
            try:
                raise RuntimeError("of groups that are no more")
            except RuntimeError as error:
                watch.report("a former call", error)
    keep_data_parallel_group()  # another, as where parallelism is set up anew
    # It is the last rank that says so, of a sample of the first batch already.
    assert _is_printed_again(args, model) == is_last_rank()


def _is_printed_again(args: Any, model: Any) -> bool:
    """True if it is printed that a sample is over the cap."""
    tight = copy.copy(args)
    tight.max_tokens_per_gpu = 8
    data = {"tokens": [torch.arange(9)], "total_lengths": [9], "response_lengths": [2]}
    return "over the cap of 8" in printed(lambda: get_data_iterator(tight, model, data))


def names_of_outputs_and_metrics(dims: ParallelDims) -> None:
    """Outputs of placeholders have the names of all others; metrics go by name, not by place."""
    # One replica has placeholders alone.
    calls = Calls(dims, "empty", dynamic_batch_exchange=False)

    def of_placeholders(logits: torch.Tensor, *, micro_batch: Any) -> dict[str, Any]:
        made = log_probs_of(logits, micro_batch=micro_batch)
        return {"mine": made["log_probs"]} if micro_batch.is_placeholder else made

    with pytest.raises(ForwardFailedError, match=r"names that f returned is \['mine'\]"):
        calls.forward(of_placeholders)
    order = reversed if is_last_rank() else iter
    turned = loss_with(lambda loss, metrics, n: (loss, dict(order([*metrics.items()]))))
    found = calls.train(turned).metrics
    assert set(found) == ({"loss", "policy", "kl"} if is_last_stage() else set())
    again = Calls(dims, "empty", dynamic_batch_exchange=False)
    assert again.train().metrics == pytest.approx(found)


def wrong_time_outs_are_named(dims: ParallelDims) -> None:
    """Before there is anything by which ranks agree; of the watches made for it one is left."""
    model, data, last = small_model(dims), my_samples(dims), dist.get_world_size() - 1
    for given in (0, -1, float("nan"), float("inf"), "soon"):
        for at_fault in ((last,), range(last + 1)):
            # What one at fault meets the others with: `kit.worker` tells groups by their options.
            seconds = given if dist.get_rank() in at_fault else DEFAULT_TIMEOUT_SECONDS
            args = arguments(dims, dynamic_batch_consensus_timeout_seconds=seconds)
            said = error_of(lambda args=args: get_data_iterator(args, model, data))
            alike = "DynamicBatchArgumentError" if len(at_fault) == 2 else "PlanningFailedError"
            assert said.startswith(alike)
            text = "--dynamic-batch-consensus-timeout-seconds must be a number of seconds from 1 to"
            assert text in said
            assert f"got {given}" in said.replace("'", "")
    get_data_iterator(arguments(dims), model, data)
    assert [each.name for each in threading.enumerate()].count("failure watch") == 1


def experts_of_all_ranks(dims: ParallelDims, refused: bool) -> None:
    """Before 0.19 Megatron takes such experts for parameters that data-parallel ranks share."""
    args, model = arguments(dims), small_model(dims, kind="moe")
    said = error_of(lambda: get_data_iterator(args, model, my_samples(dims)))
    text = "set --expert-tensor-parallel-size 2, or --expert-model-parallel-size above 1"
    assert (text in said) if refused else (said == "")


def over_the_cap_is_printed_once(dims: ParallelDims, row: int, needed: int, **planner: Any) -> None:
    """By one rank, with the longest sample, the cap of a row, and that under which it would fit."""
    given = arguments(dims, **planner), small_model(dims), my_samples(dims)
    *others, last = on_all_ranks(printed(*[lambda: get_data_iterator(*given)] * 2))
    assert {*others} == {""}
    assert last.count("\n") == 1
    assert "a sample has 200 tokens, " in last
    assert f"over the cap of {row} of a micro-batch: it runs alone" in last
    assert f"--max-tokens-per-gpu {needed} would hold it" in last


def shared_tokens_are_printed(dims: ParallelDims) -> None:
    """By one rank, how many are computed, or why all are; dropout of a model that is evaluated
    alone shares nothing."""
    flags = {"max_tokens_per_gpu": 200, "dynamic_batch_share_prefixes": True}
    calls = Calls(dims, dynamic_batch_exchange=False, **flags)
    calls.data = make_samples()
    for tokens in calls.data["tokens"]:  # others than on other ranks
        tokens.add_(dist.get_rank()).remainder_(VOCABULARY)
    planned = calls.plan()
    schedule = schedule_of(planned[0])
    figures = step_statistics(*schedule.step_plan(0))
    whole, computed = figures.sample_tokens, figures.real_tokens
    assert whole == dims.data_parallel * sum(calls.data["total_lengths"]) > computed
    # Costs are learnt of rows without trees.
    assert sum(map(sum, schedule.rows_alone(0))) < sum(calls.data["total_lengths"])
    saved = f"{whole:,} tokens of samples computed as {computed:,}: {whole / computed:.1f}x fewer"
    apart = "tokens that samples have in common are computed for each"
    marks = [torch.full((n,), float(is_last_rank() * n)) for n in calls.data["total_lengths"]]
    marked = {"schema": DEFAULT_SCHEMA.declare("mark", Kind.PER_TOKEN)}
    for text, lines, call in (
        ("", 0, lambda: calls.planned(dynamic_batch_share_prefixes=False)),
        # And fewer tokens saved.
        (apart, 2, lambda: calls.plan_of(calls.data | {"mark": marks}, **marked)),
        (saved, 1, calls.plan),
        # And that the flag is the default.
        (saved, 2, lambda: calls.planned(dynamic_batch_exchange=True)),
    ):
        job_of().memory.said.clear()
        said = printed(call, call)
        assert (text in said) if is_last_rank() else (said == ""), (text, said)
        assert said.count("\n") == (lines if is_last_rank() else 0), said
    evaluated = small_model(dims)
    get_model_config(evaluated[0]).hidden_dropout = 0.1
    calls.forward(model=evaluated, data_iterator=planned[0], num_microbatches=planned[1])


def freed_outputs_arrive_whole(dims: ParallelDims) -> None:
    """The sender frees a message before the receiver is ready, as the interleaved schedule does.

    Of 20 such messages gloo delivers 19 wrong, if it reads the freed memory.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    for _ in range(20):
        ranks = {"group": group, "prev_pipeline_rank": 0, "next_pipeline_rank": 1}
        buffers: dict[str, Any] = dict.fromkeys(
            ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
        )
        values = torch.ones(50_000)
        if dist.get_rank() == 0:
            requests = p2p_communication._p2p_ops(**buffers | {"tensor_send_next": values}, **ranks)
            values.data = torch.empty(1)
            reused = [torch.full((50_000,), float("nan")) for _ in range(3)]
            requests["send_next"].wait()
            del reused
        else:
            time.sleep(0.02)
            values.zero_()
            requests = p2p_communication._p2p_ops(**buffers | {"tensor_recv_prev": values}, **ranks)
            requests["recv_prev"].wait()
            assert bool((values == 1).all())
        dist.barrier()


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
