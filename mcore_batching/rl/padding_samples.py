"""Padding samples, which make the size of a batch divisible.

    pad_batch({"tokens": [[4, 5, 6]], "total_lengths": [3], "response_lengths": [2],
               "loss_masks": [[1, 1]], "uids": ["a"]}, 2, pad_token_id=0)
    {"tokens": [[4, 5, 6], [0, 0]], "total_lengths": [3, 2], "response_lengths": [2, 1],
     "loss_masks": [[1, 1], [0]], "uids": ["a", "padding-a4d1b59e7158-0"],
     "is_padding": [False, True]}                                            in tensors

`real_samples` removes them. They are for frameworks that cut a batch into equal parts; this
package plans any number of samples. A padding sample costs two tokens before alignment.

It has one prompt token and one response token with loss mask 0, so it adds nothing to any sum,
mean, count or gradient. Its identifiers (uids, trajectory ids, …) are new, so it is in no group's
statistics. Attention masks are 1; other fields of token ids (``input_ids``, ``responses``) hold
its two tokens; a routed token's experts are distinct; multimodal inputs are ``{}``. All else is 0,
with the type, device and trailing shape of the real values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields.field_checks import read_lengths
from mcore_batching.batch.fields.fields import FILLED_KINDS, Field, Fill, Kind, declaration_line
from mcore_batching.batch.fields.schema import DEFAULT_SCHEMA, Schema
from mcore_batching.batch.fields.value_checks import require_token_id, tensor_of
from mcore_batching.batch.fields.value_shapes import is_integral, shape_of
from mcore_batching.batch.rows.placeholder import fabricated, filled_with
from mcore_batching.planning.errors import Argument
from mcore_batching.rl._new_identifiers import new_identifiers

_OTHER_FILLS = {
    **dict.fromkeys(("mask", "masks", "len", "lens", "length", "lengths"), (Fill.ONES,)),
    **dict.fromkeys(("uid", "uids", "id", "idx", "index", "indices"), (Fill.IDENTIFIER,)),
    "ids": (Fill.TOKEN_IDS, Fill.IDENTIFIER),
    **dict.fromkeys(("tokens", "sequences", "prompts", "responses", "labels"), (Fill.TOKEN_IDS,)),
}
"""Words in an undeclared field's name that suggest another fill than zeros: it must be declared."""

# The least that has both: kernels and losses see a prompt and a response, as in any sample.
_TOTAL_LENGTH, _RESPONSE_LENGTH = 2, 1


def pad_batch(
    batch: Mapping[str, Any],
    multiple: int,
    schema: Schema = DEFAULT_SCHEMA,
    *,
    pad_token_id: int,
    response_token_id: int | None = None,
) -> dict[str, Any]:
    """A batch followed by as few padding samples as make its size a multiple.

    Args:
        batch: field name to one value per sample; at least one sample.
        multiple: of the batch size afterwards, say ``math.lcm(ranks, samples of a mini-batch)``.
        schema: kind and `Fill` of every field; undeclared ones are inferred.
        pad_token_id: the prompt token of a padding sample.
        response_token_id: its response token; None: the ``pad_token_id``.

    Returns:
        field name to a new list of one value per sample, lists and arrays of numbers as tensors,
        ``is_padding`` among them; identifiers are those of `new_identifiers`, other metadata None.

    Raises:
        SchemaError: a value does not match its kind, a kind is not known, or an undeclared field's
            name suggests another fill than zeros.
        BatchError: no samples, a ``multiple`` below 1, or a token id that is no integer.
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise BatchError(
            Argument("multiple"), f" must be an integer of 1 or more, got {multiple!r}"
        )
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    if response_token_id is not None:
        response_token_id = require_token_id("response_token_id", response_token_id)
    if not read_lengths(batch)[0]:
        raise BatchError("padding samples need a sample to be like, got none; leave the step out")
    if "is_padding" not in schema:
        schema = schema.declare("is_padding", Kind.PER_SAMPLE)
    declared = set(schema)
    schema = schema.resolve(batch)
    given = schema.validate(batch)
    # A fill that was guessed wrong trains on wrong values without an error: names that suggest one
    # are refused until it is declared.
    for field in schema.values():
        if field.name not in declared:
            _require_zeros(field)
    num_samples = len(given["total_lengths"])
    given.setdefault("is_padding", [False] * num_samples)

    num_padding = -num_samples % multiple
    filled: dict[str, list[Any]] = {}
    for key, values in given.items():
        made = _fabricated(schema[key], _telling_example(values), pad_token_id, response_token_id)
        # Each its own: a framework may write into one sample's tensors.
        filled[key] = [copy.deepcopy(made) for _ in range(num_padding)]
    filled["is_padding"] = [True] * num_padding
    own = [key for key in given if schema[key].fill is Fill.IDENTIFIER]
    filled |= new_identifiers(given, own, num_padding)
    schema.validate(filled)  # what was made up here meets the same declarations as what was given
    absent = dict.fromkeys(key for key in batch if key not in given)
    return {**absent, **{key: values + filled[key] for key, values in given.items()}}


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


def _require_zeros(field: Field) -> None:
    """Refuse an undeclared field whose name suggests another fill than zeros."""
    # Names, since values of zeros and ones say nothing: a mask looks like a reward.
    words = field.name.lower().split("_")
    fills = [fill for word in words for fill in _OTHER_FILLS.get(word, ())]
    if words[0] in ("is", "has"):
        fills.append(Fill.ONES)
    lines = [
        declaration_line(field.name, field.kind, field.length_offset, fill)
        for fill in dict.fromkeys([*fills, Fill.ZEROS])
        if field.kind in FILLED_KINDS[fill]
    ]
    if len(lines) > 1:
        raise SchemaError(
            field.name,
            expected="a declared field, since its name suggests another fill than zeros",
            found=f"an undeclared field, {field.kind.value}",
            declaration=" or ".join(lines),
            advice="declare its fill",
        )


def _telling_example(values: Sequence[Any]) -> Any:
    """The first value with rows, which shows its trailing shape; else the first present one."""
    present = [value for value in values if value is not None]
    # A value without rows may be an empty list, which has lost its trailing shape and its type.
    telling = [value for value in present if all(shape_of(value) or (0,))]
    return next(iter(telling or present), None)
