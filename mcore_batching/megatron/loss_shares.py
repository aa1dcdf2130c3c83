"""A loss function's shares of the loss and of metrics: checked, attached, agreed on, added up; and
losses and gradients that are NaN or infinite, found on all ranks before the optimizer's step.

As Megatron's own check, gradients are looked at before ranks add theirs up, so that the rank can be
named. Where the reduction overlaps the backward pass that is too late: then all ranks that share
the parameters find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mcore_batching.batch import StepTotals
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import NonFiniteError
from mcore_batching.megatron.exchange import has_bytes
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.planning.errors import shortened

_NAMED = 3
"""Micro-batches, or parameters, that a message names; of more it gives the number."""


def checked_shares(made: Any, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss function's result as scalars: share of the loss, shares of metrics by name."""
    if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[1], Mapping)):
        kind = type(made).__name__
        raise TypeError(
            f"the loss function must return (loss, dict of metrics), got {kind}; both are shares "
            "of the step's"
        )
    share = _scalar("the loss", made[0], device)
    if not share.is_floating_point():
        # Its backward pass would be left out, and the stages before would wait for a gradient.
        raise TypeError(
            f"the loss must be of a floating-point type, got {share.dtype}; return "
            "logits.new_zeros(()) where there is none, not torch.tensor(0)"
        )
    metrics = {}
    for name, value in made[1].items():
        if not isinstance(name, str):
            raise TypeError(f"the loss function returned the key {name!r}; name metrics by texts")
        metrics[name] = _scalar(f"metric {name!r}", value, device)
    return share, metrics


def _scalar(name: str, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a tensor of one value, got {type(value).__name__}; return shares as "
            "tensors, the loss attached to the graph"
        )
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a tensor of one value, got shape {list(value.shape)}; return "
            "token_mean(...), or a sum over the step's totals"
        )
    if value.is_complex() or not has_bytes(value):
        raise TypeError(
            f"{name} must be a dense tensor of a real number, got {type(value).__name__} of "
            f"{value.dtype}, {value.layout}, {value.device}"
        )
    return (value.reshape(()) if value.dim() else value).to(device)


def attached(share: Tensor, *tensors: Tensor) -> Tensor:
    """``share``, with a gradient of 0 by each of the tensors that it does not depend on.

    So that every gradient hook fires even where the share is a constant. Where it is not, nothing
    is added: a zero gradient of the logits takes as much memory as they do.
    """
    made = share
    for tensor in tensors:
        if tensor.requires_grad and not _depends(share, tensor):
            # An empty sum: 0 times an infinite entry would be NaN.
            made = made + tensor.reshape(-1)[:0].sum().to(share.dtype)
    return made


def check_trains(share: Tensor, owned_num_tokens: int, *tensors: Tensor) -> None:
    """Refuse a detached share of the loss in a micro-batch of which this rank predicts trainable
    tokens; the loss function was given the tensors.

    Nothing would be trained, and the optimizer's momentum would still move the weights. A constant
    0 is no mistake: it is the share of what a loss function leaves out.
    """
    if share.requires_grad or not owned_num_tokens:
        return
    # Without gradients there is nothing to train on this stage, and nothing to be attached to. The
    # comparison waits for the device, for constants alone.
    if any(tensor.requires_grad for tensor in tensors) and bool(share != 0):
        raise ValueError(
            "the loss is detached from the logits, so it would train nothing: return it without "
            "detach() or item(), and compute it outside of torch.no_grad()"
        )


def _depends(value: Tensor, on: Tensor) -> bool:
    """True if backward from ``value`` comes to ``on``, by a walk over the graph between them."""
    if not value.requires_grad:
        return False
    wanted = _edge(on)
    waiting: list[tuple[Any, int]] = [_edge(value)]
    seen = set()
    # A stack of its own: a loss over many samples has a graph deeper than Python may recurse.
    while waiting:
        found = waiting.pop()
        if found == wanted:
            return True
        node = found[0]
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(node.next_functions)
    return False


def _edge(tensor: Tensor) -> tuple[Any, int]:
    # The node of a leaf, which has no `grad_fn`, takes ten times as long to find.
    node = tensor.grad_fn
    return (get_gradient_edge(tensor).node if node is None else node), tensor.output_nr


@dataclasses.dataclass(frozen=True)
class CollectedShares:
    """Results and doings of a loss function in a step on this rank, empty on other stages."""

    shares: Sequence[Mapping[str, Tensor]]  # of each micro-batch by name, ``loss`` among them
    failed: Sequence[Exception]
    temperatures: Collection[float]  # at which it computed log-probs
    read_totals: bool


class WatchedTotals(StepTotals):
    """A step's totals that note whether a loss function has read them."""

    were_read = False

    def __getattribute__(self, name: str) -> Any:
        """Any attribute; one of the totals counts as read."""
        if name in StepTotals.__dataclass_fields__:
            # Past the check of a frozen dataclass: it is no total that changes.
            object.__setattr__(self, "were_read", True)
        return super().__getattribute__(name)


def warn_of_unread_totals(collected: CollectedShares, prepared: PreparedStep) -> None:
    """Warn of a loss function that lacks the step's totals, where that matters."""
    # No error: it may be a sum over a constant of the whole step.
    step = prepared.totals.num_tokens
    # A micro-batch that holds the whole step has the step's own mean.
    if not collected.shares or collected.read_totals or collected.failed:
        return
    if any(0 < tokens < step for tokens in prepared.owned_num_tokens):
        warnings.warn(
            "the loss function never reads the step's totals: a mean over its own micro-batch is "
            "too large by their number; return token_mean(values, micro_batch, totals), "
            "sample_mean(...), or a sum divided by totals.token_weight",
            stacklevel=3,  # the line that calls train_step
        )


def agreed_shares(
    job: Job, collected: CollectedShares, prepared: PreparedStep, gradients: Gradients | None
) -> tuple[list[str], bool]:
    """Agree on metrics' names and temperatures, and on what is not finite, unless `gradients` is
    None.

    A collective over all ranks, which raises where the loss function did, where names differ, and
    for what is not finite if any rank does not skip such steps.

    Returns:
        the metrics' names, on ranks of the last stage; True if all that was looked at is finite.
    """
    shares = collected.shares
    with job.agreement_after_pipeline("train_step", collected.failed) as agree:
        names = same_names("the loss function", shares, ValueError)
        if shares:  # stages without a loss have no names to compare
            agree.same("names of metrics", sorted(names))
        agree.same("temperature", sorted(collected.temperatures), within="stage")
        found = ["", ""]
        if gradients is not None:
            found = [_loss_fault(shares, prepared), gradients.fault()]
            fields = _fields_at_fault(prepared) if any(found) else ""
            found = [text and text + fields for text in found]
        # Reduced, not compared: a value that differs costs a gather.
        any_fault = agree.max("faults", int(any(found)))
        any_refusal = agree.max("refusals", int(job.options.on_nonfinite != "skip"))
    # If any rank refuses, all raise: those that would skip the step could not go on without it.
    if any_fault.value and any_refusal.value:
        # Texts have their own agreement, since they cost a gather: this step is lost in any case.
        with job.agreement("train_step, what is not finite") as agree:
            everyone = agree.every("what is not finite", found)
        by_rank = everyone.by_rank.items()
        losses = {rank: loss for rank, (loss, _) in by_rank if loss}
        # A loss that is not finite makes gradients so: they would add nothing.
        raise NonFiniteError(
            losses or {rank: gradient for rank, (_, gradient) in by_rank if gradient}
        )
    return names, not any_fault.value


def same_names(what: str, made: Sequence[Mapping[str, Any]], error: type[Exception]) -> list[str]:
    """The names that a function returned for each micro-batch on this rank; [] if it ran for none.
    Raises an `error` if they differ."""
    for each in made:
        if set(each) != set(made[0]):
            raise error(
                f"{what} returned {sorted(each)} for one micro-batch, {sorted(made[0])} for "
                "another; return the same names for all"
            )
    return list(made[0]) if made else []


def summed_over_ranks(
    collected: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Tensors of all micro-batches by name, added up over them and over the last stage's ranks.

    A collective over these; ``names`` are the same on every rank, in any order.
    """
    # Ranks may return them in different orders, and the reduction adds up by place.
    order = sorted(names)
    # In double precision: the sum should not depend on the packing.
    sums = [torch.stack([each[name].double() for each in collected]).sum(0) for name in order]
    flat = torch.cat([each.flatten() for each in sums])
    # Context-parallel ranks hold shares of their parts of the rows.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(flat, group=group)
    parts = torch.split(flat, [each.numel() for each in sums])
    total = {n: part.view_as(own) for n, part, own in zip(order, parts, sums, strict=True)}
    return {name: total[name] for name in names}


class Gradients:
    """The largest magnitude of each parameter's gradient in a step, measured before it is reduced.

    Args:
        model: this rank's model chunks.
    """

    def __init__(self, model: list[Any]) -> None:
        self._model = model
        self._largest: Tensor | None = None  # [parameters]

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        """Name and gradient of each parameter of this rank that has one."""
        for chunk in self._model:
            for name, parameter in chunk.named_parameters():
                # Megatron's buffer where the model is wrapped; `grad` is then empty.
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is not None:
                    yield name, gradient

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure those of the step that runs inside."""
        config = get_model_config(self._model[0])
        finalize: Callable[..., None] = config.finalize_model_grads_func
        wrappers = [chunk.ddp_config for chunk in self._model if hasattr(chunk, "ddp_config")]
        overlaps = any(wrapper.overlap_grad_reduce for wrapper in wrappers)

        def finalize_and_measure(*arguments: Any, **options: Any) -> None:
            # Buckets may be in the middle of their reduction: gradients are whole once it has
            # ended. Elsewhere before it, while the rank that made them is still known.
            if overlaps:
                finalize(*arguments, **options)
            if gradients := [gradient for _, gradient in self._each()]:
                # One kernel for all, and no copy to the host: the pipeline's end does not wait.
                norms = torch._foreach_norm(gradients, math.inf)
                self._largest = torch.stack([norm.float() for norm in norms])
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

    def fault(self) -> str:
        """Those that are not finite, in words; "" if all are."""
        if self._largest is None or bool(self._largest.isfinite().all()):
            return ""
        found = zip(self._each(), self._largest.tolist(), strict=True)
        texts = [
            f"the gradient of {name} is {value}"
            for (name, _), value in found
            if not math.isfinite(value)
        ]
        return shortened(texts, _NAMED, "; ")


def is_checked(options: Options, optimizer: Any) -> bool:
    """True if a step has to be finite, as in Megatron."""
    config = getattr(optimizer, "config", None)
    # Dynamic scaling finds its scale by infinite gradients, which its optimizer skips.
    scaled = getattr(config, "fp16", False) and not getattr(config, "loss_scale", None)
    return bool(options.check_for_nan_in_loss_and_grad) and not scaled


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
