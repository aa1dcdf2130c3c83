"""An iterator over the framework's own ``rollout_data``, with placeholders.

A micro-batch without samples becomes a sample of one token with an empty response, which the
framework packs and runs like any other: its loss is 0 and stays attached to the graph. Frameworks'
loss functions clamp a sample's token count to 1, against a division by 0, and then sum these counts
for a token mean. The clamp would count a placeholder as one token; its mask adds 0:

    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    count = torch.clamp_min(mask.sum(), 1)
    0 + count         # 0: a placeholder adds nothing to a sum of counts
    numerator / count # the numerator, as if the count were 1

All other operations on the mask and its sum behave as on a plain empty mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import Kind, Schema, SchemaError, make_placeholder


class PlaceholderLengths(list[int]):
    """Total lengths of a placeholder; ``get_batch`` passes the object on, so it is recognized."""


class PlaceholderIterator:
    """An iterator over rollout data, with a fabricated sample where a micro-batch has none.

    All other attributes are those of ``own``, the iterator inside.
    """

    def __init__(self, own: Any, schema: Schema) -> None:
        self.own = own
        # `partition` holds positions of samples, so identifiers. Top-p tokens are metadata (several
        # per token) but must be an empty tensor for an empty response, not None.
        self._schema = schema.declare("partition", Kind.METADATA).declare(
            "rollout_top_p_token_ids", Kind.PER_RESPONSE_TOKEN
        )
        self._micro_batches = own.micro_batch_indices
        self._checked: set[tuple[str, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def reset(self) -> PlaceholderIterator:
        """Go back to the first micro-batch."""
        self.own.reset()
        return self

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: one value per sample, None for fields that the data lack.

        A `SchemaError` on every rank, at the first micro-batch, if a field is not declared, or does
        not have one value per sample.
        """
        if self.own.offset >= len(self._micro_batches):
            count = len(self._micro_batches)
            raise IndexError(f"all {count} micro-batches have been drawn: call reset() first")
        # Read anew each time: log-probs and advantages are added between the passes, and are there
        # without a collective.
        data = self.own.rollout_data
        present = tuple(key for key in keys if data.get(key) is not None)
        has_samples = bool(self._micro_batches[self.own.offset])
        # A placeholder is made once on every rank, needed or not: otherwise an undeclared field
        # would raise only on the rank that has a placeholder, and leave the others waiting.
        fabricated = {}
        if not has_samples or present not in self._checked:
            fabricated = self._fabricated(present)
            self._checked.add(present)
        if has_samples:
            drawn: dict[str, list[Any] | None] = self.own.get_next(keys)
            return drawn
        self.own.offset += 1
        return dict.fromkeys(keys) | fabricated

    def _fabricated(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        data = self.own.rollout_data
        count = len(data["tokens"])
        for key in keys:
            if len(data[key]) != count:
                raise SchemaError(
                    key,
                    expected=f"{count} values, one for each sample of the rank",
                    found=f"{len(data[key])}",
                )
        made = make_placeholder(self._schema, keys, data)
        if not count:  # no sample shows where values are
            device = torch.device(torch.cuda.current_device())
            for values in made.values():
                values[:] = [
                    each.to(device, non_blocking=True) if isinstance(each, Tensor) else each
                    for each in values
                ]
        # Two marks: forward_only finds a placeholder by its lengths, a loss's mask counts none.
        if "total_lengths" in made:
            made["total_lengths"] = PlaceholderLengths(made["total_lengths"])
        if "loss_masks" in made:
            made["loss_masks"] = list(map(zero_count_mask, made["loss_masks"]))
        return made


_SUMS = (Tensor.sum, torch.sum)
_CLAMPS = (torch.clamp_min, torch.clamp, Tensor.clamp_min, Tensor.clamp)
_DIVISIONS = (Tensor.div, Tensor.true_divide, torch.div, torch.true_divide)


def zero_count_mask(mask: Tensor) -> Tensor:
    """The ``[0]`` mask of an empty response, with a sum that stays 0 when clamped to 1."""
    if mask.numel():
        raise SchemaError(
            "loss_masks",
            expected="the empty mask of a placeholder",
            found=f"one of shape {list(mask.shape)}",
        )
    return mask.as_subclass(_ZeroCount)


class _ZeroCount(Tensor):
    """An empty mask, or its sum: a 0 that a clamp leaves unchanged, and that divides like 1."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A mask has one dimension, its sum none.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CLAMPS and isinstance(args[0], cls) and not args[0].dim():
                return args[0]
            if func in _DIVISIONS and isinstance(args[1], cls) and not args[1].dim():
                args = (args[0], 1)
            result = func(*args, **(kwargs or {}))
        # Of the sum a further sum is plain: it is what other samples' counts were added to.
        is_sum = func in _SUMS and isinstance(args[0], cls) and args[0].dim() and not result.dim()
        return result.as_subclass(cls) if is_sum else result
