"""A data iterator over the framework's own ``rollout_data``.

The dict is read when a micro-batch is drawn, so that fields added after planning (log-probs,
advantages) are there without a collective. A placeholder gets a value for every requested key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import Schema, SchemaError, make_placeholder
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.rollout.data_iterator import DataIterator, PlannedRollout
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule


class LiveDataIterator(DataIterator):
    """A `DataIterator` over the framework's own ``rollout_data``, read on each draw.

    Args:
        rollout: the planned batch, shared by all stages' iterators.
        rollout_data: the framework's dict, kept and not copied.
        schema: the kind of every field that will be asked for.
    """

    def __init__(
        self, rollout: PlannedRollout, rollout_data: Mapping[str, Any], schema: Schema
    ) -> None:
        super().__init__(rollout)
        self._live = rollout_data
        self._schema = schema
        self._checked: set[tuple[str, ...]] = set()

    @property
    def schedule(self) -> MicroBatchSchedule:
        """The micro-batches of training."""
        return self._rollout.schedule

    @property
    def rollout_data(self) -> Any:
        """The framework's own dict."""
        return self._live

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: one value per sample, one fabricated for a placeholder.

        Args:
            keys: fields to return; None for those that the rollout data lacks.

        Raises:
            IndexError: all micro-batches have been drawn.
            SchemaError: on every rank, at the first micro-batch: a field is not declared, or does
                not have one value per sample.
        """
        return self.draw(keys)[1]

    def draw(self, keys: Sequence[str]) -> tuple[tuple[int, ...], dict[str, list[Any] | None]]:
        """The samples' indices, ``()`` for a placeholder, and what `get_next` returns."""
        keys = list(keys)
        micro_batches = self.schedule.micro_batches
        if self.offset >= len(micro_batches):
            raise IndexError(
                f"all {len(micro_batches)} micro-batches have been drawn; call reset() first"
            )
        indices = micro_batches[self.offset]
        live = {key: self._live[key] for key in keys if self._live.get(key) is not None}
        present = list(live)
        fabricated = {}
        # A placeholder is made once on every rank, needed or not: otherwise an undeclared field
        # would raise only on the rank that has a placeholder, and leave the others waiting.
        if not indices or tuple(present) not in self._checked:
            fabricated = self._fabricate(present)
            self._checked.add(tuple(present))
        self.offset += 1
        if not indices:
            return indices, {key: fabricated.get(key) for key in keys}
        drawn: dict[str, list[Any] | None] = dict.fromkeys(keys)
        for key, values in live.items():
            drawn[key] = [values[i] for i in indices]
        return indices, drawn

    def _fabricate(self, keys: list[str]) -> dict[str, list[Any]]:
        examples = {}
        for key in keys:
            values = self._live[key]
            if len(values) != self.schedule.num_samples:
                raise SchemaError(
                    key,
                    expected=f"{self.schedule.num_samples} values, one for each sample of the rank",
                    found=f"{len(values)}",
                )
            examples[key] = values if len(values) else self.schedule.template.get(key)
        made = make_placeholder(
            self._schema, keys, examples, pad_token_id=self.schedule.pad_token_id
        )
        return {key: [_to_device(value) for value in values] for key, values in made.items()}


def live_data_iterator(data_iterator: Any) -> LiveDataIterator:
    """The argument itself, checked.

    Raises:
        DynamicBatchArgumentError: the iterator is not from the hooked ``get_data_iterator``.
    """
    if not isinstance(data_iterator, LiveDataIterator):
        raise DynamicBatchArgumentError(
            "expected an iterator from the hooked get_data_iterator, got "
            f"{type(data_iterator).__name__}: call get_data_iterator after mcore_batching.hook"
        )
    return data_iterator


def _to_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.device(torch.cuda.current_device()), non_blocking=True)
