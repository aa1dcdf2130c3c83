"""Whether every group's samples are on one rank, where its statistics can be computed.

    rank 0  uids [a, a, b]    rank 1  uids [b, c]
    check_groups_are_local(batch, group=data_parallel_group)    SplitGroupError: b on ranks 0 and 1

A group split over ranks is compared with half of its own rewards, and nothing looks wrong.

Guarantees
- Every rank raises the same error, or none does; what is wrong on one rank is an error on all.
- Padding samples belong to no group, whatever their uid.
- Uids are equal by value: integers of any library, and whatever compares equal after pickling.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.errors import BatchError, SchemaError, SplitGroupError
from mcore_batching.batch.values import count_of
from mcore_batching.planning.groups import group_key
from mcore_batching.rl.metrics import num_samples_of, real_indices

_SHOWN = 5  # groups that a message lists


def check_groups_are_local(batch: Mapping[str, Any], *, group: dist.ProcessGroup) -> None:
    """Check that no group has real samples on two ranks.

    A collective over ``group``.

    Args:
        batch: field name to one value a sample, of this rank: ``uids``, and ``is_padding`` if any
            are padding samples. A rank may have no samples.
        group: the data-parallel ranks, each with samples of its own. Ranks that hold the same
            samples (context-parallel ones, pipeline stages) are not to be in it.

    Raises:
        SplitGroupError: on every rank, the same: some group is on more than one.
        BatchError: on every rank, if on any the uids are absent or cannot be compared.
    """
    fault: Exception | None = None
    held: Collection[Hashable] = ()
    try:
        held = groups_held(batch)
    except Exception as error:
        # Whatever it is: the other ranks must learn of it.
        fault = error
    notes = gather_notes((held, None if fault is None else str(fault)), group)
    raise_together(fault, {rank: text for rank, (_, text) in notes.items()})
    require_local({rank: held for rank, (held, _) in notes.items()})


def groups_held(batch: Mapping[str, Any]) -> list[Hashable]:
    """The groups of this rank's real samples, each once, in order of first appearance.

    Raises:
        SchemaError: there is not one uid a sample.
        LengthError: a uid is None or not hashable.
        BatchError: a uid cannot be sent to other ranks.
    """
    real, uids, num_samples = real_indices(batch), batch.get("uids"), num_samples_of(batch)
    if uids is None or count_of(uids) != num_samples:
        raise SchemaError(
            "uids",
            expected=f"{num_samples} values, one a sample, to see which groups are on this rank",
            found="no such field" if uids is None else f"{count_of(uids)} values",
        )
    held = list(dict.fromkeys(group_key(uids[index], index) for index in real))
    try:
        pickle.dumps(held)
    except Exception as error:
        raise BatchError(
            f"the uids cannot be sent to other ranks to be compared ({error}); use texts or "
            "integers"
        ) from error
    return held


def require_local(held: Mapping[int, Collection[Hashable]]) -> None:
    """Check that no group is on two ranks.

    Args:
        held: the groups of each rank.

    Raises:
        SplitGroupError: some are.
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, groups in held.items():
        for each in groups:
            ranks_of.setdefault(each, []).append(rank)
    split = {each: tuple(ranks) for each, ranks in ranks_of.items() if len(ranks) > 1}
    if not split:
        return
    shown = [
        f"{each!r:.60} on ranks {', '.join(map(str, ranks))}"
        for each, ranks in list(split.items())[:_SHOWN]
    ]
    more = f" and {len(split) - _SHOWN} more" if len(split) > _SHOWN else ""
    raise SplitGroupError(
        "expected every group whole on one rank, since its rewards are compared there, got "
        f"{'; '.join(shown)}{more}; hand all samples of a uid to one rank, or compute advantages "
        "before the batch is split; if those ranks hold the same samples, pass as group the "
        "data-parallel ranks alone, without context-parallel ones",
        ranks_of_group=split,
    )


def gather_notes(note: Any, group: dist.ProcessGroup) -> dict[int, Any]:
    """What each rank of a group says, by its global rank. A collective over ``group``."""
    notes: list[Any] = [None] * group.size()
    dist.all_gather_object(notes, note, group=group)
    return dict(zip(dist.get_process_group_ranks(group), notes, strict=True))


def raise_together(fault: Exception | None, faults: Mapping[int, str | None]) -> None:
    """Raise on every rank if anything is wrong on one.

    Args:
        fault: what is wrong on this rank.
        faults: what is wrong on each rank of the group, None where nothing is.

    Raises:
        Exception: `fault` itself, if there is one.
        BatchError: the first rank at fault and what is wrong there, if there is nothing here.
    """
    if fault is not None:
        raise fault
    for rank, text in faults.items():
        if text is not None:
            raise BatchError(f"on rank {rank}: {text}")
