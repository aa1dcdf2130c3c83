"""Jobs in which something goes wrong on one rank, and jobs for the faults of other systems."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.utils import get_model_config

from kit.exactness import arguments, log_probs_of
from kit.groups import keep_data_parallel_group, remake_groups
from kit.model import adam, named_parameters, sharded_model
from kit.objective import packed_objective
from kit.samples import make_samples, share, take
from mcore_batching.batch import token_mean
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job.failure_watch import FailureWatch
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout.data_iterator import rollout_of
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims


def small_model(dims: dict[str, Any], reference: str, **settings: Any) -> list[Any]:
    """The test model in Megatron's data-parallel wrapper."""
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return sharded_model(
        ParallelDims(**dims), settings.pop("kind", "dense"), weights, ddp, **settings
    )


def my_samples(dims: dict[str, Any], spread: str = "uneven") -> dict[str, list[Any]]:
    """The samples of this rank's replica."""
    samples = make_samples()
    ranks = dims.get("data_parallel", 1)
    mine = share(samples, spread, parallel_state.get_data_parallel_rank(), ranks)
    return take(samples, mine)


def groups_made_anew(dims: dict[str, Any], reference: str) -> list[dict[str, Any]]:
    """Log-probs before and after all process groups are destroyed, twice; who agrees and watches.

    What one rank says of a failure before concerns nobody after.
    """
    shape = ParallelDims(**dims)
    keep_data_parallel_group()
    seen: list[dict[str, Any]] = []
    ended: list[Any] = []
    for number in range(3):
        if number:
            remake_groups(shape, number)
        model = small_model(dims, reference)
        args = arguments(shape, dynamic_batch_exchange=False)  # as in slime
        iterators, counts = get_data_iterator(args, model, my_samples(dims))
        found = forward_only(log_probs_of, args, model, iterators, counts).get("log_probs", [])
        job = job_of(args)
        watch = job.watch
        assert isinstance(watch, FailureWatch)
        seen.append(
            {
                "outputs": [each.tolist() for each in found],
                "others": job.consensus not in ended and watch not in ended,
                "watching": [each._thread.is_alive() for each in (*ended[1::2], watch)],
                "joined": watch.is_joined("here", dist.get_world_size()),
                "remembered": _remembered(args, model),
            }
        )
        ended += [job.consensus, watch]
        if number < 2 and dist.get_rank() == 0:
            try:
                raise RuntimeError("of groups that are no more")
            except RuntimeError as error:
                watch.report("a former call", error)
    keep_data_parallel_group()  # another, as where parallelism is set up anew
    return [*seen, {"remembered": _remembered(args, model)}]


def _remembered(args: Any, model: Any) -> bool:
    """True if it is printed that a sample is over the cap."""
    tight = copy.copy(args)
    tight.max_tokens_per_gpu = 8
    data = {"tokens": [torch.arange(9)], "total_lengths": [9], "response_lengths": [2]}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        get_data_iterator(tight, model, data)
    return "over the cap of 8" in said.getvalue()


def extra_placeholders(
    dims: dict[str, Any],
    reference: str,
    count: int,
    kind: str,
    per_token_loss: bool,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Gradients of a step, and of the same step with more placeholders at its start."""
    settings = {"kind": kind, "calculate_per_token_loss": per_token_loss, **settings}
    model = small_model(dims, reference, **settings)
    args = arguments(ParallelDims(**dims))
    iterators, counts = get_data_iterator(args, model, my_samples(dims))
    plain = _gradients(args, model, iterators, counts)
    schedule = schedule_of(iterators)
    more = dataclasses.replace(schedule, steps=(((),) * count + schedule.steps[0],))
    rollout_of(iterators).replace(more)
    padded = _gradients(args, model, iterators, [counts[0] + count])
    differences = {
        name: float((padded[name] - gradient).abs().max() / (gradient.abs().max() + 1e-30))
        for name, gradient in plain.items()
        if name != "metrics"
    }
    return {
        "bit_equal": all(torch.equal(padded[name], plain[name]) for name in differences),
        "largest_difference": max(differences.values()),
        "nonzero": any(bool(plain[name].any()) for name in differences),
        "metrics": [plain["metrics"], padded["metrics"]],
        "placeholders": sum(not indices for indices in more.steps[0]),
    }


def _gradients(args: Any, model: list[Any], iterators: Any, counts: list[int]) -> dict[str, Any]:
    """Reduced gradients of a step that updates nothing."""
    before = {name: p.detach().clone() for name, p in named_parameters(model)}
    optimizer = adam(model, distributed=False)
    result = train_step(packed_objective, args, model, iterators, counts, optimizer)
    gradients = {name: p.main_grad.clone() for name, p in named_parameters(model)}
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            parameter.copy_(before[name])
    return {"metrics": result.metrics, **gradients}


def no_samples_anywhere(
    dims: dict[str, Any], reference: str, planner: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A batch without a single sample goes through every collective and changes nothing."""
    model = small_model(dims, reference)
    args = arguments(ParallelDims(**dims), **(planner or {}))
    data = take(make_samples(), [])
    before = {name: p.detach().clone() for name, p in named_parameters(model)}
    iterators, counts = get_data_iterator(args, model, data)
    outputs = forward_only(log_probs_of, args, model, iterators, counts)
    optimizer = adam(model, distributed=False)
    result = train_step(packed_objective, args, model, iterators, counts, optimizer)
    return {
        "last_stage": is_last_stage(),
        "counts": list(counts),
        "outputs": {key: len(values) for key, values in outputs.items()},
        "metrics": result.metrics,
        "unchanged": all(torch.equal(p, before[name]) for name, p in named_parameters(model)),
    }


def data_on_some_ranks(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """Only the first rank of each replica holds the data; the outputs of the last stage."""
    model = small_model(dims, reference)
    args = arguments(ParallelDims(**dims))
    data = my_samples(dims)
    first = (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    outputs = []
    for given in (data, data if first else None):
        iterators, counts = get_data_iterator(args, model, given)
        outputs.append(forward_only(log_probs_of, args, model, iterators, counts))
    everywhere, some = outputs
    return {
        "equal": all(
            torch.equal(a, b)
            for a, b in zip(everywhere.get("log_probs", []), some.get("log_probs", []), strict=True)
        ),
        "count": len(some.get("log_probs", [])),
        "last_stage": is_last_stage(),
    }


def nobody_has_data(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """No rank of the last replica passes data."""
    model = small_model(dims, reference)
    replica = parallel_state.get_data_parallel_rank()
    data = my_samples(dims) if replica == 0 else None
    try:
        get_data_iterator(arguments(ParallelDims(**dims)), model, data)
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": None}


def several_steps(
    dims: dict[str, Any],
    reference: str,
    sizes: list[int],
    batch: int,
    planner: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """How samples fall into optimizer steps when rank ``r`` holds ``sizes[r]`` of them.

    A rank without samples knows no batch size.
    """
    model = small_model(dims, reference)
    replica = parallel_state.get_data_parallel_rank()
    count = len(make_samples()["tokens"])
    data = take(make_samples(), [i % count for i in range(sizes[replica])])
    args = arguments(ParallelDims(**dims), **(planner or {}))
    args.global_batch_size = batch if sizes[replica] else None
    iterators, counts = get_data_iterator(args, model, data)
    optimizer = adam(model, distributed=False)
    trained = [
        train_step(
            packed_objective, args, model, iterators, counts, optimizer, step=step
        ).totals.num_samples
        for step in range(len(counts))
    ]
    outputs = forward_only(log_probs_of, args, model, iterators, counts)
    return {
        "steps": [
            sorted(i for micro_batch in step for i in micro_batch)
            for step in schedule_of(iterators).steps
        ],
        "trained": trained,
        "outputs": len(outputs.get("log_probs", [])),
        "last_stage": is_last_stage(),
    }


def found_by_lengths(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """A function that walks through the logits by total lengths, as slime's do."""
    model = small_model(dims, reference)
    shape = ParallelDims(**dims)
    args = arguments(shape, dynamic_batch_pad_each_to=12 if shape.context_parallel > 1 else 8)
    iterators, counts = get_data_iterator(args, model, my_samples(dims))

    def walks(
        logits: torch.Tensor,
        *,
        unconcat_tokens: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        **unused: Any,
    ) -> dict[str, list[torch.Tensor]]:
        found, start = [], 0
        for tokens, total, response in zip(
            unconcat_tokens, total_lengths, response_lengths, strict=True
        ):
            predicted = torch.log_softmax(logits[0, start : start + total - 1], -1)
            values = predicted.gather(1, tokens[1:, None])[:, 0]
            whole = torch.cat((values.new_zeros(1), values))
            found.append(whole[total - response :])
            start += total
        return {"log_probs": found}

    try:
        outputs = forward_only(walks, args, model, iterators, counts)
    except ValueError as error:
        return {"message": str(error)}
    expected = forward_only(log_probs_of, args, model, iterators, counts)
    pairs = zip(outputs["log_probs"], expected["log_probs"], strict=True)
    return {"difference": max(float((a - b).abs().max()) for a, b in pairs if a.numel())}


def slime_style(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """A function with slime's keywords, which returns a pair; and `get_next`."""
    model = small_model(dims, reference)
    args = arguments(ParallelDims(**dims))
    data = my_samples(dims, "empty")
    iterators, counts = get_data_iterator(args, model, data)
    seen = []

    def f(
        logits: torch.Tensor,
        *,
        args: Any,
        unconcat_tokens: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        **unused: Any,
    ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        assert args is not None
        assert not with_entropy
        seen.append([len(tokens) for tokens in unconcat_tokens] == list(total_lengths))
        del unused
        sums = [
            logits.new_full((n,), float(t))
            for n, t in zip(response_lengths, total_lengths, strict=True)
        ]
        with torch.enable_grad():
            slices = [logits[0, :2].requires_grad_() * 1.0, *[logits[0, :1]] * (len(sums) - 1)]
        return torch.empty(0), {"lengths": sums, "slices": slices}

    outputs = forward_only(f, args, model, iterators, counts)
    keys = "tokens", "rewards", "values"
    drawn = [iterators[0].get_next(key for key in keys) for _ in range(sum(counts))]
    return {
        "seen": seen,
        "own_memory": all(
            value.untyped_storage().nbytes() == value.nbytes and not value.requires_grad
            for values in outputs.values()
            for value in values
        ),
        "alias": len({value.data_ptr() for value in outputs.get("slices", [])}),
        "outputs": [[float(x) for x in v.unique()] for v in outputs.get("lengths", [])],
        "expected": [
            [float(total)] if response else []
            for total, response in zip(data["total_lengths"], data["response_lengths"], strict=True)
        ],
        "last_stage": is_last_stage(),
        "none_fields": all(each["values"] is None for each in drawn),
        "sizes": [len(each["tokens"]) for each in drawn],
        "indices": iterators[0].micro_batch_indices,
    }


def expert_bias_counts(dims: dict[str, Any], reference: str, kind: str = "moe") -> dict[str, Any]:
    """Tokens that the router counts towards the expert bias: real ones alone."""
    settings = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
    }
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    weights = torch.load(reference, weights_only=True)["weights"]
    model = sharded_model(ParallelDims(**dims), kind, weights, ddp, **settings)
    # Samples stay, so that the last rank has placeholders alone.
    staying = {"dynamic_batch_exchange": False, "dynamic_batch_pad_each_to": 16}
    args = arguments(ParallelDims(**dims), **staying)
    data = my_samples(dims, "empty")
    counted: list[torch.Tensor] = []

    def record(model_chunks: Any, *unused: Any, **also_unused: Any) -> None:
        del unused, also_unused
        for chunk in model_chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith("local_tokens_per_expert"):
                    counted.append(buffer.clone())

    get_model_config(model[0]).finalize_model_grads_func = record
    iterators, counts = get_data_iterator(args, model, data)
    train_step(packed_objective, args, model, iterators, counts, adam(model, distributed=False))
    return {
        "counted": [int(each.sum()) for each in counted],
        "real": sum(data["total_lengths"]) * 2,
    }


def adds_fields(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """Log-probs of the last stage become a field of the samples, and the loss reads them."""
    model = small_model(dims, reference)
    args = arguments(ParallelDims(**dims))
    iterators, counts = get_data_iterator(args, model, my_samples(dims, "empty"))
    add_fields(iterators, forward_only(log_probs_of, args, model, iterators, counts))

    def ratio(logits: torch.Tensor, row: Any, totals: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs = response_log_probs(logits, row)
        pairs = zip(log_probs, row["log_probs"], strict=True)
        share = token_mean([(new - old).exp() for new, old in pairs], row, totals)
        return share, {}

    result = train_step(ratio, args, model, iterators, counts, adam(model, distributed=False))
    return {"last_stage": is_last_stage(), "metrics": result.metrics}


def freed_while_sending(repeats: int, num_values: int) -> int:
    """Messages that arrive wrong when the sender frees them before the receiver is ready.

    As the interleaved schedule does with outputs that are on their way.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    wrong = 0
    for _ in range(repeats):
        ranks = {"group": group, "prev_pipeline_rank": 0, "next_pipeline_rank": 1}
        buffers: dict[str, Any] = dict.fromkeys(
            ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
        )
        if dist.get_rank() == 0:
            output = torch.ones(num_values)
            requests = p2p_communication._p2p_ops(**buffers | {"tensor_send_next": output}, **ranks)
            output.data = torch.empty(1)
            reused = [torch.full((num_values,), float("nan")) for _ in range(3)]
            requests["send_next"].wait()
            del reused
        else:
            time.sleep(0.02)
            received = torch.empty(num_values)
            requests = p2p_communication._p2p_ops(
                **buffers | {"tensor_recv_prev": received}, **ranks
            )
            requests["recv_prev"].wait()
            wrong += int((received != 1).any())
        dist.barrier()
    return wrong


def timeouts_of_groups() -> list[float]:
    """Seconds after which collectives give up, in the job's group and in Megatron's."""
    groups = [
        dist.group.WORLD,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def lingers() -> int:
    """Returns at once, in a process that does not end by itself; its number."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return os.getpid()


def hangs() -> None:
    """The last rank never comes to the barrier that the others wait in."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3600)
    dist.barrier()


def dies() -> None:
    """The last rank raises while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("on purpose")
    dist.barrier()


def returns_rank() -> int:
    """This rank."""
    return dist.get_rank()
