"""Jobs that compare a layout with the reference."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from kit import cpu_kernels
from kit.blocking_p2p import blocking_p2p
from kit.model import ROUTING, adam, local_part, named_parameters, sharded_model
from kit.objective import DEFAULT_OBJECTIVE, packed_objective
from kit.samples import (
    CAP_TOKENS,
    make_samples,
    multimodal_positions,
    routed_experts,
    share,
    take,
)
from kit.transfers import counted_transfers
from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.compat import packed_rows
from mcore_batching.megatron.iterator import plan_forward_passes, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.schedule import computed_alone
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims
from mcore_batching.rl import pad_batch


def arguments(dims: ParallelDims, **changes: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as the engine reads them; plans do not depend on times."""
    defaults = {
        "max_tokens_per_gpu": CAP_TOKENS // dims.context_parallel,
        "global_batch_size": None,
        "seq_length": 1,
        "dynamic_batch_cost_model": "fixed",
    }
    return SimpleNamespace(**defaults | changes)


def log_probs_of(
    logits: torch.Tensor, *, micro_batch: PackedMicroBatch
) -> dict[str, list[torch.Tensor]]:
    """What the tests give to `forward_only`."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


def difference(
    ours: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor | None = None
) -> float:
    """Largest difference, relative to the largest entry of the reference, or of ``whole``, of which
    the reference is a part."""
    if not reference.numel():
        return 0.0
    scale = float((reference if whole is None else whole).abs().max()) or 1.0
    return float((ours - reference).abs().max()) / scale


@contextlib.contextmanager
def counted_tokens(model: list[Any]) -> Iterator[list[int]]:
    """Tokens that this rank's embedding gets in each call inside the block, padding among them."""
    seen: list[int] = []
    hooks = [
        module.register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
        for chunk in model
        for name, module in chunk.named_modules()
        if name.endswith("word_embeddings")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compare_blocking(**parameters: Any) -> dict[str, Any]:
    """`compare`, where transfers between stages block as NCCL's do."""
    with blocking_p2p():
        return compare(**parameters)


def compare_rows_of_frameworks(**parameters: Any) -> dict[str, Any]:
    """`compare`, where a row's parameters leave out what Mamba layers need, as frameworks' do."""
    from kit.state_space import Mixer

    give, base = packed_rows.give_offsets, Mixer.__base__
    before = dict(vars(base))

    def without_total(params: Any, offsets: Any, group: Any) -> None:
        params.host_cu_seqlens = tuple(offsets)

    packed_rows.give_offsets = without_total
    packed_rows.end_states_with_samples()
    try:
        return compare(**parameters)
    finally:
        packed_rows.give_offsets = give
        base._ssm_training = before["_ssm_training"]
        if "states_end_with_samples" in vars(base):
            del base.states_end_with_samples


def compare_with_state_across_samples(**parameters: Any) -> dict[str, Any]:
    """`compare`, where kernels of state-space layers are told that a row is one sequence."""
    told = {"_mamba": "seq_idx", "_causal_convolution": "cu_seqlens"}
    told["_gated_delta_rule"] = "cu_seqlens"
    with pytest.MonkeyPatch.context() as patch:
        for name, what in told.items():
            kernel = getattr(cpu_kernels, name)

            def run(*inputs: Any, kernel: Any = kernel, what: str = what, **options: Any) -> Any:
                return kernel(*inputs, **options | {what: None})

            patch.setattr(cpu_kernels, name, run)
        cpu_kernels.stand_in_for_kernels()
        try:
            return compare(**parameters)
        finally:
            patch.undo()
            cpu_kernels.stand_in_for_kernels()


def compare(**parameters: Any) -> dict[str, Any]:
    """Differences to the reference on this rank, and its ``messages`` to and from other stages."""
    with counted_transfers() as messages:
        return differences(**parameters) | {"messages": messages}


def differences(
    dims: dict[str, Any],
    kind: str,
    reference: str,
    spread: str = "uneven",
    per_token_loss: bool = True,
    distributed_optimizer: bool = False,
    overlap: bool = False,
    overlap_gather: bool = False,
    padded_to: int | None = None,
    planner: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    objective: str = DEFAULT_OBJECTIVE,
) -> dict[str, Any]:
    """Differences to the reference on this rank.

    Returns:
        ``log_probs``, ``gradients``, ``weights`` (largest relative differences), ``metrics``,
        ``grad_norm``, the plan's ``counts``, ``placeholders``, ``oversize`` micro-batches and
        context-parallel ``sizes``; of
        `forward_only`'s plan ``forward_count``, and ``forward_fullest``, the most tokens of a
        micro-batch of several samples; ``tokens`` that the model's first layer saw in training, and
        ``computed``, this rank's part of those of the samples with a segment of their own.
    """
    shape = ParallelDims(**dims)
    expected = torch.load(reference, weights_only=True)
    expected |= expected["objectives"][objective]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap or overlap_gather,
        overlap_param_gather=overlap_gather,
    )
    settings = dict(settings or {})
    if settings.get("bf16"):
        settings |= {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    settings["calculate_per_token_loss"] = per_token_loss
    model = sharded_model(shape, kind, expected["weights"], ddp, **settings)
    optimizer = adam(model, distributed_optimizer, overlap_gather, bool(settings.get("bf16")))
    get_model_config(model[0]).grad_scale_func = None  # as a job leaves it that calls no train()
    samples = make_samples()
    if kind == "replay":
        samples["rollout_routed_experts"] = routed_experts(**ROUTING)
    if kind == "mrope":
        samples["position_ids"] = [multimodal_positions(n) for n in samples["total_lengths"]]
    replica = parallel_state.get_data_parallel_rank()
    mine = share(samples, spread, replica, shape.data_parallel)
    args = arguments(shape, **(planner or {}))
    data = take(samples, mine)
    if padded_to is not None and mine:
        data = pad_batch(data, padded_to, DEFAULT_SCHEMA, pad_token_id=0)
        assert len(data["tokens"]) % padded_to == 0
        assert any(data["is_padding"])
    elif padded_to is not None:
        data["is_padding"] = []
    planned_with = model
    if Options.of(args).max_context_parallel is not None:  # as a reference model's rows are
        planned_with = sharded_model(shape, kind, expected["weights"], ddp, **settings)
    iterators, counts = get_data_iterator(args, planned_with, data)
    outputs = forward_only(log_probs_of, args, model, iterators, counts, store_prefix="old_")
    if Options.of(args).has_own_forward_cap:  # which fields of the last stage alone do not change
        add_fields(iterators, dict(zip(["teacher_log_probs"], outputs.values(), strict=False)))
        again = forward_only(log_probs_of, args, model, iterators, counts, store_prefix="old_")
        assert all(
            map(torch.equal, *(found.get("old_log_probs", []) for found in (again, outputs)))
        )
    report: dict[str, Any] = {"last_stage": is_last_stage(), "log_probs": 0.0}
    if is_last_stage():
        assert [len(v) for v in outputs["old_log_probs"]] == data["response_lengths"]
        report["log_probs"] = max(
            (
                difference(ours.cpu(), expected["log_probs"][i])
                for ours, i in zip(outputs["old_log_probs"][: len(mine)], mine, strict=True)
            ),
            default=0.0,
        )
    else:
        assert outputs == {}
    loss_function = functools.partial(packed_objective, name=objective)
    with counted_tokens(model) as seen:
        result = train_step(loss_function, args, model, iterators, counts, optimizer)
    assert get_model_config(model[0]).grad_scale_func is None  # of the step alone
    report |= {"metrics": result.metrics, "grad_norm": result.grad_norm, "gradients": {}}
    trained = {name: p for name, p in named_parameters(model) if p.requires_grad}
    for name, whole in expected["gradients"].items():
        parameter = trained.get(name)
        if parameter is None:  # of another stage
            continue
        if not distributed_optimizer:  # else a rank holds the reduced gradient of its part alone
            part = local_part(name, whole, parameter)
            # Some heads have gradients 1e-3 of others', and other ranks hold those.
            report["gradients"][name] = difference(parameter.main_grad, part, whole)
    report["gradients"] = max(report["gradients"].values(), default=0.0)
    if overlap_gather:
        for chunk in model:  # else the next forward pass gathers them
            chunk.start_param_sync(force_sync=True)
    report["weights"] = max(
        difference(
            parameter.detach().float(), local_part(name, expected["updated"][name], parameter)
        )
        for name, parameter in named_parameters(model)
    )
    schedule = schedule_of(iterators)
    (step,) = schedule.steps
    forward = plan_forward_passes(rollout_of(iterators), job_of(args), model).schedule
    (forward_step,) = forward.steps
    lengths = schedule.rollout_data["total_lengths"]
    computed = computed_alone(step, schedule.hosts)
    # Under a cap of their own samples move anew: other ones may run here.
    forward_rows = computed_alone(forward_step, forward.hosts)
    forward_lengths = forward.own_lengths
    shared = [sum(forward_lengths[i] for i in row) for row in forward_rows if len(row) > 1]
    longest = max((samples["total_lengths"][i] for i in mine), default=0)
    report |= {
        "counts": list(counts),
        "placeholders": sum(not indices for indices in step),
        "last_is_real": bool(step[-1]) or not mine,
        "sizes": list(schedule.row_sizes(0)),
        "oversize": longest > CAP_TOKENS,
        "forward_count": len(forward_step),
        "forward_fullest": max(shared, default=0),
        "tokens": sum(seen),
        "computed": sum(
            lengths[i] / size
            for row, size in zip(computed, schedule.row_sizes(0), strict=True)
            for i in row
        ),
    }
    return report
