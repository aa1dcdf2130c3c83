"""Losses and gradients that are NaN or infinite, found on all ranks before the optimizer's step.

As Megatron's own check, gradients are looked at before ranks add theirs up, so that the rank can be
named. Where the reduction overlaps the backward pass that is too late: then all ranks that share
the parameters find it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import NonFiniteError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.planning.errors import shortened

_NAMED = 3
"""Micro-batches, or parameters, that a message names; of more it gives the number."""


def is_checked(options: Options, optimizer: Any) -> bool:
    """True if a step has to be finite, as in Megatron."""
    config = getattr(optimizer, "config", None)
    # Dynamic scaling finds its scale by infinite gradients, which its optimizer skips.
    scaled = getattr(config, "fp16", False) and not getattr(config, "loss_scale", None)
    return bool(options.check_for_nan_in_loss_and_grad) and not scaled


@contextlib.contextmanager
def gradients_measured(model: list[Any], largest: list[Tensor]) -> Iterator[None]:
    """Append the largest magnitude of each parameter's gradient: ``[parameters]``."""
    config = get_model_config(model[0])
    finalize: Callable[..., None] = config.finalize_model_grads_func
    wrappers = [chunk.ddp_config for chunk in model if hasattr(chunk, "ddp_config")]
    overlaps = any(wrapper.overlap_grad_reduce for wrapper in wrappers)

    def finalize_and_measure(*arguments: Any, **options: Any) -> None:
        # Buckets may be in the middle of their reduction: gradients are whole once it has ended.
        # Elsewhere before it, while the rank that made them is still known.
        if overlaps:
            finalize(*arguments, **options)
        gradients = [gradient for _, gradient in _gradients(model)]
        if gradients:
            # One kernel for all, and no copy to the host: the pipeline's end does not wait for it.
            norms = torch._foreach_norm(gradients, math.inf)
            largest.append(torch.stack([norm.float() for norm in norms]))
        if not overlaps:
            finalize(*arguments, **options)

    # For the step alone: the model's configuration outlives it, and others train it, too.
    with contextlib.ExitStack() as stack:
        replace = compat.replaced
        stack.enter_context(replace(config, "finalize_model_grads_func", finalize_and_measure))
        # Megatron's check raises on one rank inside the pipeline, where the others wait.
        for wrapper in wrappers:
            stack.enter_context(replace(wrapper, "check_for_nan_in_grad", False))
        yield


def faults(
    collected: Sequence[Mapping[str, Tensor]],
    largest: Sequence[Tensor],
    model: list[Any],
    prepared: PreparedStep,
) -> tuple[str, str]:
    """Losses and gradients of this rank that are not finite, in words; each "" if all is well."""
    loss, gradient = _loss_fault(collected, prepared), _gradient_fault(largest, model)
    fields = _fields_at_fault(prepared) if loss or gradient else ""
    return loss and loss + fields, gradient and gradient + fields


def _fields_at_fault(prepared: PreparedStep) -> str:
    """The fields of this rank's samples that are not finite, each with the samples: one that is so
    under a loss mask of 0 alone leaves the loss finite, but 0 times NaN is a gradient of NaN."""
    schedule, columns = prepared.schedule, prepared.schedule.rollout_data
    samples = sorted(i for row in schedule.steps[prepared.step] for i in row)
    texts, masks = [], columns.get("loss_masks")
    for name, values in columns.items():
        is_finite = {i: _is_finite(values[i]) for i in samples}
        bad = [i for i in samples if not is_finite[i].all()]
        is_masked = masks is not None and all(
            is_finite[i].shape[:1] == masks[i].shape
            and bool(is_finite[i].reshape(len(masks[i]), -1).all(1)[masks[i] != 0].all())
            for i in bad
        )
        if bad:
            where = ", where the loss mask is 0: set numbers there" if is_masked else ""
            texts.append(f"; {name} is not finite in {schedule.names_of(bad)}{where}")
    return "".join(texts[:_NAMED])


def _is_finite(value: Any) -> Tensor:
    """True for each entry that is a finite number, or none."""
    if isinstance(value, Tensor | float) and not getattr(value, "is_nested", False):
        return torch.as_tensor(value).isfinite()
    return torch.ones(1, dtype=torch.bool, device="cpu")


def raise_on_all(job: Job, operation: str, found: tuple[str, str]) -> None:
    """Raise on every rank what `faults` found on any. A collective over all ranks."""
    # Texts have their own agreement, since they cost a gather: this step is lost in any case.
    with job.agreement(f"{operation}, what is not finite") as agree:
        everyone = agree.every("what is not finite", found)
    losses = {rank: loss for rank, (loss, _) in everyone.by_rank.items() if loss}
    gradients = {rank: gradient for rank, (_, gradient) in everyone.by_rank.items() if gradient}
    # A loss that is not finite makes gradients so: they would add nothing.
    raise NonFiniteError(losses or gradients)


def _loss_fault(collected: Sequence[Mapping[str, Tensor]], prepared: PreparedStep) -> str:
    if not collected:
        return ""
    # One copy to the host for all micro-batches: each is a wait for the device.
    losses: list[float] = torch.stack([each["loss"].float() for each in collected]).tolist()
    schedule, rows = prepared.schedule, prepared.schedule.steps[prepared.step]
    texts = [
        f"the loss of micro-batch {slot} ({schedule.names_of(rows[slot])}) is {loss}"
        for slot, loss in enumerate(losses)
        if not math.isfinite(loss)
    ]
    return shortened(texts, _NAMED, "; ")


def _gradient_fault(largest: Sequence[Tensor], model: list[Any]) -> str:
    if not largest or bool(largest[0].isfinite().all()):
        return ""
    found = zip(_gradients(model), largest[0].tolist(), strict=True)
    not_finite = [(name, value) for (name, _), value in found if not math.isfinite(value)]
    texts = [f"the gradient of {name} is {value}" for name, value in not_finite]
    return shortened(texts, _NAMED, "; ")


def _gradients(model: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and gradient of each parameter of this rank that has one."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            # Megatron's buffer where the model is wrapped; `grad` is then empty.
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                yield name, gradient
