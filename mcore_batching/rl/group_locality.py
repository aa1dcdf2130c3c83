"""Check that every group's samples are on one rank, where its rewards are compared: else each rank
would compare a reward with only a part of its group, without an error.

    require_local({0: [a, b], 1: [b, c]})    SplitGroupError: b on ranks 0 and 1
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.errors import Argument, shortened


class SplitGroupError(BatchError):
    """Groups with samples on several ranks, so that none can compute their statistics.

    Attributes: `ranks_of_group`, the global ranks of each such group, by its uid.
    """

    def __init__(
        self, *parts: str | Argument, ranks_of_group: dict[Hashable, tuple[int, ...]]
    ) -> None:
        super().__init__(*parts)
        self.ranks_of_group = ranks_of_group


def require_local(held: Mapping[int, Collection[Hashable]]) -> None:
    """Refuse a group that is on two ranks, given the groups of each; equal by value, after
    pickling."""
    # Every rank computes this from the same lists, and raises the same error.
    ranks_of: dict[Hashable, tuple[int, ...]] = {}
    for rank, groups in held.items():
        for each in groups:
            ranks_of[each] = (*ranks_of.get(each, ()), rank)
    split = {each: ranks for each, ranks in ranks_of.items() if len(ranks) > 1}
    if split:
        found = [f"{each!r:.60} on ranks {', '.join(map(str, split[each]))}" for each in split]
        raise SplitGroupError(
            f"groups are split: {shortened(found, 5, '; ')}; "
            "give a uid's samples to one rank, and set ",
            Argument("group"),
            " to data-parallel ranks alone",
            ranks_of_group=split,
        )
