"""Losses averaged over their own micro-batch, told from what autograd keeps of them.

The denominator of a share is the step's (`mcore_batching.batch.loss`). A loss function that never
reads the step's totals may divide by a constant of its own, which is right, or by what each
micro-batch happens to hold, which makes its loss some times too large. Which of the two, the graph
between the share and its first sum says: nothing is computed again, and what it does not say for
sure is let pass.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch, StepTotals, step_totals

_SUMS = ("SumBackward", "MeanBackward")
_PRODUCTS = ("MulBackward", "DivBackward")
_SPLITS = ("AddBackward", "SubBackward")
_KNOWN = (
    *_SUMS,
    *_PRODUCTS,
    *_SPLITS,
    "AliasBackward",
    "CloneBackward",
    "NegBackward",
    "SqueezeBackward",
    "ToCopyBackward",
    "UnsqueezeBackward",
    "ViewBackward",
)
"""Operations of one value, by name in the graph, that leave it what it is up to constants."""

_Constants: TypeAlias = tuple[tuple[Any, int], ...]
"""Constants and the powers with which they multiply."""


class WatchedTotals(StepTotals):
    """A step's totals that know whether anybody has read them."""

    def __getattribute__(self, name: str) -> Any:
        """Any attribute; one of the totals counts as read."""
        if name in StepTotals.__dataclass_fields__:
            object.__setattr__(self, "were_read", True)
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        """As `StepTotals`, which these are."""
        return isinstance(other, StepTotals) and (
            dataclasses.asdict(self) == dataclasses.asdict(other)
        )

    __hash__ = StepTotals.__hash__


@dataclasses.dataclass(frozen=True)
class _Part:
    """A term of a share: a sum over so many values, times constants."""

    constants: _Constants
    num_values: int

    def factor(self) -> float:
        return math.prod(float(value) ** power for value, power in self.constants)


class LocalMeans:
    """The shares of a step, and whether a term of theirs is a mean over its micro-batch.

    Args:
        totals: of the step.

    Attributes:
        totals: the same, to be given to the loss function.
    """

    def __init__(self, totals: StepTotals) -> None:
        self.totals = WatchedTotals(**dataclasses.asdict(totals))
        self._shares: list[tuple[PackedMicroBatch, list[_Part]]] = []

    def saw(self, share: Tensor, row: PackedMicroBatch) -> None:
        """Note the share of a micro-batch, before its backward pass."""
        if not hasattr(self.totals, "were_read") and not row.is_placeholder:
            self._shares.append((row, _parts(share.grad_fn, ())))

    def warn(self) -> None:
        """Warn of a loss that is no sum of shares, once the pipeline has run."""
        if hasattr(self.totals, "were_read") or not self._is_mean():
            return
        warnings.warn(
            "the loss function never reads the step's totals, and divides by the tokens or samples "
            "of each micro-batch: its values add up to a loss that grows with the number of "
            "micro-batches. Return a share of the step's mean: token_mean(values, micro_batch, "
            "totals), sample_mean(...), or a sum divided by totals.token_weight",
            stacklevel=3,
        )

    def _is_mean(self) -> bool:
        seen = [(row, step_totals([row]), parts) for row, parts in self._shares]
        seen = [each for each in seen if each[1].num_tokens]
        # One sample's own mean may well be divided by a constant: that is a mean over samples.
        if not any(held.num_trained_samples > 1 for _, held, _ in seen):
            return False
        if len({len(parts) for _, _, parts in seen}) > 1:
            return False
        rows, held, parts = zip(*seen, strict=True)
        return any(_is_mean(rows, held, term) for term in zip(*parts, strict=True))


def _is_mean(
    rows: Sequence[PackedMicroBatch], held: Sequence[StepTotals], term: Sequence[_Part]
) -> bool:
    """True if a term sums over whole rows, and is divided by how much each of them holds."""
    for each, part in zip(held, term, strict=True):
        if part.num_values < each.num_tokens and part.num_values != each.num_samples:
            return False
    factors = [part.factor() for part in term]
    return any(
        _are_inverse(factors, counts)
        for counts in (
            [part.num_values for part in term],
            [each.num_tokens for each in held],
            [_weight_as_given(row) for row in rows],
        )
    )


def _weight_as_given(row: PackedMicroBatch) -> float:
    """Of all response tokens, also of those that nothing predicts."""
    masks = row.fields.get("loss_masks", ())
    return sum(float(torch.as_tensor(mask).sum()) for mask in masks)


def _are_inverse(factors: list[float], held: Sequence[float]) -> bool:
    products = [factor * count for factor, count in zip(factors, held, strict=True)]
    alike = all(math.isclose(each, products[0], rel_tol=1e-4) for each in products)
    return alike and products[0] != 0 and max(held) > min(held)


def _parts(node: Any, constants: _Constants) -> list[_Part]:
    """The terms of a value, each down to what the graph does not say."""
    num_values = 1
    while node is not None:
        name = type(node).__name__.removesuffix("0").removesuffix("1")
        graph = [child for child, _ in node.next_functions if child is not None]
        if name in _SPLITS and len(graph) == 2 and num_values == 1:
            return [part for child in graph for part in _parts(child, constants)]
        if len(graph) != 1 or name not in _KNOWN:
            break
        try:
            if name in _SUMS:
                sizes = node._saved_self_sym_sizes
                dims = getattr(node, "_saved_dim", ()) or range(len(sizes))
                # Counted from the last, a dimension is kept as an unsigned number.
                summed = math.prod(sizes[(dim + 2**63) % 2**64 - 2**63] for dim in dims)
                constants += ((summed, -1),) if name == "MeanBackward" else ()
                num_values = math.prod(sizes) if num_values == 1 else num_values
            elif name in _PRODUCTS:
                constant = node._saved_self if node._saved_other is None else node._saved_other
                if constant.numel() == 1:
                    constants += ((constant, -1 if name == "DivBackward" else 1),)
                elif num_values == 1:
                    break
        except (AttributeError, RuntimeError):  # a constant over the value; one changed since
            break
        (node,) = graph
    return [_Part(constants, num_values)]
