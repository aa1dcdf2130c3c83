"""One replica's rollout data: read, checked, and cut into optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch import Schema, make_placeholder
from mcore_batching.batch.field_checks import read_lengths
from mcore_batching.batch.value_checks import require_vocabulary
from mcore_batching.planning import Argument, ConfigError, at_least
from mcore_batching.planning.integers import as_integer

REQUIRED_FIELDS = ("tokens", "total_lengths", "response_lengths")


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """The rollout data of one replica, read and checked.

    Attributes:
        data: field name to one value per sample.
        schema: the kind of every field.
        template: one fabricated sample, empty if this rank has no samples to copy it from.
        total_lengths: tokens of every sample.
        global_batch_size: samples of a step over all ranks, None for all.
        vocabulary_size: entries of the model's vocabulary; None: not known.
        steps: the caller's own local sample indices of every step, if given.
    """

    data: dict[str, list[Any]]
    schema: Schema
    template: dict[str, list[Any]]
    total_lengths: list[int]
    global_batch_size: int | None
    steps: Sequence[Sequence[int]] | None
    vocabulary_size: int | None

    @classmethod
    def read(
        cls,
        rollout_data: dict[str, list[Any]] | None,
        args: Any,
        schema: Schema,
        steps: Sequence[Sequence[int]] | None,
        vocabulary_size: int | None,
    ) -> RolloutBatch | None:
        """Read what the caller gave; None if this rank was given nothing.

        Raises:
            TypeError: it is no dict, or ``schema`` is no `Schema`.
            KeyError: a required field is missing.
            ConfigError: the global batch size is no integer, or negative.
            ValueError: ``steps`` do not hold every sample once.
            SchemaError: a field's kind is unknown, or a value does not fit it.
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
                "rollout_data must be a dict of lists, one value per sample, or None, got "
                f"{type(rollout_data).__name__}"
            )
        given = rollout_data.get(
            "dynamic_global_batch_size", getattr(args, "global_batch_size", None)
        )
        size = None if given is None else at_least("global_batch_size", given, 0, ConfigError)
        data = {
            key: value
            for key, value in rollout_data.items()
            if value is not None and key != "dynamic_global_batch_size"
        }
        missing = [key for key in REQUIRED_FIELDS if key not in data]
        if missing:
            raise KeyError(
                f"rollout_data lacks {', '.join(missing)}; it needs {', '.join(REQUIRED_FIELDS)}, "
                "one value per sample (empty lists on a rank without samples)"
            )
        lengths, _ = read_lengths(data)
        if steps is not None:
            steps = _covering(steps, len(lengths))
        batch = cls(data, schema, {}, lengths, size or None, steps, vocabulary_size)
        return batch.resolved() if lengths else batch

    def resolved(self) -> RolloutBatch:
        """Itself with the kind of every field known, its values checked, and a template."""
        if self.template:
            return self
        schema = self.schema.resolve(self.data)
        schema.validate(self.data)
        if self.vocabulary_size is not None:
            require_vocabulary("tokens", self.data["tokens"], self.vocabulary_size)
        template = make_placeholder(schema, list(self.data), self.data)
        return dataclasses.replace(self, schema=schema, template=template)

    def comparable(self) -> dict[str, Any]:
        """Names and kinds of the fields, which all ranks must have alike."""
        names = sorted(self.template)
        return {
            "field names": names,
            "field kinds": [self.schema[name].kind.name for name in names],
        }

    def fields(self) -> tuple[Schema, dict[str, list[Any]]]:
        """Schema and template, which a rank without samples takes from one with samples."""
        return self.schema, self.template

    def with_fields_of(self, fields: tuple[Schema, dict[str, list[Any]]]) -> RolloutBatch:
        """Itself if it has samples, else with the fields of a rank that has."""
        if self.total_lengths:
            return self
        schema, template = fields
        return dataclasses.replace(
            self, schema=schema, template=template, data={key: [] for key in template}
        )

    def steps_of(self, num_samples: int) -> list[list[int]]:
        """Local sample indices of every step.

        Args:
            num_samples: of all data-parallel ranks together.
        """
        if self.steps is not None:
            return [list(step) for step in self.steps]
        mine, total = len(self.total_lengths), num_samples
        size = self.global_batch_size or max(total, 1)
        # The first k samples of the whole batch are the first k/total of every rank's.
        ends = [mine * min(end, total) // total for end in range(size, total + size, size) if total]
        ends = ends or [0]  # a step of placeholders alone
        starts = [0, *ends[:-1]]
        return [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]


def _covering(steps: Any, num_samples: int) -> list[list[int]]:
    """The steps as Python's integers, each sample once."""
    read: list[list[int | None]] = [[None]]
    with contextlib.suppress(TypeError):
        read = [[as_integer(index) for index in step] for step in steps]
    found = [[index for index in step if index is not None] for step in read]
    if found != read:
        raise ConfigError(
            Argument("steps"),
            f" must be one list of sample indices for each optimizer step, got {steps!r:.60}; set ",
            Argument("steps"),
            " to [[0, 1], [2, 3]], say, or to None for steps of ",
            Argument("global_batch_size"),
            " samples",
        )
    given = [index for step in found for index in step]
    if sorted(given) != list(range(num_samples)):
        raise ValueError(
            f"steps must hold each of this rank's {num_samples} samples exactly once, got indices "
            f"{given}"
        )
    return found
