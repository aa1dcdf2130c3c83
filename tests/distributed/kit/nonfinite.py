"""Steps with a loss or a gradient that is not finite on one rank, under every setting for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from kit.calls import my_samples
from kit.exactness import arguments
from kit.guarantees import equal, on_all_ranks
from kit.model import ADAM, adam, named_parameters, seeded_model
from kit.objective import packed_objective
from mcore_batching.megatron import NonFiniteError, get_data_iterator, train_step
from mcore_batching.planning import ParallelDims


def _nan_loss(share: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    del logits
    return share * math.nan


def _infinite_gradient(share: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The share as it is, with a gradient of 1 / 0."""
    first = logits[0, 0, 0].float()
    return share + (first - first.detach()).sqrt()


def _of_a_field(share: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The share as it is: at fault are advantages of NaN, of a token that is not trained."""
    del logits
    return share


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _objective(change: Change | None) -> Callable[..., Any]:
    """The usual loss; changed in the second micro-batch of the last rank but one."""
    slots = iter(range(1000))

    def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        share, metrics = packed_objective(logits, row, totals)
        if next(slots) == 1 and change and dist.get_rank() == dist.get_world_size() - 2:
            share = change(share, logits)
        # A metric of this name does not stand for the step's own loss.
        return share, metrics | {"loss": share.new_zeros(())}

    return loss


def error_or_skipped(dims: dict[str, Any], fault: str, overlap: bool) -> None:
    """Such a step raises on all ranks or, where that is set, is skipped on all.

    Also where Megatron's wrapper would raise on one rank, and leave the others waiting.
    """
    changes = {"loss": _nan_loss, "gradient": _infinite_gradient, "field": _of_a_field}
    change = changes[fault]
    # As ``megatron.training`` sets it by default: raises on one rank inside the pipeline.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, check_for_nan_in_grad=True, overlap_grad_reduce=overlap
    )
    model = seeded_model(ParallelDims(**dims), "dense", ddp)
    before = [p.detach().clone() for _, p in named_parameters(model)]
    optimizer = adam(model, distributed=False)

    def step(change: Change | None, **flags: Any) -> Any:
        args = arguments(ParallelDims(**dims), **flags)
        samples = my_samples(dims)
        if change is _of_a_field and parallel_state.get_data_parallel_rank() == 0:
            first = int((samples["loss_masks"][2] == 0).nonzero()[0])
            samples["advantages"][2][first] = math.nan
        planned = get_data_iterator(args, model, samples)
        return train_step(_objective(change), args, model, *planned, optimizer)

    skipped = step(change, dynamic_batch_on_nonfinite="skip")
    assert (skipped.update_successful, skipped.grad_norm) == (False, None)
    assert not any(p.main_grad.any() for _, p in named_parameters(model))
    with pytest.raises(NonFiniteError) as raised:
        step(change)
    assert equal([p.detach() for _, p in named_parameters(model)], before)
    assert ddp.check_for_nan_in_grad
    said = str(raised.value)
    assert set(on_all_ranks(said)) == {said}
    found = set(re.findall(r"rank (\d):", said))
    named = said.count("the gradient of ")
    if fault == "loss":
        assert "rank 2: the loss of micro-batch 1 (samples [" in said
        assert (found, named) == ({"2"}, 0)
    elif fault == "field":
        samples = "advantages is not finite in samples [2] of data-parallel rank 0"
        assert f"; {samples}, where the loss mask is 0: set numbers there" in said
        assert "the gradient of " in said
    else:
        assert "is not finite in" not in said
        assert "rank 2: the gradient of " in said
        assert named == 3 * len(found)
        # Both stages of the replica, before gradients are added up.
        assert overlap or found == {"0", "2"}
    done = step(None)
    assert done.update_successful
    assert 0 < done.grad_norm < math.inf


def loss_scaling(dims: dict[str, Any]) -> None:
    """Steps in float16 past its range are skipped, as Megatron means it, until the scaler has come
    down. Norms of the same gradients are the same under optimizers of other scales."""
    settings = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = seeded_model(ParallelDims(**dims), "dense", ddp, **settings)

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
    optimizer, steps, before = optimizer_of(2.0**15), [], 2.0**15
    for _ in range(4):
        result = train_step(packed_objective, args, model, iterators, counts, optimizer)
        scale = float(optimizer.get_loss_scale())
        assert scale == (before if result.update_successful else before / 2)
        assert (result.grad_norm is not None) == result.update_successful
        steps.append((result.update_successful, before := scale))
    assert {updated for updated, _ in steps} == {True, False}
    assert on_all_ranks(steps) == [steps] * dist.get_world_size()
    one, other = (
        train_step(
            packed_objective, args, model, iterators, counts, optimizer_of(scale, lr=0.0)
        ).grad_norm
        for scale in (8.0, 64.0)
    )
    # Each step is scaled by its own optimizer; 1 %: float16 has 11 bits.
    assert one == pytest.approx(other, rel=0.01)
