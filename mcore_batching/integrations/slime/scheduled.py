"""Placeholders for slime's and miles' own ``get_batch``, ``forward_only`` and losses.

Since slime's pull request 1926 and miles' 1927 the rollout manager plans, and the rollout data of a
rank come with the samples of each micro-batch. One without samples is a placeholder. Here it
becomes a sample of one token with an empty response, which the framework packs and runs like any
other: its loss is 0 and stays attached to the graph, its mask adds no token to a count, and
``forward_only`` leaves its outputs out. The framework's functions all stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.batch import Kind, Schema, make_placeholder
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.slime.zero_count_mask import zero_count_mask

LEADING = {
    "get_data_iterator": (("rollout_data",), ("args", "model", "rollout_data")),
    "forward_only": (("f", "args", "model", "data_iterator", "num_microbatches"),),
    "get_batch": (("data_iterator", "keys"),),
}
"""Parameters that slime's and miles' functions begin with."""


class _PlaceholderLengths(list[int]):
    """Total lengths of a placeholder's samples, which go through ``get_batch`` as they are."""


class PlaceholderIterator:
    """The framework's own iterator, with a fabricated sample where a micro-batch has none.

    Args:
        own: made by the framework.
        schema: the kind of every field that will be asked for.
    """

    def __init__(self, own: Any, schema: Schema) -> None:
        self._own = own
        # Positions identify samples. Top-p tokens of an empty response are none, though otherwise
        # there may be several per token.
        self._schema = schema.declare("partition", Kind.METADATA).declare(
            "rollout_top_p_token_ids", Kind.PER_RESPONSE_TOKEN
        )
        self._checked: set[tuple[str, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        """Attributes that the framework's iterator has beside."""
        return getattr(self._own, name)

    def reset(self) -> PlaceholderIterator:
        """Go back to the first micro-batch."""
        self._own.reset()
        return self

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: one value per sample, None for fields that the data lack.

        Raises:
            IndexError: all micro-batches have been drawn.
            SchemaError: a field is not declared. On every rank at its first micro-batch, not only
                on one that has a placeholder.
        """
        data = self._own.rollout_data
        present = tuple(key for key in keys if data.get(key) is not None)
        if self._own.micro_batch_indices[self._own.offset]:
            if present not in self._checked:
                make_placeholder(self._schema, present, data)
                self._checked.add(present)
            drawn: dict[str, list[Any] | None] = self._own.get_next(keys)
            return drawn
        self._own.offset += 1
        made: dict[str, Any] = dict.fromkeys(keys) | make_placeholder(self._schema, present, data)
        if "total_lengths" in present:
            made["total_lengths"] = _PlaceholderLengths(made["total_lengths"])
        if "loss_masks" in present:
            made["loss_masks"] = list(map(zero_count_mask, made["loss_masks"]))
        return made


def get_data_iterator(
    original: Callable[..., Any], *arguments: Any, schema: Schema, **keywords: Any
) -> Any:
    """The result of the framework's function, its iterators with placeholders.

    miles plans some data (of several modalities or adapters) in the trainer: those stay its own.

    Args:
        original: the framework's function.
        arguments: of `original`.
        schema: the kind of every field that will be asked for.
        keywords: of `original`.
    """
    made = original(*arguments, **keywords)
    iterators, *counts = made if isinstance(made, tuple) else (made,)
    with_placeholders = [
        PlaceholderIterator(each, schema) if "micro_batch_indices" in each.rollout_data else each
        for each in iterators
    ]
    return (with_placeholders, *counts) if counts else with_placeholders


def forward_only(
    original: Callable[..., Any], f: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    """The framework's forward pass, without what placeholders put out.

    Args:
        original: the framework's function.
        f: the function of the logits; gets ``total_lengths`` by keyword.
        arguments: of `original`.
        keywords: of `original`.
    """
    return original(_of_samples(f), *arguments, **keywords)


def _of_samples(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with empty lists for a placeholder."""

    @functools.wraps(f)
    def of_samples(*arguments: Any, **keywords: Any) -> Any:
        if "total_lengths" not in keywords:
            raise HookError(
                "forward_only calls its function without the keyword total_lengths, by which "
                "placeholders are told apart: this version of the framework is not known"
            )
        made = f(*arguments, **keywords)
        if not isinstance(keywords["total_lengths"], _PlaceholderLengths):
            return made
        *output, values = made if isinstance(made, tuple) else (made,)  # slime's has an output
        empty: dict[str, list[Any]] = {key: [] for key in values}
        return (*output, empty) if output else empty

    return of_samples
