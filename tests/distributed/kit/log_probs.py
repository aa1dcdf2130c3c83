"""Where the gradient of log-probs goes, and that of a loss without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from kit.exactness import arguments, difference, no_optimizer
from kit.model import seeded_model
from kit.packing import pack
from kit.samples import VOCABULARY, make_samples, take
from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.megatron import (
    get_data_iterator,
    response_log_probs,
    response_log_probs_and_entropy,
    train_step,
)
from mcore_batching.planning import ParallelDims

FLOAT32 = 1e-6
"""Relative error of sums over 64 entries of 24 bits each."""


def memory_is_shared(dims: dict[str, Any]) -> None:
    """The gradient is written over logits that nobody else reads, and over no others; with another
    reader it is an error, not a wrong gradient."""
    chosen = [0, 1, 2, 4, 5, 9, 11]  # responses of none, one and all tokens among them
    row = pack(take(make_samples(), chosen), sample_indices=tuple(chosen))
    size = VOCABULARY // dims.get("tensor_parallel", 1)
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


def constants_fire_every_hook(dims: dict[str, Any]) -> None:
    """Gradients of all parameters, under a fused output layer too, of a loss without any."""
    shape = ParallelDims(**dims)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = seeded_model(shape, "dense", ddp)
    touched: set[str] = set()
    for name, parameter in model[0].named_parameters():
        parameter.register_hook(lambda grad, name=name: touched.add(name))

    def constant(logits: Any, row: PackedMicroBatch, totals: StepTotals) -> Any:
        return torch.zeros((), device=row.tokens.device), {}

    for fused in (False, True):
        touched.clear()
        args = arguments(shape, dynamic_batch_fuse_output_layer=fused)
        planned = get_data_iterator(args, model, make_samples())
        train_step(constant, args, model, *planned, no_optimizer())
        assert touched == {name for name, _ in model[0].named_parameters()}
