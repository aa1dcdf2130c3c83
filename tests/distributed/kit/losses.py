"""Jobs about losses: not finite, in float16, constant, averaged; where gradients are written."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batch_cases import pack
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from kit.calls import Calls, equal, my_samples, on_all_ranks
from kit.model import ADAM, adam, arguments, named_parameters, no_optimizer, small_model
from kit.objective import difference, packed_objective
from kit.samples import VOCABULARY, make_samples, take
from mcore_batching.megatron import (
    NonFiniteError,
    get_data_iterator,
    response_log_probs,
    response_log_probs_and_entropy,
    train_step,
)
from mcore_batching.planning import ParallelDims

FLOAT32 = 1e-6
"""Relative error of sums over 64 entries of 24 bits each."""


def nonfinite_loss(dims: ParallelDims, fault: str, overlap: bool) -> None:
    """Where a loss or gradient of one rank is not finite, a step raises on all ranks or, where that
    is set, is skipped on all.

    Also where Megatron's wrapper would raise on one rank, and leave the others waiting.
    """
    # As ``megatron.training`` sets it by default: raises on one rank inside the pipeline.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, check_for_nan_in_grad=True, overlap_grad_reduce=overlap
    )
    model = small_model(dims, "dense", ddp)
    before = [p.detach().clone() for _, p in named_parameters(model)]
    optimizer = adam(model, distributed=False)

    def step(fault: str = "", **flags: Any) -> Any:
        """Changed in the second micro-batch of the last rank but one."""
        args, slots = arguments(dims, **flags), iter(range(1000))
        samples = my_samples(dims)
        if fault == "field" and parallel_state.get_data_parallel_rank() == 0:
            first = int((samples["loss_masks"][2] == 0).nonzero()[0])
            samples["advantages"][2][first] = math.nan

        def loss(logits: Tensor, row: Any, totals: Any) -> Any:
            share, metrics = packed_objective(logits, row, totals)
            if next(slots) == 1 and dist.get_rank() == dist.get_world_size() - 2:
                first = logits[0, 0, 0].float()
                infinite = (first - first.detach()).sqrt()  # 0, with a gradient of 1 / 0
                share = {"loss": share * math.nan, "gradient": share + infinite}.get(fault, share)
            # A metric of this name does not stand for the step's own loss.
            return share, metrics | {"loss": share.new_zeros(())}

        planned = get_data_iterator(args, model, samples)
        return train_step(loss, args, model, *planned, optimizer)

    skipped = step(fault, dynamic_batch_on_nonfinite="skip")
    assert (skipped.update_successful, skipped.grad_norm) == (False, None)
    assert not any(p.main_grad.any() for _, p in named_parameters(model))
    with pytest.raises(NonFiniteError) as raised:
        step(fault)
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
    done = step()
    assert done.update_successful
    assert 0 < done.grad_norm < math.inf


def loss_scaling(dims: ParallelDims) -> None:
    """Steps in float16 past its range are skipped, as Megatron means it, until the scaler has come
    down. Norms of the same gradients are the same under optimizers of other scales."""
    settings = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    model = small_model(dims, **settings)
    args = arguments(dims)
    planned = get_data_iterator(args, model, my_samples(dims))

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

    optimizer, steps, before = optimizer_of(2.0**15), [], 2.0**15
    for _ in range(4):
        result = train_step(packed_objective, args, model, *planned, optimizer)
        scale = float(optimizer.get_loss_scale())
        assert scale == (before if result.update_successful else before / 2)
        assert (result.grad_norm is not None) == result.update_successful
        steps.append((result.update_successful, before := scale))
    assert {updated for updated, _ in steps} == {True, False}
    assert on_all_ranks(steps) == [steps] * dist.get_world_size()
    still = [optimizer_of(scale, lr=0.0) for scale in (8.0, 64.0)]
    one, other = (
        train_step(packed_objective, args, model, *planned, each).grad_norm for each in still
    )
    # Each step is scaled by its own optimizer; 1 %: float16 has 11 bits.
    assert one == pytest.approx(other, rel=0.01)


def memory_is_shared(dims: ParallelDims) -> None:
    """The gradient is written over logits that nobody else reads, and over no others; with another
    reader it is an error, not a wrong gradient."""
    chosen = [0, 1, 2, 4, 5, 9, 11]  # responses of none, one and all tokens among them
    row = pack(take(make_samples(), chosen))
    size = VOCABULARY // dims.tensor_parallel
    logits = 4 * torch.randn(1, row.tokens.numel(), size, device=row.tokens.device)

    def loss(given: Tensor, **options: Any) -> Tensor:
        return torch.cat(response_log_probs(given, row, **options)).square().sum()

    def gradient(calls: int, *, in_place: bool, as_leaf: bool = False, **options: Any) -> Tensor:
        leaf = logits.clone().requires_grad_()
        given = leaf if as_leaf else leaf * 1.0
        storage, seen = given.untyped_storage().data_ptr(), list[int]()
        given.register_hook(lambda grad: seen.append(grad.untyped_storage().data_ptr()))
        torch.stack([loss(given, **options) for _ in range(calls)]).sum().backward()
        assert (storage in seen) == in_place
        assert in_place or torch.equal(given.detach(), logits)
        assert leaf.grad is not None
        return leaf.grad / calls

    kept = gradient(1, in_place=False, overwrite_logits=False)
    assert kept.any()
    for found in (
        gradient(1, in_place=True),
        gradient(2, in_place=False),
        gradient(1, in_place=False, as_leaf=True),
    ):
        assert difference(found, kept) < FLOAT32
    # A model's own -inf: 0 times it would be NaN, which a mask of the caller's own hides.
    leaf = logits.clone()
    leaf[..., size // 2 :] = -torch.inf
    leaf.requires_grad_()
    found, entropy = response_log_probs_and_entropy(leaf, row)
    finite = [each.clamp(min=-100.0).sum() for each in (torch.cat(found), torch.cat(entropy))]
    torch.stack(finite).sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    given = logits.clone().requires_grad_() * 1.0
    squared = (given * given).sum()  # its backward pass reads the logits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss(given) + squared).backward()


def constants_fire_every_hook(dims: ParallelDims) -> None:
    """Gradients of all parameters, under a fused output layer too, of a loss without any."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = small_model(dims, "dense", ddp)
    touched: set[str] = set()
    for name, parameter in model[0].named_parameters():
        parameter.register_hook(lambda grad, name=name: touched.add(name))

    def constant(logits: Any, row: Any, totals: Any) -> Any:
        return torch.zeros((), device=row.tokens.device), {}

    for fused in (False, True):
        touched.clear()
        args = arguments(dims, dynamic_batch_fuse_output_layer=fused)
        planned = get_data_iterator(args, model, make_samples())
        train_step(constant, args, model, *planned, no_optimizer())
        assert touched == {name for name, _ in model[0].named_parameters()}


def averaged_loss_is_warned_of(dims: ParallelDims) -> None:
    """A mean over each micro-batch is some times too large; warned of on the rank with several."""
    calls = Calls(dims, "fewer")

    def mean(logits: Tensor, row: Any, totals: Any) -> Any:
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
