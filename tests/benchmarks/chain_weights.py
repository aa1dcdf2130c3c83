"""How often micro-batches are on chains of passes under 1F1B, whatever they cost.

A rank's end is the length of the longest of many chains of passes (`critical_path`), each a sum of
weights times costs of slots, and no shorter than any mean of them. P stages have P - 1 levels
between them: level d lies between stages P - 1 - d and P - d. A chain that stays on a stage has
weights of 1 + b, b being the backward ratio. Where it goes down level d with the forward pass of
slot n, n gains 1 and n - d loses b: that backward pass comes later on the one stage and earlier on
the other. Where it comes up with the backward pass of slot m, m gains b and m + d loses 1. Slots
that do not exist lose nothing. The chains used here start on the first stage, go down all levels
with slot n, and come up with slots no earlier than n, a higher level with none earlier than a lower
one. Such chains exist for any shares of the slots in ways down and up that keep to this order.

All slots gain as much if the first of them have shares in ways down, each what it needs for its
gain and for what later ones cost it, and all further ones in ways up, of the lowest level first,
each what it needs for its gain and for what earlier ones cost it. What is left goes to the first
and to the last slot and costs none. Shares in ways down and in ways up that are both at one slot
give that more weight, and may leave others less.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from mcore_batching.planning.costs.cost import ordered_sum

GAINS = (-1.0, -0.75, -0.5, -0.375, -0.25, -0.125, -0.0625, 0.0, 0.03125, 0.0625, 0.125, 0.25)
"""What slots gain beside a long sample's, over the most that a way costs one of them."""
HALVINGS = 12
"""Of the interval in which a share or a gain is looked for."""


class Weights(NamedTuple):
    """Of slots in a mean of chains, at least."""

    others: float
    """Of each slot but one."""
    one: float
    """Of that one, wherever it is."""
    mean: float
    """Of all slots in the mean."""


@functools.lru_cache(maxsize=1024)
def slot_weights(count: int, stages: int, ratio: float | None) -> tuple[Weights, ...]:
    """Weights of means of chains, whatever slot holds a long sample; the even ones first.

    They are those of fewer slots as well.

    Args:
        count: slots.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass; None: forward passes alone.
    """
    even = even_weight(count, stages, ratio)
    found = [Weights(even, even, even)]
    if ratio is None:
        found.append(Weights(1.0, float(stages), 1.0 + (stages - 1) / count))
    elif stages > 1 and ratio:
        for part in GAINS:
            gain = part * max(1.0, ratio)
            # Which is 1 + ratio + gain, above nothing however large the ratio is.
            others = min(1.0, ratio) + (1.0 + part) * max(1.0, ratio)
            downs = [_share_down(gain, slot, stages, ratio) for slot in range(count)]
            ups = [_share_up(gain, slot, stages, ratio) for slot in range(count)]
            extra = (stages - 1) * min(
                down + ratio * up for down, up in zip(downs, reversed(ups), strict=True)
            )
            if extra < gain:
                # Nor would that of a larger gain be more.
                break
            found.append(Weights(others, 1.0 + ratio + extra, max(others, 1.0 + ratio)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def even_weight(count: int, stages: int, ratio: float | None) -> float:
    """Weight of each slot in the mean of chains of part A.

    Args:
        count: slots.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass; None: forward passes alone.
    """
    if ratio is None:
        return 1.0 + (stages - 1) / count
    if stages == 1 or not ratio:
        return 1.0 + ratio
    # Shares of ways down for a gain of one, from the last slot that they are for to the first.
    sums = [0.0]
    shares: list[float] = []
    for _ in range(count):
        shares.append((1.0 + ratio * ordered_sum(shares[1 - stages :])) / (stages - 1))
        sums.append(sums[-1] + shares[-1])
    least, most = 0.0, (1.0 + ratio) * (stages - 1) / count
    for _ in range(HALVINGS):
        gain = (least + most) / 2.0
        slots = bisect_right(sums, 1.0 / gain) - 1
        if slots < count:
            # The slot after those is one of ways down in part.
            part = (1.0 / gain - sums[slots]) / (sums[slots + 1] - sums[slots])
            first = (1.0 - part) * gain
            if not _ups_suffice(gain, count - slots - 1, stages, ratio, 0.0, first):
                most = gain
                continue
        least = gain
    return 1.0 + ratio + least


def _share_down(gain: float, slots: int, stages: int, ratio: float) -> float:
    """Most of the ways down that a slot can have with so many before it, of a gain each; less than
    none where there are not enough for the others."""
    return _most_share(_downs_suffice, gain, _rounded(slots), stages, ratio)


def _share_up(gain: float, slots: int, stages: int, ratio: float) -> float:
    """Likewise of the ways up, with so many slots after it."""
    return _most_share(_ups_suffice, gain, _rounded(slots), stages, ratio)


def _rounded(slots: int) -> int:
    """No fewer slots, of which there are few different numbers."""
    grain = 1 << max(0, slots.bit_length() - 3)
    return -(-slots // grain) * grain


@functools.lru_cache(maxsize=4096)
def _most_share(
    suffice: Callable[[float, int, int, float, float], bool],
    gain: float,
    slots: int,
    stages: int,
    ratio: float,
) -> float:
    """Largest share for which the rest suffices; less than none if there is none."""
    if suffice(gain, slots, stages, ratio, 1.0):
        return 1.0
    if not suffice(gain, slots, stages, ratio, 0.0):
        return -math.inf
    least, most = 0.0, 1.0
    for _ in range(HALVINGS):
        share = (least + most) / 2.0
        if suffice(gain, slots, stages, ratio, share):
            least = share
        else:
            most = share
    return least


def _downs_suffice(gain: float, slots: int, stages: int, ratio: float, share: float) -> bool:
    """True if each of the slots before one with this share of the ways down can have the gain."""
    shares, whole = [share], share
    for _ in range(slots):
        needed = gain + ratio * ordered_sum(shares[1 - stages :])
        if needed <= 0.0 and gain <= 0.0:
            # Nor do those before it need any.
            break
        shares.append(max(0.0, needed) / (stages - 1))
        whole += shares[-1]
        if whole > 1.0:
            return False
    return True


def _ups_suffice(
    gain: float, slots: int, stages: int, ratio: float, share: float, first: float = 0.0
) -> bool:
    """True if each of the slots after one with this share of all levels' ways up can have the gain.

    Args:
        gain: of each slot.
        slots: after the one.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass.
        share: of the one.
        first: gain of the one beyond that.
    """
    left = [1.0 - share] * (stages - 1)
    lost = [0.0] + [share] * (stages - 1) + [0.0] * (slots + 1)
    level, needed = 0, first / ratio
    for slot in range(slots + 1):
        while needed > 0.0:
            if level == stages - 1:
                return False
            used = min(needed, left[level])
            lost[slot + level + 1] += used
            left[level] -= used
            needed -= used
            if needed > 0.0:
                level += 1
        needed = (gain + lost[slot + 1]) / ratio
    return True
