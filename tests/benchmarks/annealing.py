"""What both tables of best known ends share: the file of ends, and the compiled annealer."""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Slots = list[list[list[int]]]
"""Samples [ranks][slots]."""


class KnownEnds:
    """The soonest end known of each case, and its number of micro-batches.

    Args:
        file: JSON, one object a case, in this folder.
        names: of the values that tell cases apart.
    """

    def __init__(self, file: str, names: Sequence[str]) -> None:
        self._path, self._names = HERE / file, (*names, "end", "num_microbatches")
        self._ends: dict[tuple[Any, ...], tuple[float, int]] = {}
        for row in json.loads(self._path.read_text(encoding="utf-8")):
            *case, end, count = (row[name] for name in self._names)
            self._ends[tuple(case)] = end, count

    def __getitem__(self, case: tuple[Any, ...]) -> tuple[float, int]:
        return self._ends[case]

    def note(self, case: tuple[Any, ...], end: float, count: int) -> None:
        """Write an end to the file if it is sooner than the known one."""
        if case in self._ends and end >= self._ends[case][0]:
            return
        self._ends[case] = end, count
        rows = [
            json.dumps(dict(zip(self._names, (*each, *found), strict=True)), ensure_ascii=False)
            for each, found in self._ends.items()
        ]
        self._path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


@functools.cache
def compiled(source: str) -> Any:
    """The function ``anneal`` of a C file in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "anneal.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(HERE / source), "-o", str(built), "-lm"], check=True)
        function = ctypes.CDLL(str(built)).anneal
    function.restype = ctypes.c_double
    return function


def doubles(values: Iterable[float]) -> Any:
    """A C array."""
    listed = list(values)
    return (ctypes.c_double * len(listed))(*listed)


def with_empty_slots(ranks: Sequence[Sequence[Sequence[int]]], number: int) -> Slots:
    """The same rows with further empty slots in the rise of the profile."""
    at = len(ranks[0]) // 4
    return [
        [*map(list, rank[:at]), *([] for _ in range(number)), *map(list, rank[at:])]
        for rank in ranks
    ]
