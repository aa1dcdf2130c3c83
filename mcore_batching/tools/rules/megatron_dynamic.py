"""Megatron's rule for dynamic CP (`default_dynamic_cp` of its dev branch), without the pipeline.

One slot after the other is formed of the samples that are left, longest first:

1. The longest opens a group of as few ranks as its length needs, a power of two.
2. Every other sample joins a group of at least as many as it needs, or opens one of any such size
   on ranks without a group: where the costliest rank of the slot has least work, L²/size for a
   sample, smaller groups before larger and groups that are there before new ones. Work must stay
   below that of a rank full of samples as long as the longest, and 5 % more; else it waits.
3. While ranks are left without samples, the first of the smallest groups takes as many ranks again
   and moves those behind it up. Where that cannot be done all ranks form one group, of the samples
   left in their order as far as they fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.tools.rules.packing_input import RuleFailureError

Group = tuple[int, list[int]]
"""Ranks of a group, and its samples."""
WORK_BEYOND = 1.05
"""Work of a rank over that of one full of samples as long as the slot's longest, at most."""


def dynamic_slots(lengths: Sequence[int], ranks: int, max_tokens_per_gpu: int) -> list[list[Group]]:
    """Groups of each slot, in the order of their ranks.

    Args:
        lengths: total length of each sample [samples], in tokens.
        ranks: data- and context-parallel ones.
        max_tokens_per_gpu: most tokens of a rank.

    Raises:
        RuleFailureError: a sample needs more ranks than there are, or ranks cannot be filled.
    """
    left = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    slots = []
    while left:
        groups, waiting = _slot(left, lengths, ranks, max_tokens_per_gpu)
        while (used := sum(size for size, _ in groups)) < ranks:
            if not _widened(groups, ranks, used):
                groups, waiting = _all_ranks(left, lengths, ranks, max_tokens_per_gpu)
        slots.append(groups)
        left = waiting
    return slots


def _needed(length: int, max_tokens_per_gpu: int) -> int:
    """The least power of two of ranks that a sample needs."""
    size = 1
    while length > size * max_tokens_per_gpu:
        size *= 2
    return size


def _slot(
    left: Sequence[int], lengths: Sequence[int], ranks: int, max_tokens_per_gpu: int
) -> tuple[list[Group], list[int]]:
    """The groups of one slot before ranks are filled, and the samples that wait."""
    longest = lengths[left[0]]
    if _needed(longest, max_tokens_per_gpu) > ranks:
        raise RuleFailureError(
            f"Megatron's dynamic CP raises where a sample of {longest} tokens needs more than the "
            f"{ranks} ranks; set max_tokens_per_gpu to {-(-longest // ranks)} or more"
        )
    most = longest * max_tokens_per_gpu * WORK_BEYOND
    groups: list[Group] = []
    work: list[float] = []
    tokens: list[float] = []
    waiting: list[int] = []
    for sample in left:
        length = lengths[sample]
        size = _needed(length, max_tokens_per_gpu)
        free = ranks - sum(of_group for of_group, _ in groups)
        best: tuple[float, int, int] | None = None
        while size <= ranks:
            more = length * length / size
            for number, (of_group, _) in enumerate(groups):
                if of_group == size and tokens[number] + length / size <= max_tokens_per_gpu:
                    highest = max(max(work), work[number] + more)
                    if highest <= most and (best is None or highest < best[0]):
                        best = highest, size, number
            if size <= free:
                highest = max([*work, more])
                # The first sample opens its group whatever its work.
                if (highest <= most or not groups) and (best is None or highest < best[0]):
                    best = highest, size, len(groups)
            if not groups:
                break
            size *= 2
        if best is None:
            waiting.append(sample)
            continue
        _, size, number = best
        if number == len(groups):
            groups.append((size, []))
            work.append(0.0)
            tokens.append(0.0)
        groups[number][1].append(sample)
        work[number] += length * length / size
        tokens[number] += length / size
    return groups, waiting


def _widened(groups: list[Group], ranks: int, used: int) -> bool:
    """Give the first of the smallest groups that has room behind it as many ranks again; False if
    none has."""
    smallest = min(size for size, _ in groups)
    wide = min(2 * smallest, ranks)
    after = 0
    for number, (size, samples) in enumerate(groups):
        after += size
        if size != smallest or after - 1 + wide - size >= ranks:
            continue
        if wide - size > ranks - used and after < used:
            raise RuleFailureError(
                f"Megatron's dynamic CP moves ranks beyond the last of {ranks}; use a power of two"
            )
        groups[number] = wide, samples
        return True
    return False


def _all_ranks(
    left: Sequence[int], lengths: Sequence[int], ranks: int, max_tokens_per_gpu: int
) -> tuple[list[Group], list[int]]:
    """One group of all ranks, and the samples that wait."""
    samples: list[int] = []
    waiting: list[int] = []
    tokens = 0.0
    for sample in left:
        if tokens + lengths[sample] / ranks <= max_tokens_per_gpu:
            samples.append(sample)
            tokens += lengths[sample] / ranks
        else:
            waiting.append(sample)
    return [(ranks, samples)], waiting
