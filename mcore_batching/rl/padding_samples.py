"""Fabricated samples that make the size of a batch divisible.

    pad_batch({"tokens": [[4, 5, 6]], "total_lengths": [3], "response_lengths": [2],
               "loss_masks": [[1, 1]], "uids": ["a"]}, 2, pad_token_id=0)
    {"tokens": [[4, 5, 6], [0, 0]], "total_lengths": [3, 2], "response_lengths": [2, 1],
     "loss_masks": [[1, 1], [0]], "uids": ["a", "padding-0"], "is_padding": [False, True]}

`real_samples` takes them off again. This package's own plans take any number of samples and need
none of this; it is for frameworks that cut a batch into equal parts. A padding sample costs a
micro-batch two tokens before alignment.

It has one prompt token and one response token with a loss mask of zero, so it adds nothing to any
sum, mean, count or gradient. Its identifiers (uids, trajectory ids, …) are new and unlike each
other, so it is in no group's statistics. Other values have the type, device, trailing shape and
number of axes of the real ones; the slots of a routed token are distinct experts; multimodal inputs
are there, but empty.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.field_checks import read_lengths
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.placeholder import check_filled, make_placeholder
from mcore_batching.batch.schema import DEFAULT_SCHEMA, Schema
from mcore_batching.batch.value_checks import is_tagged, require_token_id
from mcore_batching.batch.value_shapes import is_array, shape_of
from mcore_batching.planning.errors import Argument

IDENTIFIERS = ("uids", "trajectory_ids", "rollout_ids", "sample_indices")
"""Fields that tell samples or groups of them apart."""

_TOTAL_LENGTH, _RESPONSE_LENGTH = 2, 1

# A padding sample is one token, and one response token, longer than a placeholder.
_LENGTHS = ("total_lengths", "response_lengths", "max_seq_lens")
_WITH_OFFSET = (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.ROUTED_EXPERTS)


def required_batch_multiple(
    *,
    data_parallel_size: int,
    samples_per_prompt: int,
    actor_mini_batch_size: int,
    critic_mini_batch_size: int | None = None,
    actor_trains: bool = True,
) -> int:
    """Number of which a batch's size must be a multiple, so that every mini-batch is whole.

    Args:
        data_parallel_size: ranks that share the batch.
        samples_per_prompt: trajectories of each prompt.
        actor_mini_batch_size: prompts in an optimizer step of the policy.
        critic_mini_batch_size: prompts in one of the critic, None if there is none.
        actor_trains: False while only the critic is trained, to warm up.

    Returns:
        the least common multiple of the ranks and of the mini-batches in samples.

    Raises:
        BatchError: a size is not an integer of 1 or more.
    """
    sizes = {
        "data_parallel_size": data_parallel_size,
        "samples_per_prompt": samples_per_prompt,
        "actor_mini_batch_size": actor_mini_batch_size,
    }
    if critic_mini_batch_size is not None:
        sizes["critic_mini_batch_size"] = critic_mini_batch_size
    for name, size in sizes.items():
        _require_positive(name, size)
    multiple = data_parallel_size
    if actor_trains:
        multiple = math.lcm(multiple, actor_mini_batch_size * samples_per_prompt)
    if critic_mini_batch_size is not None:
        multiple = math.lcm(multiple, critic_mini_batch_size * samples_per_prompt)
    return multiple


def pad_batch(
    batch: Mapping[str, Any],
    multiple: int,
    schema: Schema = DEFAULT_SCHEMA,
    *,
    pad_token_id: int,
    response_token_id: int | None = None,
    identifiers: Iterable[str] = IDENTIFIERS,
    first_padding_number: int = 0,
) -> dict[str, Any]:
    """The batch with the fewest padding samples behind its own that make its size a multiple.

    The given batch is not changed, its lists are not shared, and fabricated values share memory
    with nothing.

    Args:
        batch: field name to one value per sample; at least one sample.
        multiple: of which the size is to be a multiple, as from `required_batch_multiple`.
        schema: the kind of every field, unless its values fit exactly one.
        pad_token_id: the prompt token of a padding sample.
        response_token_id: its response token, the end of a sequence for instance; the prompt token
            if None.
        identifiers: fields that get a new value in each padding sample: ``padding-0``, … beside
            texts, -1, … beside integers, leaving out those in use. Other metadata is None.
        first_padding_number: counts the padding samples from here, so that the identifiers of
            batches that are padded apart and joined later differ.

    Returns:
        field name to a new list of one value per sample; the values of given samples are the given
        ones. ``is_padding`` is always there, for given samples as given, else False.

    Raises:
        SchemaError: a value of the batch is not what its kind says, or a kind is not known.
        BatchError: no samples, a `multiple` below 1, or a token id that is no integer.
    """
    _require_positive("multiple", multiple)
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    if response_token_id is not None:
        response_token_id = require_token_id("response_token_id", response_token_id)
    total_lengths, _ = read_lengths(batch)
    if not total_lengths:
        raise BatchError(
            "expected at least one sample to take types and shapes from, got none: leave the step "
            "out, or plan it with plan_batch, whose placeholders need no example"
        )
    schema = schema.resolve(batch)
    schema.validate(batch)
    if "is_padding" not in schema:
        schema = schema.declare("is_padding", Kind.PER_SAMPLE)
    given = {key: list(values) for key, values in batch.items() if values is not None}
    tags = given.get("is_padding", [False] * len(total_lengths))
    given["is_padding"] = [is_tagged("is_padding", index, tag) for index, tag in enumerate(tags)]

    num_padding = -len(total_lengths) % multiple
    template = _padding_sample(given, schema, pad_token_id, response_token_id)
    filled = {
        key: [copy.deepcopy(value) for _ in range(num_padding)] for key, value in template.items()
    }
    for key in set(identifiers) & given.keys():
        numbers = range(first_padding_number, first_padding_number + num_padding)
        filled[key] = _new_identifiers(given[key], numbers)
    check_filled(
        filled,
        schema=schema,
        keys=given,
        total_lengths=[_TOTAL_LENGTH] * num_padding,
        response_lengths=[_RESPONSE_LENGTH] * num_padding,
    )
    absent = dict.fromkeys(key for key in batch if key not in given)
    return {**absent, **{key: values + filled[key] for key, values in given.items()}}


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BatchError(Argument(name), f" must be an integer of 1 or more, got {value!r}")


def _padding_sample(
    given: Mapping[str, list[Any]],
    schema: Schema,
    pad_token_id: int,
    response_token_id: int | None,
) -> dict[str, Any]:
    """One value for every field: a placeholder's with one more row."""
    longer = Schema(
        tuple(
            Field(field.name, field.kind, length_offset=field.length_offset + 1)
            if field.kind in _WITH_OFFSET
            else field
            for field in schema.values()
        )
    )
    examples = {key: [_telling_example(values)] for key, values in given.items()}
    sample = {
        key: values[0]
        for key, values in make_placeholder(
            longer, given, examples, pad_token_id=pad_token_id
        ).items()
    }
    for key, value in sample.items():
        if key in _LENGTHS:
            sample[key] = value + 1
        elif schema[key].kind in (Kind.TOKENS, Kind.POSITION_IDS):
            sample[key] = _twice(value)
        if schema[key].kind is Kind.POSITION_IDS:
            _count_up(sample[key])
    if response_token_id is not None:
        sample["tokens"][-1] = response_token_id
    sample["is_padding"] = True
    return sample


def _telling_example(values: Sequence[Any]) -> Any:
    """The first value that shows its trailing shape: an empty list has lost it."""
    present = [value for value in values if value is not None]
    telling = [value for value in present if all(shape_of(value) or (0,))]
    return next(iter(telling or present), None)


def _twice(value: Any) -> Any:
    """A value of one token, ``[1]`` or ``[axes, 1]``, as one of two."""
    if isinstance(value, Tensor):
        return torch.cat([value, value], dim=-1)
    if is_array(value):
        return value.repeat(2, axis=-1)
    if value and isinstance(value[0], list):
        return [_twice(axis) for axis in value]
    return [*value, *value]


def _count_up(positions: Any) -> None:
    """Make the second of two positions a 1, on every axis."""
    if isinstance(positions, list) and positions and isinstance(positions[0], list):
        for axis in positions:
            axis[-1] = 1
    elif isinstance(positions, list):
        positions[-1] = 1
    else:
        positions[..., -1] = 1


def _new_identifiers(given: Sequence[Any], numbers: Iterable[int]) -> list[Hashable]:
    """One for each number, unlike those given."""
    plain = [_plain(value) for value in given if value is not None]
    used = set(plain)
    integers = bool(plain) and all(isinstance(value, int) for value in plain)

    def candidates(number: int) -> Iterator[Hashable]:
        yield -1 - number if integers else f"padding-{number}"
        step = 0
        while True:
            step += 1
            yield -1 - number - step if integers else f"padding-{number}-{step}"

    fresh: list[Hashable] = []
    for number in numbers:
        fresh.append(next(each for each in candidates(number) if each not in used))
        used.add(fresh[-1])
    return fresh


def _plain(value: Any) -> Hashable:
    """A number of any library as a Python int, everything else as the text that it prints as."""
    try:
        return operator.index(value)
    except TypeError:
        return value if isinstance(value, str) else repr(value)
