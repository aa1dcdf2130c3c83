"""Linear layers whose backward pass leaves its weight's gradient for later.

Megatron's autograd function can leave the gradient of the output layer's weight to a buffer. Here
it is told so of every layer: the gradient for the inputs stays Megatron's. Transformer Engine's
modules have a store that they give their weight's gradient to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor

from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients

MEGATRONS = layers.LinearWithGradAccumulationAndAsyncCommunication
"""The autograd function of Megatron's linear layers."""


def leaving_weights(
    backward: Callable[..., Any], deferred: WeightGradients, kept: Collection[Tensor]
) -> Callable[..., Any]:
    """``MEGATRONS.backward`` that leaves gradients in split passes, but for weights ``kept``."""
    whole = {id(weight) for weight in kept}

    @functools.wraps(backward)
    def without_weight(ctx: Any, grad_output: Tensor) -> Any:
        # Unpacked once: hooks that keep saved tensors elsewhere bring them back but once.
        inputs, weight = saved = ctx.saved_tensors
        is_counted = hasattr(weight, "grad_added_to_main_grad")
        if not (deferred.splits_now and is_counted and weight.requires_grad) or id(weight) in whole:
            # A split pass has marked the weight as one whose gradient needs no adding up.
            if is_counted and not ctx.gradient_accumulation_fusion:
                weight.grad_added_to_main_grad = False
            return backward(_Context(ctx, saved_tensors=saved), grad_output)
        buffer: list[Tensor] = []
        gradients = backward(
            _Context(
                ctx,
                saved_tensors=saved,
                grad_output_buffer=buffer,
                wgrad_deferral_limit=0,  # no limit
                # With fusion it returns a placeholder for the weight, which the wrapper drops.
                gradient_accumulation_fusion=True,
                main_grad=weight.main_grad,
            ),
            grad_output,
        )
        (grad_output,) = buffer  # in the type in which it is multiplied
        group = ctx.tp_group if ctx.sequence_parallel else None
        is_fused = ctx.gradient_accumulation_fusion

        def add() -> None:
            add_weight_gradient(weight, inputs, grad_output, group, is_fused=is_fused)

        deferred.put(weight, (inputs, grad_output), add)
        return gradients

    return without_weight


class _Context:
    """An autograd context of which some attributes are others."""

    def __init__(self, ctx: Any, **others: Any) -> None:
        self.__dict__.update(others, _ctx=ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def add_weight_gradient(
    weight: Any, inputs: Tensor, grad_output: Tensor, group: Any, *, is_fused: bool
) -> None:
    """Add a weight's gradient to its ``main_grad``, as Megatron's backward pass does.

    Args:
        weight: ``[out, in]``.
        inputs: ``[tokens of this rank, 1, in]``.
        grad_output: ``[tokens, 1, out]``.
        group: ranks with the other tokens under sequence parallelism; None: the inputs are whole.
        is_fused: by the kernel that multiplies and adds at once.
    """
    if group is not None:
        # The buffer in which Megatron gathers inputs, too: whoever fills it reads it at once.
        shape = [inputs.shape[0] * group.size(), *inputs.shape[1:]]
        whole = layers.get_global_memory_buffer().get_tensor(shape, inputs.dtype, "mpu")
        layers.dist_all_gather_func(whole, inputs, group=group)
        inputs = whole
    rows, columns = prepare_input_tensors_for_wgrad_compute(grad_output, inputs)
    if not is_fused:
        weight.main_grad.add_(rows.t().matmul(columns))
    elif weight.main_grad.dtype == torch.float32:
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(columns, rows, weight.main_grad)
    else:
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(columns, rows, weight.main_grad)


class EngineStore:
    """In place of the ``wgrad_store`` of one of Transformer Engine's linear modules."""

    def __init__(self, module: Any, deferred: WeightGradients) -> None:
        self._weight, self._deferred = module.weight, deferred

    def delay_wgrad_compute(self) -> bool:
        """True if the module is to give its weight's gradient to `put`."""
        present = self._deferred.present
        # Newer versions ask in the forward pass, too, and give none later if it is False.
        if present is None or present.kind == "F":
            return True
        # The gradient of the first micro-batch may be written, not added: nothing may come before.
        return self._deferred.splits_now and present.slot > 0

    def put(self, tensors: Sequence[Any], add: Callable[..., Any]) -> None:
        """Leave a gradient for later, which ``add(*tensors)`` adds to ``main_grad``."""
        self._deferred.put(self._weight, tensors, lambda: add(*tensors))
