"""Packing time and bins of this package and of the linear scan, in one run.

    python tests/benchmarks/bench_packing.py [--sizes 1000 10000 100000]

Lengths are log-normal (median 2048, sigma 1) cut at the cap of 16384, from a fixed seed. Times are
processor times of one Python thread, the best of a few runs.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator

from mcore_batching.planning.packing.bounds import bin_lower_bound
from mcore_batching.planning.packing.packing import first_fit, first_fit_decreasing
from mcore_batching.tools.report import Table

CAP = 16384
Packer = Callable[[list[int], int], list[list[int]]]


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


def measured(sizes: list[int]) -> Iterator[tuple[str, ...]]:
    """Number of items, packer, seconds, bins and the least number of bins."""
    packers: list[tuple[str, Packer, int]] = [
        ("first_fit", first_fit, 3),
        ("first_fit_decreasing", first_fit_decreasing, 3),
        ("linear scan, first-fit", linear_scan, 1),
    ]
    for name, packer, runs in packers:
        times, bins = [], 0
        for _ in range(runs):
            started = time.process_time()
            bins = len(packer(sizes, CAP))
            times.append(time.process_time() - started)
        bound = bin_lower_bound(sizes, CAP)
        yield str(len(sizes)), name, f"{1000 * min(times):.1f} ms", str(bins), str(bound)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    rows: list[tuple[str, ...]] = []
    for count in parser.parse_args().sizes:
        draw = random.Random(0).lognormvariate
        rows += measured([max(1, min(CAP, round(draw(math.log(2048), 1)))) for _ in range(count)])
    columns = ("items", "packer", "time", "bins", "L2 bound")
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
