"""One replica's rollout data: read, checked, and cut into optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_batching.batch import Schema, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import read_lengths
from mcore_batching.batch.values import require_vocabulary
from mcore_batching.planning import ConfigError, at_least
from mcore_batching.planning.integers import as_integer

REQUIRED_FIELDS = ("tokens", "total_lengths", "response_lengths")
_BATCH_SIZE = "dynamic_global_batch_size"
"""A key of rollout data, as slime names it: one number for the batch, no field of samples."""


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """The rollout data of one replica, read and checked."""

    data: Columns  # without samples perhaps as they were given
    template: dict[str, list[Any]]  # a fabricated sample; empty without samples to copy it from
    total_lengths: list[int]  # in tokens
    # Samples of a step over all ranks, None for all; of the caller's own steps what each counts as.
    global_batch_size: int | None
    steps: list[list[int]] | None  # the caller's own, of local sample indices
    vocabulary_size: int | None  # of the model; None: not known

    @classmethod
    def read(
        cls,
        rollout_data: dict[str, list[Any]] | None,
        global_batch_size: Any,
        schema: Schema,
        steps: Iterable[Iterable[int]] | None,
        vocabulary_size: int | None,
    ) -> RolloutBatch | None:
        """Read what the caller gave; None if this rank was given nothing.

        Raises:
            TypeError: it is no dict, or ``schema`` is no `Schema`.
            KeyError: a required field is missing.
            ConfigError: the global batch size is none, or ``steps`` are no lists of indices.
            ValueError: ``steps`` do not hold every sample once.
            SchemaError: as `resolved`, where there are samples.
        """
        if not isinstance(schema, Schema):
            raise TypeError(
                "schema must be a Schema, such as DEFAULT_SCHEMA.declare(name, kind), got "
                f"{type(schema).__name__}"
            )
        if rollout_data is None:
            return None
        if not isinstance(rollout_data, Mapping):
            raise TypeError(
                f"rollout_data must be a dict of lists or None, got {type(rollout_data).__name__}; "
                "give one value per sample"
            )
        # Steps of the caller's own need not be of the job's batch size.
        size = _read_batch_size(rollout_data, global_batch_size if steps is None else None)
        # None stands for a field that this rollout lacks.
        data = {k: v for k, v in rollout_data.items() if v is not None and k != _BATCH_SIZE}
        missing = [key for key in REQUIRED_FIELDS if key not in data]
        if missing:
            raise KeyError(
                f"rollout_data lacks {', '.join(missing)}; it needs {', '.join(REQUIRED_FIELDS)}, "
                "one value per sample (empty lists on a rank without samples)"
            )
        lengths, responses = read_lengths(data)
        listed = None if steps is None else _read_steps(steps, len(lengths))
        given = Columns(schema, data, lengths, responses)
        batch = cls(given, {}, lengths, size, listed, vocabulary_size)
        # A rank without samples receives the fields of one that has any.
        return batch.resolved() if lengths else batch

    def resolved(self) -> RolloutBatch:
        """The batch with its fields copied and checked, and with a template.

        Raises:
            SchemaError: a field's kind is unknown, a value does not fit it, or a token id is beyond
                the vocabulary.
        """
        data = Columns.read(self.data, self.data.schema.resolve(self.data))
        require_known_tokens(data, self.vocabulary_size)
        template = template_of(data)
        return dataclasses.replace(self, data=data, template=template)

    def comparable(self) -> dict[str, Any]:
        """Names and declarations of the fields, which all ranks must have alike."""
        names, schema = sorted(self.template), self.data.schema
        return {
            "field names": names,
            **{f"declaration of field {name!r}": schema[name].declaration for name in names},
        }

    def without_samples(self) -> dict[str, Any]:
        """Fields and batch size that a rank without samples is to have of this batch."""
        return {
            "template": self.template,
            "data": Columns.read({key: [] for key in self.template}, self.data.schema),
            "global_batch_size": self.global_batch_size,
        }


def template_of(
    data: Columns, template: Mapping[str, list[Any]] | None = None
) -> dict[str, list[Any]]:
    """A fabricated sample like those in ``data``; where there are none, like another template."""
    first = data.taken(range(min(1, len(data.total_lengths)))).compact()
    examples = {name: first[name] or (template or {}).get(name) for name in data}
    return make_placeholder(data.schema, list(data), examples)


def require_known_tokens(data: Columns, vocabulary_size: int | None) -> None:
    """Refuse tokens beyond the model's vocabulary (None: not known), by a `SchemaError`."""
    # An id beyond the embedding would show without the sample's name, or not at all.
    if data.total_lengths and vocabulary_size is not None:
        least, most = data.flat("tokens").aminmax()
        if least < 0 or most >= vocabulary_size:  # sample by sample, to name one
            require_vocabulary("tokens", data["tokens"], vocabulary_size)


def _read_batch_size(rollout_data: Mapping[str, Any], job_size: Any) -> int | None:
    """Samples of a step over all ranks: the rollout's own, else the job's; None for 0, too."""
    own = rollout_data.get(_BATCH_SIZE)
    given = job_size if own is None else own
    return None if given is None else at_least("global_batch_size", given, 0, ConfigError) or None


def _read_steps(steps: Any, num_samples: int) -> list[list[int]]:
    """The caller's steps as lists, which every sample is in once."""
    read: list[list[int | None]] = [[None]]
    # Lists, arrays, tensors, iterators: whatever cannot be walked through stays [[None]], refused
    # below.
    with contextlib.suppress(TypeError):
        read = [[as_integer(index) for index in step] for step in steps]
    given = [index for step in read for index in step if index is not None]
    if len(given) < sum(map(len, read)):
        raise ConfigError(
            "steps must be one list of sample indices for each step, such as [[0, 1], [2, 3]], "
            f"got {steps!r:.60}"
        )
    if sorted(given) != list(range(num_samples)):
        raise ValueError(
            f"steps must hold each of this rank's {num_samples} samples exactly once, got {given}; "
            "group_steps leaves out padding samples (give real_samples(batch) with its steps), "
            "with last='drop' also those left over (give the batch without them)"
        )
    return [[index for index in step if index is not None] for step in read]
