"""Draws one optimizer step without and with dynamic micro-batches, from real plans.

    python examples/figures/step_figure.py

Above: every rank packs its own samples by first-fit and reaches the common number of micro-batches
with empty ones. Below: the plan of this package for the same samples and the same cap.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from mcore_batching import ParallelDims, PlannerConfig, StepPlan, plan_step

CAP_TOKENS = 4096
RANKS = 4
NUM_SAMPLES = 22
SHARES = (10, 6, 4, 2)
"""Samples that each data-parallel rank holds: rollouts rarely come in equal numbers."""


def lengths_of_samples(seed: int = 5) -> list[int]:
    """Log-normal lengths in tokens, none above the cap."""
    generator = random.Random(seed)
    return [
        max(64, min(CAP_TOKENS, round(generator.lognormvariate(6.9, 0.9))))
        for _ in range(NUM_SAMPLES)
    ]


def draw(axes: Axes, plan: StepPlan, lengths: list[int], title: str) -> None:
    """One row per rank, one box per micro-batch, one bar per sample."""
    colours = plt.get_cmap("tab20")
    for rank, micro_batches in enumerate(plan.micro_batches):
        for slot, micro_batch in enumerate(micro_batches):
            left = slot * CAP_TOKENS * 1.06
            axes.add_patch(
                Rectangle(
                    (left, rank + 0.1),
                    CAP_TOKENS,
                    0.8,
                    facecolor="white",
                    edgecolor="0.55",
                    linewidth=0.8,
                    hatch="" if micro_batch else "////",
                )
            )
            for sample in micro_batch:
                axes.add_patch(
                    Rectangle(
                        (left, rank + 0.1),
                        lengths[sample],
                        0.8,
                        facecolor=colours(sample % 20),
                        edgecolor="white",
                        linewidth=0.6,
                    )
                )
                left += lengths[sample]
    slots = plan.num_microbatches
    axes.set_xlim(-80, slots * CAP_TOKENS * 1.06)
    axes.set_ylim(RANKS, 0)
    axes.set_yticks([rank + 0.5 for rank in range(RANKS)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
    axes.set_xticks([(slot + 0.47) * CAP_TOKENS * 1.06 for slot in range(slots)])
    axes.set_xticklabels([f"slot {slot}" for slot in range(slots)])
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=10)
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    """Plan the step both ways and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("step.png"))
    out = parser.parse_args().out
    lengths = lengths_of_samples()
    owners = [rank for rank, share in enumerate(SHARES) for _ in range(share)]
    dims = ParallelDims(data_parallel=RANKS)
    as_it_falls = plan_step(
        lengths,
        dims,
        PlannerConfig(
            max_tokens_per_gpu=CAP_TOKENS, packing="first-fit", fill="placeholder", balance="none"
        ),
        owners=owners,
    )
    ours = plan_step(lengths, dims, PlannerConfig(max_tokens_per_gpu=CAP_TOKENS), owners=owners)
    figure, axes = plt.subplots(2, 1, figsize=(8, 4.8), layout="constrained")
    draw(
        axes[0],
        as_it_falls,
        lengths,
        "First-fit, then empty micro-batches up to the maximum (crashes, or wrong denominators)",
    )
    draw(
        axes[1],
        ours,
        lengths,
        "mcore_batching: same samples, same cap; split first, placeholders only where nothing "
        "is left to split",
    )
    figure.legend(
        handles=[
            Patch(facecolor="0.75", label="samples (one colour each)"),
            Patch(facecolor="white", edgecolor="0.55", label="room under the cap"),
            Patch(facecolor="white", edgecolor="0.55", hatch="////", label="no sample"),
        ],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main()
