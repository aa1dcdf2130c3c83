"""Packing time and bins of this package, the linear scan, and TRL's best-fit, in one run.

    python tests/benchmarks/bench_packing.py [--sizes 1000 10000 100000] [--json OUT]

Lengths are log-normal (median 2048, sigma 1) cut at the cap of 16384, from a fixed seed. Times are
the best of a few runs of one Python thread. TRL is measured where it is installed (`pip install
trl`), twice: its segment tree alone, driven by a loop that finds the same bins, which is what
compares with the other rows; and its whole packer, which also moves the tokens (here of Arrow's
null type, the cheapest there is).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from mcore_batching.planning import bin_lower_bound, first_fit, first_fit_decreasing
from mcore_batching.tools.report import Table, print_table

CAP = 16384
Packer = Callable[[], int]


def log_normal_lengths(count: int, seed: int = 0) -> list[int]:
    """Lengths in tokens [count] with median 2048 and sigma 1, none over the cap."""
    generator = random.Random(seed)
    return [
        max(1, min(CAP, round(generator.lognormvariate(math.log(2048), 1)))) for _ in range(count)
    ]


def linear_scan(sizes: list[int], capacity: int) -> list[list[int]]:
    """First-fit as the textbook has it: look at every open bin."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item, size in enumerate(sizes):
        for index, room in enumerate(free):
            if room >= size:
                bins[index].append(item)
                free[index] = room - size
                break
        else:
            bins.append([item])
            free.append(capacity - size)
    return bins


def trl_packers(sizes: list[int]) -> dict[str, Packer | None]:
    """TRL's best-fit on these sizes by name; None where it is not installed."""
    try:
        import pyarrow
        from trl.data_utils import _pack_bfd, _SegmentTree
    except ImportError as error:
        return {f"TRL best-fit, not measured: {error}": None}

    def search() -> int:
        spaces = _SegmentTree(CAP)
        spaces.add(CAP)
        with_space: defaultdict[int, list[list[int]]] = defaultdict(list)
        bins: list[list[int]] = []
        for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            size = sizes[item]
            space = spaces.search(size)
            if space == CAP:
                chosen: list[int] = []
                bins.append(chosen)
            else:
                chosen = with_space[space].pop()
                if not with_space[space]:
                    spaces.remove(space)
            chosen.append(item)
            if space > size:
                with_space[space - size].append(chosen)
                spaces.add(space - size)
        return len(bins)

    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    tokens = pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets, pyarrow.int32()), pyarrow.nulls(offsets[-1])
    )
    table = pyarrow.table({"tokens": tokens})
    version = metadata.version("trl")
    return {
        f"TRL {version} best-fit, search alone": search,
        f"TRL {version} best-fit, whole packer": lambda: len(_pack_bfd(table, CAP)),
    }


def best_of(packer: Packer, repeats: int) -> tuple[float, int]:
    """Least wall time in seconds over `repeats` runs, and the number of bins."""
    times, bins = [], 0
    for _ in range(repeats):
        start = time.perf_counter()
        bins = packer()
        times.append(time.perf_counter() - start)
    return min(times), bins


def measure(count: int) -> list[dict[str, Any]]:
    """One record a packer for `count` lengths."""
    sizes = log_normal_lengths(count)
    if first_fit(sizes[:5000], CAP) != linear_scan(sizes[:5000], CAP):
        raise RuntimeError("first_fit differs from the linear scan: its time means nothing")
    repeats = 3 if count > 20_000 else 7
    packers: list[tuple[str, Packer | None, int]] = [
        ("first_fit", lambda: len(first_fit(sizes, CAP)), repeats),
        ("first_fit_decreasing", lambda: len(first_fit_decreasing(sizes, CAP)), repeats),
        ("linear scan, first-fit", lambda: len(linear_scan(sizes, CAP)), 1),
        *((name, packer, repeats) for name, packer in trl_packers(sizes).items()),
    ]
    bound = bin_lower_bound(sizes, CAP)
    records = []
    for name, packer, runs in packers:
        seconds, bins = best_of(packer, runs) if packer else (None, None)
        records.append(
            {"packer": name, "items": count, "seconds": seconds, "bins": bins, "bound": bound}
        )
    return records


def as_table(records: list[dict[str, Any]]) -> Table:
    """Times, and each packer's time over that of `first_fit_decreasing` on the same lengths."""
    reference = {
        record["items"]: record["seconds"]
        for record in records
        if record["packer"] == "first_fit_decreasing"
    }
    rows = []
    for record in records:
        seconds = record["seconds"]
        measured = (
            ("-", "-", "-")
            if seconds is None
            else (
                f"{1000 * seconds:.2f} ms",
                f"{seconds / reference[record['items']]:.2f}",
                str(record["bins"]),
            )
        )
        rows.append((str(record["items"]), record["packer"], *measured, str(record["bound"])))
    return Table(
        columns=("items", "packer", "time", "over ours (FFD)", "bins", "L2 bound"),
        rows=tuple(rows),
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the records here")
    options = parser.parse_args()
    records = [record for count in options.sizes for record in measure(count)]
    print(f"Python {platform.python_version()}, {platform.machine()}, cap {CAP} tokens")
    print_table(as_table(records), sys.stdout)
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
