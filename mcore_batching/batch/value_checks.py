"""Values that become tensors: what is none, or says something else than it seems to, is refused.

tensor_of("tokens", 0, [[5], [6, 7]])                  SchemaError, lists of different lengths
require_loss_masks([tensor([1, 0]), tensor([nan])])    SchemaError, sample 1
require_token_id("pad_token_id", True)                 BatchError, where it would be token 1
require_vocabulary("tokens", [tensor([64])], 64)       SchemaError, where no rank holds token 64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, OrderError, SchemaError
from mcore_batching.batch.value_shapes import as_number, describe, plain_value
from mcore_batching.planning.errors import Argument
from mcore_batching.planning.integers import as_integer


def tensor_of(name: str, index: int, value: Any) -> Any:
    """A sample's value, lists and arrays of numbers as a tensor on their own device.

    Args:
        name: of the field, for errors.
        index: of the sample, for errors.
        value: of any kind.

    Raises:
        SchemaError: lists that hold no numbers, or that differ in length.
    """
    try:
        return plain_value(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SchemaError(
            name,
            sample_index=index,
            expected="numbers, in lists of the same length",
            found=f"{describe(value)} ({error})",
        ) from None


def require_loss_masks(masks: Sequence[Tensor]) -> None:
    """Check that the loss masks of a batch are weights.

    Args:
        masks: one per sample.

    Raises:
        SchemaError: one has an entry that is negative, infinite or NaN.
    """
    filled = [each.flatten().double() for each in masks if each.numel()]
    devices = {each.device for each in filled}
    # One answer for all of a device's: the host waits for each.
    if all(_are_weights([each for each in filled if each.device == on]) for on in devices):
        return
    index = next(i for i, each in enumerate(masks) if not _are_weights([each.flatten()]))
    values = masks[index].flatten().tolist()
    raise SchemaError(
        "loss_masks",
        sample_index=index,
        expected="finite weights of 0 or more",
        found=str(next(value for value in values if not 0 <= value < math.inf)),
    )


def _are_weights(masks: Sequence[Tensor]) -> bool:
    together = torch.cat(list(masks))
    # A comparison with NaN is False.
    return bool(((together >= 0) & (together < math.inf)).all())


def require_vocabulary(
    name: str,
    values: Sequence[Tensor],
    vocabulary_size: int,
    weights: Sequence[Tensor] | None = None,
) -> None:
    """Check that token ids are entries of the model's vocabulary.

    Tensor-parallel ranks mask what is not of their own part: an id that is of nobody's would train
    as a vector of zeros.

    Args:
        name: of the field.
        values: token ids of each sample.
        vocabulary_size: entries of the model's embedding, padding included.
        weights: of each sample one per token; at a weight of 0 any id may stand. None: nowhere.

    Raises:
        SchemaError: an id is negative, or `vocabulary_size` or more.
    """
    ids = [value.long().flatten() for value in values]
    if weights is not None:
        ids = [
            each.masked_fill(weight.flatten().to(each.device) == 0, 0)
            for each, weight in zip(ids, weights, strict=True)
        ]
    filled = [each for each in ids if each.numel()]

    def are_known(tensor: Tensor) -> bool:
        return bool(((tensor >= 0) & (tensor < vocabulary_size)).all())

    # One answer for all of a device's: the host waits for each.
    devices = {each.device for each in filled}
    if all(are_known(torch.cat([each for each in filled if each.device == on])) for on in devices):
        return
    index = next(i for i, each in enumerate(ids) if not are_known(each))
    listed = ids[index].tolist()
    place = next(i for i, token in enumerate(listed) if not 0 <= token < vocabulary_size)
    raise SchemaError(
        name,
        sample_index=index,
        expected=f"token ids of the model's vocabulary, 0 to {vocabulary_size - 1} (use its "
        f"tokenizer, or build it with vocab_size={max(vocabulary_size, *listed) + 1})",
        found=f"{listed[place]} at place {place}",
    )


def is_tagged(name: str, index: int, tag: Any) -> bool:
    """A sample's tag, such as ``is_padding``; None counts as False.

    Raises:
        SchemaError: it is not one boolean or number: of a text even "False" would be true.
    """
    number = 0.0 if tag is None else as_number(tag)
    if number is None:
        raise SchemaError(
            name,
            sample_index=index,
            expected="True or False",
            found=describe(tag),
        )
    return bool(number)


def require_index(name: str, value: Any) -> int:
    """An entry of the argument `name`, or itself, as a Python int.

    Raises:
        OrderError: it is no integer.
    """
    number = as_integer(value)
    if number is None:
        raise OrderError(f"expected integer {name}, got {value!r:.60}; pass positions")
    return number


def require_token_id(name: str, value: Any) -> int:
    """The argument `name` as the id of a token.

    Raises:
        BatchError: it is no integer, or beyond what int64 holds.
    """
    number = as_integer(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise BatchError(
            Argument(name),
            f" must be the id of a token, an integer, got {value!r:.60}; set ",
            Argument(name),
            " to the tokenizer's",
        )
    return number
