"""A batch cut into optimizer steps: by number of samples, or by whole groups (prompts).

groups           a a b c c c d      groups_per_step 2
group_steps      [0, 1, 2], [3, 4, 5, 6]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

from mcore_batching.planning.errors import LengthError, named
from mcore_batching.planning.integers import (
    as_integer,
    at_least,
    entries,
    one_per_sample,
    require_choice,
)

LastStep = Literal["keep", "drop", "error"]


def group_steps(
    groups: Sequence[Hashable],
    groups_per_step: int,
    *,
    last: LastStep = "keep",
    is_padding: Sequence[Any] | None = None,
) -> list[list[int]]:
    """The samples of each optimizer step: `groups_per_step` whole groups each, in the order in
    which they first appear. Where every group has n samples in a row, steps are slices of n ·
    groups_per_step.

    Args:
        groups: the group (uid) of each sample [samples], anything hashable but None; integers of
            NumPy and PyTorch count by their value.
        groups_per_step: over all ranks, or of this rank where `groups` are its own samples'.
        last: what becomes of groups left over: "keep" runs them as a shorter last step, "drop"
            leaves them out, "error" refuses the batch.
        is_padding: True for each padding sample [samples], which is in no step; None: none.

    Returns:
        sample indices, ascending [steps][samples of the step]; no step for no samples.

    Raises:
        LengthError: an argument is out of range, or "error" with groups left over.
    """
    groups_per_step = at_least("groups_per_step", groups_per_step, 1, LengthError)
    require_choice("last", last, get_args(LastStep), LengthError)
    place: dict[Hashable, int] = {}
    steps: list[list[int]] = []
    groups = entries("groups", groups, LengthError)
    padding = _padding_tags(is_padding, len(groups))
    for index, group in enumerate(groups):
        if padding[index]:
            continue
        # A group's number is its place among those seen so far, so steps fill up in that order.
        step = place.setdefault(group_key(group, index), len(place)) // groups_per_step
        if step == len(steps):
            steps.append([])
        steps[step].append(index)
    # By the number of groups alone, so that every rank with as many groups has as many steps.
    left_over = len(place) % groups_per_step
    if left_over and last == "error":
        raise LengthError(
            f"{len(place)} groups leave {left_over} over in steps of {groups_per_step}; set "
            "groups_per_step to a divisor, last='keep' or last='drop'"
        )
    return steps[:-1] if last == "drop" and left_over else steps


def steps_of_batch(
    num_samples: int,
    samples_per_step: int | None,
    groups: Sequence[Hashable] | None,
    groups_per_step: int | None,
) -> list[Sequence[int]]:
    """Samples of each step of a batch, one step at least; a `LengthError` where the arguments lack
    each other, exclude each other or do not fit the samples."""
    if groups is None and groups_per_step is None:
        per_step = samples = max(1, num_samples)
        if samples_per_step is not None:
            per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
        return [range(num_samples)[at : at + per_step] for at in range(0, samples, per_step)]
    if samples_per_step is not None:
        raise LengthError(f"steps are cut by groups already; leave out {named('samples_per_step')}")
    if groups is None or groups_per_step is None:
        absent = "groups" if groups is None else "groups_per_step"
        raise LengthError(f"steps of whole groups need {absent}; set it")
    groups = one_per_sample("groups", groups, num_samples)
    return [*group_steps(groups, groups_per_step)] or [range(0)]


def _padding_tags(is_padding: Sequence[Any] | None, num_samples: int) -> list[bool]:
    """True for each padding sample; None is none, a tag of None is False."""
    if is_padding is None:
        return [False] * num_samples
    tags = entries("is_padding", is_padding, LengthError)
    # Tags are NumPy's, Torch's or a loader's: any number counts, a text does not ("0" is true).
    try:
        if any(isinstance(tag, str) for tag in tags):
            raise TypeError
        numbers = [float(0 if tag is None else tag) for tag in tags]
        if not all(map(math.isfinite, numbers)):  # NaN is true, too
            raise ValueError
        read = [bool(number) for number in numbers]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        read = []
    if len(read) != num_samples:
        raise LengthError(
            f"is_padding needs True or False for each of {num_samples} samples, got "
            f"{is_padding!r:.60}"
        )
    return read


def group_key(group: Hashable, index: int) -> Hashable:
    """A key that equal groups share: numbers by value, since a tensor hashes by its identity. A
    `LengthError` names a sample with a group that is None or not hashable."""
    if type(group) in (int, str):  # nearly all: without the calls below
        return group
    number = as_integer(group)
    if number is not None:
        return number
    with contextlib.suppress(TypeError):
        hash(group)  # isinstance(group, Hashable) is True of a tuple that holds a list
        if group is not None:
            return group
    raise LengthError(
        f"the group of sample {index} must be hashable, got {group!r:.60}; set its prompt's "
        "uid, or is_padding",
        index=index,
    )
