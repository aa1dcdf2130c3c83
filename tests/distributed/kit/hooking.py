"""Jobs that train a hooked framework, and the engine itself beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

import mcore_batching
from kit import framework
from kit.exactness import arguments, difference, log_probs_of
from kit.model import adam, named_parameters, sharded_model
from kit.samples import make_samples, share, take
from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Kind,
    PackedMicroBatch,
    StepTotals,
    sample_mean,
    token_mean,
)
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
    response_log_probs,
    train_step,
)
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

PAD_MULTIPLIER = 4


def compare(
    dims: dict[str, Any],
    reference: str,
    spread: str = "uneven",
    per_token_loss: bool = True,
    planner: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One step of the hooked framework against one of the engine, on this rank.

    Returns:
        largest relative differences of ``log_probs`` and ``gradients``, the micro-batches'
        ``counts`` and ``placeholders``, the ``tokens`` that the framework counted, and how many the
        rank's samples have: ``trainable`` ones, and samples that are ``untrainable``.
    """
    shape = ParallelDims(**dims)
    samples = make_samples()
    # A response that is the whole sample has a first token that nothing predicts; functions that
    # find tokens by lengths do not provide for it.
    usual = [
        i
        for i, total in enumerate(samples["total_lengths"])
        if samples["response_lengths"][i] < total
    ]
    samples = take(samples, usual)
    replica = parallel_state.get_data_parallel_rank()
    mine = take(samples, share(samples, spread, replica, shape.data_parallel))
    args = arguments(
        shape,
        global_batch_size=len(usual),
        data_pad_size_multiplier=PAD_MULTIPLIER,
        qkv_format="thd",
        calculate_per_token_loss=per_token_loss,
        dynamic_batch_fill="placeholder",
        **(planner or {}),
    )
    hooked = _framework_step(args, shape, reference, per_token_loss, dict(mine))
    direct = _engine_step(args, shape, reference, per_token_loss, dict(mine))
    if per_token_loss:
        # A sample without a trainable token counts as one token in the framework's mean.
        tokens = sum(int(mask.sum()) for mask in samples["loss_masks"])
        scale = tokens / (tokens + _num_untrainable(samples))
        direct["gradients"] = [gradient * scale for gradient in direct["gradients"]]
    return {
        "log_probs": max(map(difference, hooked["log_probs"], direct["log_probs"]), default=0.0),
        "gradients": max(map(difference, hooked["gradients"], direct["gradients"])),
        "counts": hooked["counts"],
        "placeholders": hooked["placeholders"],
        "tokens": hooked["tokens"],
        "trainable": sum(int(mask.sum()) for mask in mine["loss_masks"]),
        "untrainable": _num_untrainable(mine),
        "last_stage": is_last_stage(),
    }


def _framework_step(
    args: Any, shape: ParallelDims, reference: str, per_token_loss: bool, data: dict[str, Any]
) -> dict[str, Any]:
    model = _model(shape, reference, per_token_loss)
    with mcore_batching.hook(framework):
        iterators, counts = framework.get_data_iterator(args, model, data)
        (count,) = counts
        iterators[0].get_next(["tokens"])  # forward_only begins at the beginning
        made = framework.forward_only(framework.log_probs, args, model, iterators, counts)
        assert iterators[0].offset == 0
        # What frameworks do: fields on the last stage alone, this rank's part of the tokens.
        if is_last_stage():
            assert made.keys() == {"log_probs"}
            data |= made
            lengths = data["total_lengths"], data["response_lengths"]
            data["advantages"] = [
                framework.own_part(each, *own)
                for each, *own in zip(data["advantages"], *lengths, strict=True)
            ]
        reports = framework.train_one_step(args, iterators, model, count)
        for iterator in iterators:
            assert iterator.offset == count
        wholes = [
            _whole(*values)
            for values in zip(
                data.get("log_probs", []),
                data["total_lengths"],
                data["response_lengths"],
                strict=is_last_stage(),
            )
        ]
        placeholders = sum(not indices for indices in iterators[0].micro_batch_indices)
    return {
        "log_probs": wholes,
        "gradients": [parameter.main_grad.clone() for _, parameter in named_parameters(model)],
        "counts": counts,
        "placeholders": placeholders,
        "tokens": int(sum(report["loss"].reshape(-1)[-1] for report in reports))
        if per_token_loss
        else None,
    }


def _engine_step(
    args: Any, shape: ParallelDims, reference: str, per_token_loss: bool, data: dict[str, Any]
) -> dict[str, Any]:
    model = _model(shape, reference, per_token_loss)
    optimizer = adam(model, distributed=False)
    iterators, counts = get_data_iterator(args, model, data)
    made = forward_only(log_probs_of, args, model, iterators, counts)
    mcore_batching.megatron.add_fields(iterators, made)
    mean = token_mean if per_token_loss else sample_mean

    def loss(
        logits: Tensor, row: PackedMicroBatch, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = zip(
            response_log_probs(logits, row), row["log_probs"], row["advantages"], strict=True
        )
        return mean([-(n - old).exp() * advantage for n, old, advantage in values], row, totals), {}

    # The update clips gradients in place; what it clips is compared.
    captured: list[Tensor] = []
    update = optimizer.step

    def step() -> Any:
        captured.extend(parameter.main_grad.clone() for _, parameter in named_parameters(model))
        return update()

    optimizer.step = step
    train_step(loss, args, model, iterators, counts, optimizer)
    return {"log_probs": made.get("log_probs", []), "gradients": captured}


def _num_untrainable(samples: dict[str, Any]) -> int:
    return sum(not mask.any() for mask in samples["loss_masks"])


def _model(shape: ParallelDims, reference: str, per_token_loss: bool) -> list[Any]:
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return sharded_model(shape, "dense", weights, ddp, calculate_per_token_loss=per_token_loss)


def _whole(part: Tensor, total_length: int, response_length: int) -> Tensor:
    """One value a response token from the parts of all context-parallel ranks."""
    (pieces,) = framework.predicted([total_length], [response_length])
    whole = part.new_zeros(response_length)
    begin, first = 0, total_length - response_length - 1
    for _, start, end in pieces:
        whole[start - first : end - first] = part[begin : begin + end - start]
        begin += end - start
    assert begin == len(part)
    torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def batches(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """What the hooked ``get_batch`` returns: two ranks, the second without a sample."""
    shape = ParallelDims(**dims)
    model = _model(shape, reference, True)
    args = arguments(shape, data_pad_size_multiplier=PAD_MULTIPLIER)
    args.max_tokens_per_gpu = 24
    empty = parallel_state.get_data_parallel_rank() == 1
    names = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
    data: dict[str, Any] = {name: make_samples()[name][8:12] for name in names}
    data["multimodal_train_inputs"] = [None, {"pixels": torch.ones(2, 3)}, {}, None]
    data["multimodal_train_inputs"][2] = {"pixels": torch.zeros(1, 3)}
    data = {name: values[: 0 if empty else None] for name, values in data.items()}
    data["dynamic_global_batch_size"] = 4
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_TOKEN)
    with mcore_batching.hook(framework, schema=schema):
        iterators, (count,) = framework.get_data_iterator(args, model, data)
        data["bonus"] = [torch.ones(n) for n in data["total_lengths"]]  # since planning
        data["loss_masks"] = [torch.ones_like(mask) for mask in data["loss_masks"]]
        keys = [*names, "multimodal_train_inputs", "bonus", "values"]
        made = [framework.get_batch(iterators[0], keys, PAD_MULTIPLIER) for _ in range(count)]
        drawn_out = _message(lambda: framework.get_batch(iterators[0], keys))
        iterators[0].reset()
        otherwise = framework.get_batch(iterators[0], keys, 3 * PAD_MULTIPLIER)["tokens"].shape
        data["secret"] = [1.0] * len(data["tokens"])
        undeclared = _message(lambda: framework.get_batch(iterators[0], [*keys, "secret"]))
        data["bonus"] = [torch.ones(1)]
        misfit = _message(lambda: iterators[0].get_next(["bonus"]))
    report = []
    for batch, indices in zip(made, iterators[0].micro_batch_indices, strict=True):
        lengths = [data["total_lengths"][i] for i in indices] or [1]
        sums = [mask.sum() for mask in batch["loss_masks"]]
        report.append(
            {
                "keys": sorted(batch),
                "indices": indices,
                "lengths_right": batch["total_lengths"] == lengths
                and [len(tokens) for tokens in batch["unconcat_tokens"]] == lengths,
                "row": list(batch["tokens"].shape),
                "tokens_right": batch["tokens"][0, : sum(lengths)].tolist()
                == torch.cat(batch["unconcat_tokens"]).tolist(),
                "offsets": batch["packed_seq_params"].cu_seqlens_q.tolist(),
                "mask_dtype": str(batch["full_loss_masks"].dtype),
                "mask_sum": int(batch["full_loss_masks"].sum()),
                "trainable": int(sum(sums)),
                "counted": int(sum(torch.clamp_min(each, 1) for each in sums)),
                "bonus": [len(each) for each in batch["bonus"]],
                "values": batch["values"],
                "pixels": batch["multimodal_train_inputs"].get("pixels", torch.zeros(0)).tolist(),
                "global_batch_size": batch["dynamic_global_batch_size"],
            }
        )
    return {
        "batches": report,
        "drawn_out": drawn_out,
        "otherwise_padded": list(otherwise),
        "num_response_tokens": sum(data["response_lengths"]),
        "undeclared": undeclared,
        "misfit": misfit,
        "capacity": args.max_tokens_per_gpu,
    }


def positions(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """Whether the model is given position ids, with and without multimodal inputs in the batch."""
    model = _model(ParallelDims(**dims), reference, True)
    args = arguments(ParallelDims(**dims))
    seen: list[bool] = []
    forward = model[0].module.forward

    def spy(*arguments: Any, position_ids: Any = None, **keywords: Any) -> Any:
        seen.append(position_ids is not None)
        return forward(*arguments, position_ids=position_ids, **keywords)

    model[0].module.forward = spy
    report = {}
    for name in ("text", "images", "text again"):
        data = take(make_samples(), [0, 5])
        if name == "images":
            data["multimodal_train_inputs"] = [None, None]
        with mcore_batching.hook(framework):
            iterators, counts = framework.get_data_iterator(args, model, data)
            framework.forward_only(framework.log_probs, args, model, iterators, counts)
        report[name] = list(seen)
        seen.clear()
    return report


def refused(dims: dict[str, Any], reference: str) -> dict[str, str]:
    """The error of each refused call, by name."""
    shape = ParallelDims(**dims)
    model = _model(shape, reference, True)
    data = take(make_samples(), [0, 5])
    last = parallel_state.get_data_parallel_rank() == shape.data_parallel - 1
    nothing = {key: list(values) for key, values in data.items()}
    if last:
        nothing["tokens"][1] = nothing["tokens"][1][:0]
        nothing["total_lengths"][1] = nothing["response_lengths"][1] = 0
    own = SimpleNamespace(rollout_data=data, get_next=None)
    with mcore_batching.hook(framework):

        def planned(rollout: dict[str, Any] = data, **changes: Any) -> Any:
            return framework.get_data_iterator(arguments(shape, **changes), model, rollout)

        iterators, counts = planned()

        def forward(iterators: Any, **changes: Any) -> Any:
            args = arguments(shape, **changes)
            return framework.forward_only(framework.log_probs, args, model, iterators, counts)

        hook_path = {"custom_megatron_before_log_prob_hook_path": "module.function"}
        attempts: dict[str, Callable[[], Any]] = {
            "bshd": lambda: framework.get_batch(iterators[0], ["tokens"], 1, "bshd"),
            "allgather": lambda: framework.get_batch(iterators[0], ["tokens"], 1, "thd", True),
            "bshd planned": lambda: planned(qkv_format="bshd"),
            "allgather planned": lambda: planned(allgather_cp=True),
            "exchange": lambda: planned(dynamic_batch_exchange=True),
            "shared prefixes": lambda: planned(dynamic_batch_share_prefixes=True),
            "pad each": lambda: planned(dynamic_batch_pad_each_to=8),
            "learnt costs": lambda: planned(dynamic_batch_cost_model="auto"),
            "cap": lambda: planned(data_pad_size_multiplier=1024),
            "no token": lambda: planned(nothing),
            "foreign batch": lambda: framework.get_batch(own, ["tokens"]),
            "foreign iterator": lambda: forward([own]),
            "path": lambda: forward(iterators, **hook_path),
        }
        return {name: _message(attempt) for name, attempt in attempts.items()}


def _message(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
