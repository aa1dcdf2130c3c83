"""Compares two logs of ``sft.sh``: with dynamic micro-batches, and padded.

    python examples/sft/sft_figure.py runs/sft

Reads ``dynamic.log`` and ``padded.log`` of the directory, prints how the runs differ, and draws
``comparison.png``: loss against consumed samples, and tokens computed per step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from sft_log import Iteration, LogError, read_log

STYLES: tuple[dict[str, Any], dict[str, Any]] = (
    {"label": "dynamic micro-batches", "color": "#2b6cb0", "linewidth": 2.2},
    {
        "label": "padded to --seq-length",
        "color": "#c05621",
        "linewidth": 1,
        "linestyle": "--",
        "marker": "o",
        "markersize": 4,
        "markerfacecolor": "none",
    },
)


def describe(dynamic: Sequence[Iteration], padded: Sequence[Iteration]) -> str:
    """Difference of two runs of the same job, in words.

    Raises:
        LogError: the runs did not take the same steps.
    """
    taken = [[(each.number, each.consumed_samples) for each in run] for run in (dynamic, padded)]
    if taken[0] != taken[1]:
        raise LogError(
            "the runs differ in their (iteration, consumed samples): "
            f"{taken[0]} against {taken[1]}; run both with the same arguments"
        )
    gap = max(abs(a.loss - b.loss) for a, b in zip(dynamic, padded, strict=True))
    tokens = [statistics.fmean(each.computed_tokens for each in run) for run in (dynamic, padded)]
    # The first step makes caches and buffers.
    seconds = [
        statistics.median(each.seconds for each in run[1:] or run) for run in (dynamic, padded)
    ]
    return (
        f"largest difference in loss over {len(dynamic)} steps: {gap:.1e} (logged to 7 digits)\n"
        f"tokens computed per step: {tokens[0]:,.0f} instead of {tokens[1]:,.0f}, "
        f"{tokens[1] / tokens[0]:.1f} times fewer\n"
        f"median step: {seconds[0]:.2f} s instead of {seconds[1]:.2f} s, "
        f"{seconds[1] / seconds[0]:.1f} times faster"
    )


def draw(dynamic: Sequence[Iteration], padded: Sequence[Iteration], out: Path) -> None:
    """Loss against consumed samples, and tokens computed per step.

    Args:
        dynamic: the run with dynamic micro-batches.
        padded: the run without.
        out: PNG file.
    """
    figure, (losses, tokens) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for run, style in zip((dynamic, padded), STYLES, strict=True):
        losses.plot([each.consumed_samples for each in run], [each.loss for each in run], **style)
        tokens.plot([each.number for each in run], [each.computed_tokens for each in run], **style)
    losses.set_title("loss", loc="left", fontsize=10)
    losses.set_xlabel("consumed samples")
    tokens.set_title("tokens computed per step", loc="left", fontsize=10)
    tokens.set_xlabel("iteration")
    tokens.xaxis.set_major_locator(MaxNLocator(integer=True))
    tokens.yaxis.set_major_formatter("{x:,.0f}")
    tokens.set_ylim(0)
    for axes in (losses, tokens):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compares two logs of sft.sh.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    try:
        dynamic, padded = (read_log(directory / f"{run}.log") for run in ("dynamic", "padded"))
        print(describe(dynamic, padded))
    except (LogError, OSError) as error:
        sys.exit(str(error))
    draw(dynamic, padded, directory / "comparison.png")
    print(directory / "comparison.png")


if __name__ == "__main__":
    main()
