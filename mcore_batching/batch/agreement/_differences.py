"""The ranks that say something else than most, in words.

{0: {"cap": "8"}, 1: {"cap": "8"}, 2: {"cap": "9"}}    {2: "cap is 9, on rank 0 it is 8"}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mcore_batching.batch.errors import CollectiveError, readable


def require_equal(said: Mapping[int, Mapping[str, str]], mismatch: type[CollectiveError]) -> None:
    """Raise `mismatch` if any values by rank and name differ."""
    failures = differences(said)
    if failures:
        raise mismatch(failures)


def differences(said: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """For each rank with another value than most: the names, its values and the usual ones."""
    failures: dict[int, list[str]] = {}
    for name in sorted({name for values in said.values() for name in values}):
        by_rank = {rank: values[name] for rank, values in said.items() if name in values}
        usual = Counter(by_rank.values()).most_common(1)[0][0]  # ties: the first rank's
        # A rank to look at: "on rank 0 it is 8" can be checked in its log.
        witness = next(rank for rank, value in by_rank.items() if value == usual)
        for rank, value in by_rank.items():
            if value != usual:
                failures.setdefault(rank, []).append(
                    f"{name} is {value}, on rank {witness} it is {usual}"
                )
    return {rank: readable("; ".join(texts)) for rank, texts in failures.items()}
