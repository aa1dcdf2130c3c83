"""The lower part of a step's picture: how full each micro-batch is, and which ranks share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import StepPlan
from mcore_batching.tools.pictures.timeline import RankTimeline, StepTimeline
from mcore_batching.tools.report import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED_CELLS = 200
"""Of more micro-batches the fill is a colour alone: at this width of the figure digits of twice as
many would overlap."""
BLOCK = "#e8a200"
OVER_CAP = "#d62728"
PLACEHOLDER: dict[str, Any] = {"facecolor": "#ffffff", "edgecolor": "#888888", "hatch": "//////"}


def draw_fill(
    figure: Figure, axes: Axes, timeline: StepTimeline, cap: int, tooltips: dict[str, str]
) -> None:
    """Ranks by slots: padded tokens of each micro-batch over the cap."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    fills = [[tokens / cap for tokens in rank.tokens] for rank in timeline.ranks]
    # Another framework's plan, or an oversize sample, can be over the cap.
    shades = colormaps["viridis"].with_extremes(over=OVER_CAP)
    # One image for the colours; the patches above it are transparent and carry the lines of text.
    drawn = axes.imshow(fills, aspect="auto", cmap=shades, vmin=0, vmax=1)
    cells = len(fills) * len(fills[0])
    for row, rank in enumerate(timeline.ranks):
        for slot, fill in enumerate(fills[row]):
            gid = f"fill-{rank.rank}-{slot}"
            empty = not rank.num_samples[slot]
            style: dict[str, Any] = {"facecolor": "none", "edgecolor": "white"}
            axes.add_patch(
                Rectangle(
                    (slot - 0.5, row - 0.5),
                    1,
                    1,
                    linewidth=0.6 if cells <= 2 * MOST_NUMBERED_CELLS else 0,
                    gid=gid,
                    **(PLACEHOLDER if empty else style),
                )
            )
            tooltips[gid] = f"rank {rank.rank} {slot_text(rank, slot)}: {fill:.0%} of the cap"
            if cells <= MOST_NUMBERED_CELLS and not empty:
                axes.text(
                    slot,
                    row,
                    f"{100 * fill:.0f}",
                    fontsize=6,
                    color="#222222" if 0.6 < fill <= 1 else "white",
                    ha="center",
                    va="center",
                )
    _label_fill(axes, fills)
    over = "max" if max(map(max, fills)) > 1 else "neither"  # an arrow on the bar, in red
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1], extend=over)
    bar.ax.set_yticklabels(["0 %", "50 %", "cap"], fontsize=7)


def draw_blocks(axes: Axes, step: StepPlan) -> None:
    """A frame round the ranks that share a micro-batch."""
    from matplotlib.patches import Rectangle

    for row in step.rows():
        if row.size > 1:
            axes.add_patch(
                Rectangle(
                    (row.slot - 0.46, row.rank - 0.46),
                    0.92,
                    row.size - 0.08,
                    linewidth=1.6,
                    facecolor="none",
                    edgecolor=BLOCK,
                    zorder=3,
                    gid=f"block-{row.rank}-{row.slot}",
                )
            )


def slot_text(rank: RankTimeline, slot: int) -> str:
    """A micro-batch in words: `slot 3 (2 samples, 900 tokens)`."""
    samples = rank.num_samples[slot]
    if not samples:
        return f"slot {slot} (placeholder)"
    shared = f" on {rank.sizes[slot]} ranks" if rank.sizes[slot] > 1 else ""
    return f"slot {slot} ({counted(samples, 'sample')}, {rank.tokens[slot]} tokens{shared})"


def without_frame(axes: Axes) -> None:
    """Leave out the lines round a part of the picture."""
    for side in axes.spines.values():
        side.set_visible(False)


def _label_fill(axes: Axes, fills: Sequence[Sequence[float]]) -> None:
    axes.set_xlabel("slot (number of the micro-batch on its rank)")
    axes.set_ylabel("rank", fontsize=8)
    axes.set_title("padded tokens of each micro-batch, in % of the cap", fontsize=9, loc="left")
    # At most 24 and 16 numbers, which fit beside each other.
    axes.set_xticks(range(0, len(fills[0]), -(-len(fills[0]) // 24)))
    axes.set_yticks(range(0, len(fills), -(-len(fills) // 16)))
    axes.tick_params(labelsize=7, length=2)
    without_frame(axes)
