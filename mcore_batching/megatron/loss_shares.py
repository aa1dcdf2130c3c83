"""A loss function's shares of the loss and of metrics: checked, attached, agreed on, added up."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mcore_batching.batch import StepTotals
from mcore_batching.megatron.job import Job, raise_first
from mcore_batching.megatron.nonfinite import raise_on_all
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.megatron.serialize import has_bytes


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
    """Refuse a detached share of the loss in a micro-batch with trainable tokens.

    Nothing would be trained, and the optimizer's momentum would still move the weights. A constant
    0 is no mistake: it is the share of what a loss function leaves out.

    Args:
        share: as the loss function returned it.
        owned_num_tokens: trainable tokens that this rank predicts.
        tensors: what the loss function was given.
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
    edge, goal = get_gradient_edge(value), get_gradient_edge(on)
    wanted = (goal.node, goal.output_nr)
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
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
    if any(0 < tokens < step for tokens in prepared.rows.owned_num_tokens):
        warnings.warn(
            "the loss function never reads the step's totals: a mean over its own micro-batch is "
            "too large by their number; return token_mean(values, micro_batch, totals), "
            "sample_mean(...), or a sum divided by totals.token_weight",
            stacklevel=4,  # the line that calls train_step
        )


def agreed_shares(
    job: Job,
    operation: str,
    collected: CollectedShares,
    faults: Callable[[], tuple[str, str]],
) -> tuple[list[str], bool]:
    """Agree on metrics' names and temperatures, and on what is not finite.

    A collective over all ranks, which raises where the loss function did, where names differ, and
    for faults that any rank does not skip. ``faults`` gives this rank's `nonfinite.faults`.

    Returns:
        the metrics' names, on ranks of the last stage; True if all ranks are without faults.
    """
    shares = collected.shares
    with job.agreement_after_pipeline(operation) as agree:
        raise_first(collected.failed)
        for each in shares:
            if set(each) != set(shares[0]):
                raise ValueError(
                    f"the loss function returned {sorted(each)} for one micro-batch, "
                    f"{sorted(shares[0])} for another; return the same names for all"
                )
        names = list(shares[0]) if shares else []
        if shares:  # stages without a loss have no names to compare
            agree.same("names of metrics", sorted(names))
        agree.same("temperature", sorted(collected.temperatures), within="stage")
        found = faults()
        # Reduced, not compared: a value that differs costs a gather.
        any_fault = agree.max("faults", int(any(found)))
        any_refusal = agree.max("refusals", int(job.options.on_nonfinite != "skip"))
    # If any rank refuses, all raise: those that would skip the step could not go on without it.
    if any_fault.value and any_refusal.value:
        raise_on_all(job, operation, found)
    return names, not any_fault.value


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
