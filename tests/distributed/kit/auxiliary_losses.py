"""Jobs of experts with auxiliary losses, against the losses' definitions on one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from kit.exactness import arguments, difference
from kit.groups import forget_job
from kit.model import ROUTING, adam, local_part, named_parameters, sharded_model
from kit.objective import packed_objective, plain_objective
from kit.reference import clip, plain_log_probs, plain_model
from kit.samples import make_samples, share, take
from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.megatron import get_data_iterator, train_step
from mcore_batching.megatron.standalone.bootstrap import initialize_model_parallel
from mcore_batching.planning import ParallelDims

KIND = "moe"


def compare(
    dims: dict[str, Any],
    reference: str,
    losses: dict[str, float],
    planner: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Differences of a step's gradients to those by definition.

    Args:
        dims: of the layout.
        reference: file with the model's weights.
        losses: ``aux_loss``, ``seq_aux_loss`` and ``z_loss`` to their coefficients.
        planner: further arguments.

    Returns:
        ``gradients``, the largest relative difference; ``share``, the part of the routers'
        gradients that the auxiliary losses make; ``grad_norm``, relative.
    """
    weights = torch.load(reference, weights_only=True)["weights"]
    shape = ParallelDims(**dims)
    balancing = {name: value for name, value in losses.items() if name != "z_loss"}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    settings = {
        "moe_router_load_balancing_type": list(balancing) or "none",
        "moe_aux_loss_coeff": list(balancing.values()) or 0.0,
        "moe_z_loss_coeff": losses.get("z_loss"),
    }
    model = sharded_model(shape, KIND, weights, ddp, **settings)
    args, samples = arguments(shape, **(planner or {})), make_samples()
    replica = parallel_state.get_data_parallel_rank()
    mine = share(samples, "uneven", replica, shape.data_parallel)
    data = take(samples, mine) | {"number": [torch.tensor(float(i)) for i in mine]}
    iterators, counts = get_data_iterator(args, model, data)
    rows: list[list[int]] = []

    def loss(logits: Tensor, row: PackedMicroBatch, totals: StepTotals) -> Any:
        if not row.is_placeholder:
            rows.append([int(number) for number in row["number"]])
        return packed_objective(logits, row, totals)

    result = train_step(loss, args, model, iterators, counts, adam(model, distributed=False))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    distinct = sorted({tuple(row) for each in gathered for row in each})
    parameters = dict(named_parameters(model))
    # The plain model needs groups of one expert- and tensor-parallel rank.
    forget_job()
    _new_groups(ParallelDims(data_parallel=dist.get_world_size()))
    plain = plain_model(KIND)
    expected, norm, part = _reference(plain, weights, distinct, losses, result.totals.num_tokens)
    _new_groups(shape)
    return {
        "gradients": max(
            difference(parameter.main_grad, local_part(name, expected[name], parameter))
            for name, parameter in parameters.items()
        ),
        "share": part,
        "grad_norm": abs(result.grad_norm / norm - 1.0),
        "rows": len(distinct),
    }


def _new_groups(dims: ParallelDims) -> None:
    parallel_state.destroy_model_parallel()
    initialize_model_parallel(dims, timeout_seconds=60.0)


def _reference(
    model: Any,
    weights: dict[str, Tensor],
    rows: Sequence[Sequence[int]],
    losses: dict[str, float],
    num_tokens: int,
) -> tuple[dict[str, Tensor], float, float]:
    """Clipped gradients by name, their norm before, and the auxiliary losses' part in those of
    routers."""
    parameters, samples = dict(named_parameters([model])), make_samples()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    routed: dict[int, dict[int, Tensor]] = defaultdict(dict)  # sample, layer, logits of its router
    log_probs = []
    for i, (tokens, response) in enumerate(
        zip(samples["tokens"], samples["response_lengths"], strict=True)
    ):
        layers = iter(range(len(model.decoder.layers)))

        def keep(router: Any, inputs: Any, output: Any, i: int = i, layers: Any = layers) -> None:
            routed[i][next(layers)] = (inputs[0] @ router.weight.T)[:, 0]

        hooks = [m.register_forward_hook(keep) for m in model.modules() if type(m) is TopKRouter]
        log_probs.append(plain_log_probs(model, tokens[None])[0, len(tokens) - response :])
        for hook in hooks:
            hook.remove()
    loss = plain_objective(log_probs, samples)["loss"]
    auxiliary = torch.zeros(())
    for row in rows:
        for layer in range(len(model.decoder.layers)):
            logits = torch.cat([routed[i][layer] for i in row])
            for term in _terms(logits, losses):
                # Weighted by the row's tokens, over those of the step that Megatron divides by.
                auxiliary = auxiliary + term * len(logits) / num_tokens
    both = [_gradients(value, parameters) for value in (loss, auxiliary)]
    routers = [name for name in parameters if "router" in name]
    part = max(float(both[1][name].norm() / both[0][name].norm()) for name in routers)
    for name, parameter in parameters.items():
        parameter.grad = both[0][name] + both[1][name]
    norm = float(clip(model))
    return {name: p.grad for name, p in parameters.items()}, norm, part


def _gradients(value: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        value, [*parameters.values()], retain_graph=True, materialize_grads=True
    )
    return dict(zip(parameters, found, strict=True))


def _terms(logits: Tensor, losses: dict[str, float]) -> Iterator[Tensor]:
    """The losses of one row by their definitions (Switch Transformer, ST-MoE), logits
    ``[tokens, experts]``; a packed row is one sequence to the sequence's loss."""
    experts, top_k = ROUTING["experts"], ROUTING["top_k"]
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(top_k).indices, 1.0)
    balance = experts * (chosen.mean(0) / top_k * probabilities.mean(0)).sum()
    for name in ("aux_loss", "seq_aux_loss"):
        yield losses.get(name, 0.0) * balance
    yield losses.get("z_loss", 0.0) * logits.logsumexp(-1).square().mean()
