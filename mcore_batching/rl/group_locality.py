"""Check that every group's samples are on one rank, where its rewards are compared.

    require_local({0: [a, b], 1: [b, c]})    SplitGroupError: b on ranks 0 and 1

Otherwise each rank would compare a reward with only a part of its group, without an error. Padding
samples belong to no group, whatever their uid.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.field_checks import num_samples, require_one_per_sample
from mcore_batching.planning.errors import Argument, shortened
from mcore_batching.rl.real_samples import indices_by_group, real_indices


class SplitGroupError(BatchError):
    """Groups with samples on several ranks, so that none can compute their statistics.

    Attributes: `ranks_of_group`, the global ranks of each such group, by its uid.
    """

    def __init__(
        self, *parts: str | Argument, ranks_of_group: dict[Hashable, tuple[int, ...]]
    ) -> None:
        super().__init__(*parts)
        self.ranks_of_group = ranks_of_group


def groups_held(batch: Mapping[str, Any]) -> list[Hashable]:
    """The groups of this rank's real samples, each once, in order of first appearance.

    Raises:
        SchemaError: there is not one uid per sample.
        LengthError: a uid is None or not hashable.
        BatchError: a uid cannot be sent to other ranks.
    """
    uids: Any = batch.get("uids")
    require_one_per_sample("uids", uids, num_samples(batch), ", to see which groups are here")
    held = list(indices_by_group(uids, real_indices(batch)))
    # Here, where one rank's error reaches all: a failing send would leave the others waiting.
    try:
        pickle.dumps(held)
    except Exception as error:
        raise BatchError(
            f"the uids cannot be sent to other ranks ({error}); use strings or integers"
        ) from error
    return held


def require_local(held: Mapping[int, Collection[Hashable]]) -> None:
    """Check that no group is on two ranks.

    Args:
        held: the groups of each rank; equal by value, after pickling.

    Raises:
        SplitGroupError: some are.
    """
    # Every rank computes this from the same lists, and raises the same error.
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, groups in held.items():
        for each in groups:
            ranks_of.setdefault(each, []).append(rank)
    split = {each: tuple(ranks) for each, ranks in ranks_of.items() if len(ranks) > 1}
    if not split:
        return
    found = [f"{each!r:.60} on ranks {', '.join(map(str, ranks))}" for each, ranks in split.items()]
    raise SplitGroupError(
        f"groups are split: {shortened(found, 5, '; ')}; "
        "give a uid's samples to one rank, and set ",
        Argument("group"),
        " to data-parallel ranks alone",
        ranks_of_group=split,
    )
