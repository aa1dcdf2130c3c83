"""Draws one optimizer step of the same samples under the same cap, planned twice.

    python examples/figures/step_figure.py

Above: micro-batches packed full and ranks balanced by tokens, as frameworks do. Below: the plan of
this package. Both on one axis of predicted time, by the same costs.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mcore_batching import ParallelDims, PlannerConfig, plan_step
from mcore_batching.planning.clock import Operation
from mcore_batching.tools.picture import PASSES, step_passes

CAP_TOKENS = 8192
NUM_SAMPLES = 64
DIMS = ParallelDims(data_parallel=2, pipeline_parallel=4)


def lengths_of_samples(seed: int = 5) -> list[int]:
    """Log-normal lengths in tokens, none above the cap."""
    generator = random.Random(seed)
    return [
        max(64, min(CAP_TOKENS, round(generator.lognormvariate(6.9, 0.9))))
        for _ in range(NUM_SAMPLES)
    ]


def planned(balance: str) -> list[list[Operation]]:
    """Each rank's passes under a plan made for `balance`."""
    lengths = lengths_of_samples()
    config = PlannerConfig(max_tokens_per_gpu=CAP_TOKENS, balance=balance)
    return step_passes(plan_step(lengths, DIMS, config), lengths)


def end_of(ranks: list[list[Operation]]) -> float:
    """The end of the step, in units of cost."""
    return max(timed.end for passes in ranks for timed in passes)


def draw(axes: Axes, ranks: list[list[Operation]], unit: float, title: str) -> None:
    """One row per stage of each rank, a bar per pass with its micro-batch's number."""
    stages = DIMS.pipeline_parallel
    tops = [rank * (stages + 0.6) for rank in range(len(ranks))]
    for top, passes in zip(tops, ranks, strict=True):
        for timed in passes:
            start, width = timed.start / unit, (timed.end - timed.start) / unit
            _, (colour, *_) = PASSES[timed.kind]
            row = top + timed.stage
            axes.barh(row, width, 0.86, start, color=colour, edgecolor="white", linewidth=0.5)
            if width > 2.0:
                place = (start + width / 2, row)
                axes.annotate(
                    str(timed.slot), place, color="white", fontsize=6, ha="center", va="center"
                )
    end, work = end_of(ranks) / unit, sum(p.end - p.start for own in ranks for p in own) / unit
    busy = work / (end * stages * len(ranks))
    axes.axvline(end, color="black", linewidth=1, linestyle="--")
    axes.set_title(f"{title}: ends at {end:.0f}, stages work {busy:.0%}", fontsize=10)
    axes.invert_yaxis()
    ticks = [top + (stages - 1) / 2 for top in tops]
    axes.set_yticks(ticks, [f"rank {rank}\n4 stages" for rank in range(len(ranks))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def main() -> None:
    """Plan the step both ways and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("step.png"))
    out = parser.parse_args().out
    theirs, ours = planned("tokens"), planned("auto")
    unit = end_of(theirs) / 100
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.6), sharex=True, layout="constrained")
    draw(above, theirs, unit, "micro-batches packed full, ranks balanced by tokens")
    draw(below, ours, unit, "mcore_batching, same samples and cap")
    below.set_xlabel("predicted time")
    handles = [Patch(color=PASSES[kind][1][0], label=PASSES[kind][0]) for kind in ("F", "B")]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main()
