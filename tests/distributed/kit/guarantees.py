"""Jobs that check a guarantee on every rank: what must hold though something is scarce or wrong.

A job raises where it does not hold. Many are the known faults of other systems.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.utils import get_model_config, unwrap_model

from kit.calls import Calls, loss_with, my_samples
from kit.exactness import arguments, log_probs_by_lengths, log_probs_of
from kit.model import named_parameters, quick_model, small_model
from kit.objective import packed_objective
from kit.samples import take
from kit.worker import keep_data_parallel_group, remake_groups
from kit.workers import is_planning_rank
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS
from mcore_batching.megatron import (
    ForwardFailedError,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
)
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.plan import Planner
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.megatron.watch import FailureWatch
from mcore_batching.planning import ParallelDims, PlanningError
from mcore_batching.rl import pad_batch

EXPERT_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
}
"""Settings with which the tokens that routers count move their bias."""


def on_all_ranks(value: Any) -> list[Any]:
    """This value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def error_of(call: Any) -> str:
    """Type and text of what a call raises; "" if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def printed(*calls: Callable[[], Any]) -> str:
    """What these calls print on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for call in calls:
            call()
    return said.getvalue()


def replicas_begin_alike(dims: ParallelDims) -> None:
    """Ranks with random numbers of their own get the same weights."""
    torch.manual_seed(dist.get_rank())
    model = quick_model(dims, 8)
    sums = [float(weight.double().sum()) for _, weight in named_parameters(model)]
    assert on_all_ranks(sums) == [sums] * dist.get_world_size()


def later_steps(dims: ParallelDims) -> None:
    """Rollouts of three steps, of which the later ones are planned while earlier ones run.

    Nothing is left behind by those that nobody trains on, nor by one that cannot be planned on.
    """
    calls = Calls(dims, "empty", global_batch_size=5)

    def rollout() -> Any:
        """Of data that the caller overwrites at once."""
        data = my_samples(dims, "empty")
        data["metadata"] = [torch.ones(2) for _ in data["tokens"]]
        planned = calls.plan_of(data)
        for values in data.values():
            for value in values:
                if isinstance(value, torch.Tensor):
                    value.zero_()
            values.clear()
        return planned

    def with_metadata(logits: torch.Tensor, *, micro_batch: Any) -> Any:
        made = log_probs_of(logits, micro_batch=micro_batch)
        values = micro_batch.fields["metadata"]
        return made | {"metadata": [torch.zeros(2) if v is None else v.clone() for v in values]}

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
    iterators, counts = rollout()
    made = calls.forward(with_metadata, data_iterator=iterators, num_microbatches=counts)
    right = calls.forward().get("log_probs", [])
    assert equal(made.get("log_probs", []), right)
    assert equal(made.get("metadata", []), [torch.ones(2) for _ in right])

    planned, plan = rollout(), Planner.plan

    def refuse(*given: Any) -> Any:
        if is_planning_rank():
            raise PlanningError("refused, on purpose")
        return plan(*given)

    with mock.patch.object(Planner, "plan", refuse):
        calls.train_planned(planned, step=0)
        for call in (
            lambda: calls.train_planned(planned, step=1),
            lambda: calls.train_planned(planned, step=1),
            lambda: calls.forward(data_iterator=planned[0], num_microbatches=planned[1]),
        ):
            said = error_of(call)
            assert said.startswith("PlanningFailedError: ")
            assert "rank 0: PlanningError: refused, on purpose" in said
    iterators, _ = rollout()
    said = error_of(lambda: [iterators[0].get_next(["tokens"]) for _ in range(1000)])
    assert "read num_microbatches[1] on all ranks first" in said
    assert plan_of(rollout()) == at_first
    calls.args.dynamic_batch_on_oversize = "error"
    assert "OversizeSampleError" in error_of(rollout)  # in whichever step it is
    calls.args.dynamic_batch_on_oversize = "own-bin"
    assert plan_of(rollout()) == at_first


def found_by_lengths(dims: ParallelDims, pad_each_to: int) -> None:
    """slime's functions step through the logits by lengths: padded samples would shift them."""
    calls = Calls(dims, dynamic_batch_pad_each_to=pad_each_to)
    if dims.context_parallel > 1:
        with pytest.raises(ValueError, match="let it take micro_batch"):
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
        assert not _is_said_again(args, model)
        ended += [job.consensus, watch]
        if number < 2 and dist.get_rank() == 0:
            try:
                raise RuntimeError("of groups that are no more")
            except RuntimeError as error:
                watch.report("a former call", error)
    keep_data_parallel_group()  # another, as where parallelism is set up anew
    # It is the last rank that says so, of a sample of the first batch already.
    assert _is_said_again(args, model) == is_last_rank()


def _is_said_again(args: Any, model: Any) -> bool:
    """True if it is printed that a sample is over the cap."""
    tight = copy.copy(args)
    tight.max_tokens_per_gpu = 8
    data = {"tokens": [torch.arange(9)], "total_lengths": [9], "response_lengths": [2]}
    return "over the cap of 8" in printed(lambda: get_data_iterator(tight, model, data))


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


def groups_have_the_jobs_time_out(dims: ParallelDims) -> None:
    """Seconds after which collectives give up; Megatron's own default is half an hour."""
    for group in (
        dist.group.WORLD,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ):
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 60


def names_of_outputs_and_metrics(dims: ParallelDims) -> None:
    """Outputs of placeholders have the names of all others; metrics go by name, not by place."""
    # One replica has placeholders alone.
    calls = Calls(dims, "empty", dynamic_batch_exchange=False)

    def of_placeholders(logits: torch.Tensor, *, micro_batch: Any) -> dict[str, Any]:
        made = log_probs_of(logits, micro_batch=micro_batch)
        return {"mine": made["log_probs"]} if micro_batch.is_placeholder else made

    with pytest.raises(ForwardFailedError, match=r"names that f returned is \['mine'\]"):
        calls.forward(of_placeholders)
    usual = calls.forward()
    assert usual.keys() == ({"log_probs"} if is_last_stage() else set())
    for values in usual.values():
        assert len(values) == len(calls.data["tokens"])
    assert bool(calls.data["tokens"]) == (parallel_state.get_data_parallel_rank() == 0)
    # A frozen reference model, which nothing was planned with.
    others = calls.forward(model=small_model(dims))
    assert equal(others.get("log_probs", []), usual.get("log_probs", []))
    order = reversed if is_last_rank() else iter
    turned = loss_with(lambda loss, metrics, n: (loss, dict(order([*metrics.items()]))))
    with calls.kept_weights():
        expected = calls.train().metrics
    assert set(expected) == ({"loss", "policy", "kl"} if is_last_stage() else set())
    assert calls.train(turned).metrics == pytest.approx(expected)


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


def model_is_refused(dims: ParallelDims, text: str, **settings: Any) -> None:
    """Planning refuses a model of a kind by this text; "": it does not."""
    args, model = arguments(dims), small_model(dims, **settings)
    said = error_of(lambda: get_data_iterator(args, model, my_samples(dims)))
    assert text in said
    assert bool(said) == bool(text), said


def over_the_cap_is_said_once(dims: ParallelDims, row: int, needed: int, **planner: Any) -> None:
    """By one rank, with the longest sample, the cap of a row, and that under which it would fit."""
    given = arguments(dims, **planner), small_model(dims), my_samples(dims)
    *others, last = on_all_ranks(printed(*[lambda: get_data_iterator(*given)] * 2))
    assert {*others} == {""}
    assert last.count("\n") == 1
    assert "a sample has 200 tokens, " in last
    assert f"over the cap of {row} of a micro-batch: it runs alone" in last
    assert f"--max-tokens-per-gpu {needed} would hold it" in last


def averaged_loss_is_told(dims: ParallelDims) -> None:
    """A mean over each micro-batch is some times too large; warned of on the rank with several."""
    calls = Calls(dims, "fewer")

    def mean(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        log_probs = torch.cat(response_log_probs(logits, row))
        weights = torch.cat(row["loss_masks"]).to(log_probs)
        return -(log_probs * weights).sum() / weights.sum().clamp(min=1), {}

    for loss, at_most in ((mean, 1), (packed_objective, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls.train(loss)
        told = [w.filename for w in caught if "never reads the step's totals" in str(w.message)]
        assert all(name.endswith("calls.py") for name in told)  # which calls `train_step`
        assert len(told) <= at_most
        assert dist.get_rank() or len(told) == at_most
