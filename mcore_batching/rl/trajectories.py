"""Which samples of a batch are one trajectory, and what its outcome is.

    trajectory_ids  [0, 0, 1, 0]    uids  [a, a, a, b]    is_padding  [False] * 4
    trajectories    [0, 1], [2], [3]

Guarantees
- A trajectory is told by its group and its identifier together, so identifiers may start from 0 in
  every group; its turns may stand anywhere in the batch.
- Padding samples are in no trajectory.
- Several samples of a trajectory that are not declared as its turns are an error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.planning.groups import group_key
from mcore_batching.rl.metrics import real_indices

Outcome = Literal["last", "sum"]


def trajectories_of(
    batch: Mapping[str, Any], uids: Sequence[Any], step_wise: bool
) -> list[list[int]]:
    """The samples of each trajectory.

    Args:
        batch: field name to one value a sample.
        uids: the group of each sample.
        step_wise: a sample is one turn of a trajectory.

    Returns:
        indices of real samples, in the batch's order [trajectories][turns].

    Raises:
        BatchError: several samples of a trajectory without `step_wise`.
        SchemaError: `step_wise` without ``trajectory_ids``.
        LengthError: a uid or an identifier is None or not hashable.
    """
    real = real_indices(batch)
    if not step_wise and batch.get("trajectory_ids") is None:
        return [[index] for index in real]
    ids = values_of(batch, "trajectory_ids")
    turns: dict[tuple[Hashable, Hashable], list[int]] = {}
    for index in real:
        # Some number the trajectories of each prompt from 0.
        key = group_key(uids[index], index), group_key(ids[index], index)
        turns.setdefault(key, []).append(index)
    for (_, trajectory), samples in turns.items():
        if len(samples) > 1 and not step_wise:
            raise BatchError(
                f"expected one sample a trajectory, got {len(samples)} of trajectory "
                f"{trajectory!r} (samples {', '.join(map(str, samples[:10]))}): each would count "
                "in the group; set step_wise=True if a sample is one turn"
            )
    return list(turns.values())


def outcome_of(
    batch: Mapping[str, Any], rewards: Sequence[Any], turns: Sequence[int], outcome: Outcome
) -> float:
    """The reward of a trajectory.

    Args:
        batch: field name to one value a sample.
        rewards: of each sample.
        turns: samples of the trajectory.
        outcome: "last", that of the turn with the greatest ``round_number``, without that field
            the last in the batch; or "sum", over the turns.

    Raises:
        BatchError: `outcome` is neither.
    """
    if outcome == "sum":
        return sum(float(rewards[turn]) for turn in turns)
    if outcome != "last":
        raise BatchError(f"outcome must be 'last' or 'sum', got {outcome!r}")
    if batch.get("round_number") is None:
        return float(rewards[turns[-1]])
    numbers = values_of(batch, "round_number")
    return float(rewards[max(turns, key=lambda turn: int(numbers[turn]))])


def values_of(batch: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The field's values, one a sample.

    Raises:
        SchemaError: there is no such field, or it has not one value a sample.
    """
    values = batch.get(name)
    num_samples = len(batch["response_lengths"])
    if values is None or len(values) != num_samples:
        raise SchemaError(
            name,
            expected=f"{num_samples} values, one a sample, to compute advantages from",
            found="no such field" if values is None else f"{len(values)} values",
        )
    return list(values)
