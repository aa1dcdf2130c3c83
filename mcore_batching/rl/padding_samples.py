"""Padding samples, which make the size of a batch divisible, for frameworks that cut it into equal
parts; this package plans any number of samples. `real_samples` removes them.

    pad_batch({"tokens": [[4, 5, 6]], "total_lengths": [3], "response_lengths": [2],
               "loss_masks": [[1, 1]], "uids": ["a"]}, 2, pad_token_id=0, identifier_seed=0)
    {"tokens": [[4, 5, 6], [0, 0]], "total_lengths": [3, 2], "response_lengths": [2, 1],
     "loss_masks": [[1, 1], [0]], "uids": ["a", "padding-629f6fbd82c07ce"],
     "is_padding": [False, True]}                                            in tensors

A padding sample has one prompt token and one response token with loss mask 0, so it adds nothing to
any sum, mean, count or gradient. Its identifiers are new, so it is in no group's statistics; other
fields hold their `Fill`, with the type, device and trailing shape of the real values.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields import (
    TRAITS,
    Field,
    Fill,
    Kind,
    declaration_line,
    fabricated,
    filled_with,
    num_samples,
)
from mcore_batching.batch.schema import DEFAULT_SCHEMA, Schema, infer_field
from mcore_batching.batch.values import is_integral, require_token_id, shape_of, tensor_of
from mcore_batching.planning.integers import as_integer, at_least

# The least that has both: kernels and losses see a prompt and a response, as in any sample.
_TOTAL_LENGTH, _RESPONSE_LENGTH = 2, 1
_IDENTIFIER_BITS = 60
"""Random bits of an identifier, which fits into int64 with its sign. Two of a million identifiers
are equal with a probability of 4e-7; with 48 bits of 2e-3."""


def required_batch_multiple(
    *,
    data_parallel_size: int,
    samples_per_prompt: int,
    actor_mini_batch_size: int,
    critic_mini_batch_size: int | None = None,
    actor_trains: bool = True,
) -> int:
    """The multiple of the batch size with which every rank and every mini-batch is whole.

        required_batch_multiple(data_parallel_size=2, samples_per_prompt=8,
                                actor_mini_batch_size=15, critic_mini_batch_size=9)      360

    Args:
        data_parallel_size: ranks that share the batch.
        samples_per_prompt: trajectories of each prompt.
        actor_mini_batch_size: prompts in an optimizer step of the actor.
        critic_mini_batch_size: prompts in an optimizer step of the critic; None without a critic.
        actor_trains: False during the critic's warm-up, when the actor has no mini-batches.

    Returns:
        the least common multiple of the ranks and of the samples of each mini-batch.

    Raises:
        BatchError: a size is no integer of 1 or more.
    """
    sizes = {
        "data_parallel_size": data_parallel_size,
        "samples_per_prompt": samples_per_prompt,
        "actor_mini_batch_size": actor_mini_batch_size,
        "critic_mini_batch_size": 1 if critic_mini_batch_size is None else critic_mini_batch_size,
    }
    ranks, samples, actor, critic = (at_least(*each, 1, BatchError) for each in sizes.items())
    multiple = math.lcm(ranks, actor * samples) if actor_trains else ranks
    return multiple if critic_mini_batch_size is None else math.lcm(multiple, critic * samples)


def pad_batch(
    batch: Mapping[str, Any],
    multiple: int,
    schema: Schema = DEFAULT_SCHEMA,
    *,
    pad_token_id: int,
    response_token_id: int | None = None,
    identifier_seed: int | None = None,
) -> dict[str, Any]:
    """A batch followed by as few padding samples as make its size a multiple.

    Args:
        batch: field name to one value per sample; at least one sample.
        multiple: of the batch size afterwards, as from `required_batch_multiple`.
        schema: kind and `Fill` of every field.
        pad_token_id: the prompt token of a padding sample.
        response_token_id: its response token; None: the ``pad_token_id``.
        identifier_seed: None: new identifiers in every call; an integer of 0 or more repeats
            them, say on ranks that pad the same batch. Batches that are joined need different
            seeds.

    Returns:
        field name to a new list, lists and arrays of numbers as tensors, ``is_padding`` among them.
        Identifiers are strings, or negative 60-bit integers where the batch has integers.

    Raises:
        SchemaError: a field is not declared, or a value does not match its kind.
        BatchError: no samples, or a ``multiple``, token id or seed out of range.
    """
    multiple = at_least("multiple", multiple, 1, BatchError)
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    if response_token_id is not None:
        response_token_id = require_token_id("response_token_id", response_token_id)
    if identifier_seed is not None:
        identifier_seed = at_least("identifier_seed", identifier_seed, 0, BatchError)
    if not num_samples(batch):
        raise BatchError("padding samples need a sample to be like, got none; leave the step out")
    if "is_padding" not in schema:
        schema = schema.declare("is_padding", Kind.PER_SAMPLE)
    for key, values in batch.items():
        if values is not None and key not in schema:
            raise _undeclared(infer_field(key, batch))
    given = schema.validate(batch)
    count = len(given["total_lengths"])
    given.setdefault("is_padding", [False] * count)

    num_padding = -count % multiple
    filled: dict[str, list[Any]] = {}
    for key, values in given.items():
        made = _fabricated(schema[key], _telling_example(values), pad_token_id, response_token_id)
        # Each its own: a framework may write into one sample's tensors.
        filled[key] = [copy.deepcopy(made) for _ in range(num_padding)]
    filled["is_padding"] = [True] * num_padding
    own = sorted(key for key in given if schema[key].fill is Fill.IDENTIFIER)
    filled |= _identifiers(given, own, num_padding, identifier_seed)
    absent = dict.fromkeys(key for key in batch if key not in given)
    return {**absent, **{key: values + filled[key] for key, values in given.items()}}


def _undeclared(field: Field) -> SchemaError:
    # Only a name separates a mask or an identifier from a reward, and a wrong fill trains silently.
    fills = TRAITS[field.kind].fills
    lines = [declaration_line(field.name, field.kind, field.length_offset, fill) for fill in fills]
    return SchemaError(
        field.name,
        expected="a declared field, since its fill cannot be inferred",
        found=f"an undeclared one, {field.kind.value}",
        declaration=" or ".join(lines),
        advice="declare its fill",
    )


def _fabricated(
    field: Field, example: Any, pad_token_id: int, response_token_id: int | None
) -> Any:
    """A field's value in a sample of one prompt token and one response token."""
    value = fabricated(field, example, _TOTAL_LENGTH, _RESPONSE_LENGTH, pad_token_id)
    if field.fill is Fill.ONES and field.kind is Kind.PER_SAMPLE:
        return filled_with(1, value)
    has_ids = field.fill is Fill.TOKEN_IDS
    if has_ids and field.kind is Kind.METADATA:
        # Prompts in a list or an array of their own: one token, in the same form.
        row = None
        with contextlib.suppress(SchemaError):  # a list of texts, say
            row = tensor_of(field.name, 0, example)
        if row is None or not is_integral(row) or row.dim() != 1:
            return None
        return [pad_token_id] if isinstance(example, list) else row.new_full((1,), pad_token_id)
    if (has_ids or field.kind is Kind.TOKENS) and response_token_id is not None and len(value):
        value[-1] = response_token_id
    return value


def _telling_example(values: Sequence[Any]) -> Any:
    """The first value with rows, which shows its trailing shape; else the first present one."""
    present = [value for value in values if value is not None]
    # A value without rows may be an empty list, which has lost its trailing shape and its type.
    telling = [value for value in present if all(shape_of(value) or (0,))]
    return next(iter(telling or present), None)


def _identifiers(
    batch: Mapping[str, Sequence[Any]], names: Sequence[str], count: int, seed: int | None
) -> dict[str, list[int | str]]:
    """New values of the named fields, for ``count`` padding samples."""
    # The system's numbers and not Torch's: a padded batch leaves the training's random state alone.
    source = random.SystemRandom() if seed is None else random.Random(seed)
    given = {name: [_plain(value) for value in batch[name] if value is not None] for name in names}
    used = {value for values in given.values() for value in values}
    made: dict[str, list[int | str]] = {name: [] for name in names}
    for _ in range(count):
        number, text = 0, ""
        while not text or not used.isdisjoint((number, text)):
            # Negative, where frameworks number from 0; within int64.
            number = -1 - source.getrandbits(_IDENTIFIER_BITS)
            text = f"padding-{-number:015x}"
        used |= {number, text}
        for name, values in given.items():
            # Of the batch's type, so that lists still stack.
            numbered = bool(values) and all(isinstance(value, int) for value in values)
            made[name].append(number if numbered else text)
    return made


def _plain(value: Any) -> int | str | None:
    """An integer of any library as a Python int, a string as it is; None for anything else."""
    return str(value) if isinstance(value, str) else as_integer(value)
