"""A time before which no plan's step ends, closer to the best one than `step_time_floor`.

The latest rank ends no sooner than the mean of ranks. Let m be the mean over ranks of the costs of
each of K slots. A rank's end is the length of the longest of many chains of passes, and no shorter
than any mean of them; some mean of chains gives every slot the same weight w, so that

    end >= w * sum(m) = w * (K * overhead + a rank's mean work)

No plan has fewer micro-batches a rank than hold all tokens, and none needs more than there are
samples: the bound is the least over every K between.

The chains, under 1F1B: P stages have P - 1 levels between them. A chain that stays on a stage gives
each slot 1 + b, b being the backward ratio. Where it goes down level d with the forward pass of
slot n, n gains 1 and n - d loses b: that backward pass comes later on the one stage and earlier on
the other. Where it comes up with the backward pass of slot m, m gains b and m + d loses 1. The
first slots take shares in ways down, each what it needs for its gain and for what later ones cost
it; all further slots take shares in ways up, of the lowest level first. The gain is the largest for
which the shares suffice.

Ranks that share micro-batches, or run in lockstep, end no sooner than by themselves; their work is
then the least that samples can have. The interleaved schedule's bound is the floor.
"""

from __future__ import annotations

import functools
from bisect import bisect_right

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.problem import Problem

HALVINGS = 12
"""Of the interval in which a gain is looked for: the lower end of the last one is taken."""


def step_time_bound(problem: Problem) -> float:
    """A time before which no plan's step can end, in units of cost; at least `step_time_floor`."""
    floor, dims = step_time_floor(problem), problem.dims
    if dims.virtual_pipeline > 1 or not problem.num_samples:
        return floor
    ranks, model = problem.num_ranks, problem.cost_model
    work, stages = ordered_sum(problem.least_costs) / ranks, dims.pipeline_parallel
    ratio = None if problem.forward_only else model.backward_ratio
    fewest = -(-problem.fewest_rows // ranks)
    # Placeholders in all ranks can be left out: no step needs more than one sample a slot.
    return max(
        floor,
        min(
            even_weight(count, stages, ratio) * (work + count * model.per_micro_batch)
            for count in range(fewest, max(problem.num_samples, fewest) + 1)
        ),
    )


@functools.lru_cache(maxsize=4096)
def even_weight(count: int, stages: int, ratio: float | None) -> float:
    """Weight that some mean of chains gives every slot.

    Args:
        count: slots.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass; None: forward passes alone.
    """
    if ratio is None:
        return 1.0 + (stages - 1) / count
    if stages == 1 or not ratio:
        return 1.0 + ratio
    # Shares in ways down for a gain of one, from the last slot that has one to the first.
    sums, shares = [0.0], list[float]()
    for _ in range(count):
        shares.append((1.0 + ratio * ordered_sum(shares[1 - stages :])) / (stages - 1))
        sums.append(sums[-1] + shares[-1])
    least, most = 0.0, (1.0 + ratio) * (stages - 1) / count
    for _ in range(HALVINGS):
        gain = (least + most) / 2.0
        slots = bisect_right(sums, 1.0 / gain) - 1
        suffices = True
        if slots < count:
            # The slot after those takes what is left of the ways down, the rest of ways up.
            part = (1.0 / gain - sums[slots]) / (sums[slots + 1] - sums[slots])
            suffices = _ups_suffice(gain, count - slots - 1, stages, ratio, (1.0 - part) * gain)
        least, most = (gain, most) if suffices else (least, gain)
    return 1.0 + ratio + least


def _ups_suffice(gain: float, slots: int, stages: int, ratio: float, first: float) -> bool:
    """True if so many last slots can have the gain by ways up, and the one before them `first`."""
    left, lost = [1.0] * (stages - 1), [0.0] * (slots + stages + 1)
    level, needed = 0, first / ratio
    for slot in range(slots + 1):
        while needed > 0.0:
            if level == stages - 1:
                return False
            used = min(needed, left[level])
            lost[slot + level + 1] += used
            left[level] -= used
            needed -= used
            level += needed > 0.0
        needed = (gain + lost[slot + 1]) / ratio
    return True
