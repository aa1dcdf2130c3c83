"""Steps with a loss or a gradient that is not finite on one rank, under every setting for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from kit.exactness import arguments
from kit.faults import my_samples
from kit.model import ADAM, adam, named_parameters, sharded_model
from kit.objective import packed_objective
from mcore_batching.megatron import get_data_iterator, train_step
from mcore_batching.planning import ParallelDims


def _nan_loss(share: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    del logits
    return share * math.nan


def _infinite_gradient(share: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The share as it is, with a gradient of 1 / 0."""
    first = logits[0, 0, 0].float()
    return share + (first - first.detach()).sqrt()


def _objective(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
) -> Callable[..., Any]:
    """The usual loss; changed in the second micro-batch of the last rank but one."""
    slots = iter(range(1000))

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        share, metrics = packed_objective(logits, row, totals)
        if next(slots) == 1 and change and dist.get_rank() == dist.get_world_size() - 2:
            share = change(share, logits)
        # A metric of this name does not stand for the step's own loss.
        return share, metrics | {"loss": share.new_zeros(())}

    return loss


def settings_for_nonfinite(
    dims: dict[str, Any], reference: str, fault: str, overlap: bool
) -> dict[str, Any]:
    """What becomes of such a step under each setting, and of the ordinary step after it."""
    change = {"loss": _nan_loss, "gradient": _infinite_gradient}[fault]
    weights = torch.load(reference, weights_only=True)["weights"]
    # As ``megatron.training`` sets it by default: raises on one rank inside the pipeline.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, check_for_nan_in_grad=True, overlap_grad_reduce=overlap
    )
    model = sharded_model(ParallelDims(**dims), "dense", weights, ddp)
    before = {name: p.detach().clone() for name, p in named_parameters(model)}
    report: dict[str, Any] = {}
    for setting in ({"dynamic_batch_on_nonfinite": "skip"}, {}):
        args = arguments(ParallelDims(**dims), **setting)
        iterators, counts = get_data_iterator(args, model, my_samples(dims))
        optimizer = adam(model, distributed=False)
        case: dict[str, Any] = {}
        try:
            result = train_step(_objective(change), args, model, iterators, counts, optimizer)
            case |= {"updated": result.update_successful, "grad_norm": result.grad_norm}
            case["dropped"] = all(not p.main_grad.any() for _, p in named_parameters(model))
        except Exception as error:
            case |= {"type": type(error).__name__, "message": str(error)}
        case["unchanged"] = all(torch.equal(p, before[n]) for n, p in named_parameters(model))
        report[setting.get("dynamic_batch_on_nonfinite", "error")] = case
    assert ddp.check_for_nan_in_grad
    result = train_step(_objective(None), args, model, iterators, counts, optimizer)
    return report | {"grad_norm": result.grad_norm, "updated": result.update_successful}


def loss_scaling(dims: dict[str, Any], reference: str) -> dict[str, list[Any]]:
    """Steps in float16: scaled past its range until the scaler has come down, and norms of the same
    gradients under two more optimizers, whose scales differ."""
    settings = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = sharded_model(ParallelDims(**dims), "dense", weights, ddp, **settings)

    def optimizer_of(scale: float, **changes: float) -> Any:
        config = OptimizerConfig(
            optimizer="adam",
            fp16=True,
            params_dtype=torch.float16,
            initial_loss_scale=scale,
            loss_scale_window=1000,
            hysteresis=1,
            **ADAM | changes,
        )
        return get_megatron_optimizer(config, model)

    args = arguments(ParallelDims(**dims))
    iterators, counts = get_data_iterator(args, model, my_samples(dims))
    optimizer, steps, norms = optimizer_of(2.0**15), [], []
    for _ in range(4):
        result = train_step(packed_objective, args, model, iterators, counts, optimizer)
        scale = float(optimizer.get_loss_scale())
        steps.append([result.update_successful, scale, result.grad_norm])
    for scale in (8.0, 64.0):
        another = optimizer_of(scale, lr=0.0)
        result = train_step(packed_objective, args, model, iterators, counts, another)
        norms.append(result.grad_norm)
    return {"steps": steps, "norms": norms}
