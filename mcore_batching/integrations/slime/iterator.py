"""An iterator over the framework's own ``rollout_data``, with placeholders.

A micro-batch without samples becomes a sample of one token with an empty response, which the
framework packs and runs like any other: its loss is 0 and stays attached to the graph, and its mask
adds 0 to token counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import Kind, Schema, SchemaError, make_placeholder
from mcore_batching.integrations.slime.zero_count_mask import zero_count_mask


class PlaceholderLengths(list[int]):
    """Total lengths of a placeholder; ``get_batch`` passes the object on, so it is recognized."""


class PlaceholderIterator:
    """An iterator over rollout data, with a fabricated sample where a micro-batch has none.

    All other attributes are those of ``own``, the iterator inside. ``template`` has the values of
    one sample, for ranks without any; None: no such rank.
    """

    def __init__(
        self, own: Any, schema: Schema, template: Mapping[str, list[Any]] | None = None
    ) -> None:
        self.own = own
        # `partition` holds positions of samples, so identifiers. Top-p tokens are metadata (several
        # per token) but must be an empty tensor for an empty response, not None.
        self._schema = schema.declare("partition", Kind.METADATA).declare(
            "rollout_top_p_token_ids", Kind.PER_RESPONSE_TOKEN
        )
        self._template = template or {}
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
        made = make_placeholder(self._schema, keys, data if count else self._template)
        if not count:  # no sample shows where values are
            device = torch.device(torch.cuda.current_device())
            for values in made.values():
                values[:] = [
                    each.to(device, non_blocking=True) if isinstance(each, Tensor) else each
                    for each in values
                ]
        # Two marks: forward_only knows a placeholder by its lengths, a loss's mask counts none.
        if "total_lengths" in made:
            made["total_lengths"] = PlaceholderLengths(made["total_lengths"])
        if "loss_masks" in made:
            made["loss_masks"] = list(map(zero_count_mask, made["loss_masks"]))
        return made
