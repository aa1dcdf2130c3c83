"""One replica's rollout data: read, checked, and cut into optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_batching.batch import Field, Schema, make_placeholder
from mcore_batching.batch.field_checks import read_lengths
from mcore_batching.batch.infer import infer_fields
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
        told: declarations of undeclared fields, as far as these samples, earlier batches and, once
            they are heard of, the other ranks tell.
        is_open: these samples leave the kind of some field to others.
    """

    data: dict[str, list[Any]]
    schema: Schema
    template: dict[str, list[Any]]
    total_lengths: list[int]
    global_batch_size: int | None
    steps: Sequence[Sequence[int]] | None
    vocabulary_size: int | None
    told: Mapping[str, Field]
    is_open: bool

    @classmethod
    def read(
        cls,
        rollout_data: dict[str, list[Any]] | None,
        args: Any,
        schema: Schema,
        steps: Sequence[Sequence[int]] | None,
        vocabulary_size: int | None,
        told: Mapping[str, Field],
    ) -> RolloutBatch | None:
        """Read what the caller gave; None if this rank was given nothing.

        Args:
            rollout_data: field name to one value per sample.
            args: Megatron's arguments.
            schema: the kind of every field.
            steps: local sample indices of every step.
            vocabulary_size: of the model, where known.
            told: what earlier batches told of undeclared fields.

        Raises:
            TypeError: it is no dict, or ``schema`` is no `Schema`.
            KeyError: a required field is missing.
            ConfigError: the global batch size is no integer, or negative.
            ValueError: ``steps`` do not hold every sample once.
            SchemaError: a field's kind is unknown to any samples, or a value does not fit it.
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
            _require_cover(steps, len(lengths))
        is_open = False
        if lengths:
            told, is_open = infer_fields(schema, data, told)
        batch = cls(data, schema, {}, lengths, size or None, steps, vocabulary_size, told, is_open)
        return batch.resolved() if lengths and not is_open else batch

    def resolved(self) -> RolloutBatch:
        """Itself with the kind of every field known, its values checked, and a template.

        Raises:
            SchemaError: a field's kind is still unknown, or a value does not fit it.
        """
        if self.template:
            return self
        schema = self.schema.resolve(self.data, self.told)
        schema.validate(self.data)
        if self.vocabulary_size is not None:
            require_vocabulary("tokens", self.data["tokens"], self.vocabulary_size)
        template = make_placeholder(schema, list(self.data), self.data)
        return dataclasses.replace(self, schema=schema, template=template)

    def comparable(self) -> dict[str, Any]:
        """Names and declarations of the fields, which all ranks must have alike."""
        names = sorted(self.template)
        return {
            "field names": names,
            **{f"declaration of field {name!r}": self.schema[name].declaration for name in names},
        }

    def inferred(self) -> dict[str, Field]:
        """The declarations that samples told."""
        return {name: self.schema[name] for name in self.template if name in self.told}

    def hearing(self, others: Iterable[Mapping[str, Field]]) -> RolloutBatch:
        """Itself, where fields that its samples leave open are what the first of others tells."""
        told = {name: field for each in [*others][::-1] for name, field in each.items()}
        return dataclasses.replace(self, told=told | {**self.told})

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


def _require_cover(steps: Any, num_samples: int) -> None:
    given: list[int | None] = [None]
    with contextlib.suppress(TypeError):
        given = [as_integer(index) for step in steps for index in step]
    if None in given:
        raise ConfigError(
            Argument("steps"),
            f" must be one list of sample indices for each optimizer step, got {steps!r:.60}; set ",
            Argument("steps"),
            " to [[0, 1], [2, 3]], say, or to None for steps of ",
            Argument("global_batch_size"),
            " samples",
        )
    if sorted(index for index in given if index is not None) != list(range(num_samples)):
        raise ValueError(
            f"steps must hold each of this rank's {num_samples} samples exactly once, got indices "
            f"{given}; of group_steps' steps padding samples are left out: give real_samples(batch)"
        )
