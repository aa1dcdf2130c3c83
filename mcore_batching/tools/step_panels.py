"""The panels of a step's picture: passes over time, working stages over time, fill of slots.

Guarantees: every pass and every micro-batch is a patch with a `gid`, and has a line of text by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_batching.tools.timeline import RankTimeline, StepTimeline, TimedPass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED_CELLS = 200
STRIP_COLUMNS = 600

FORWARD = ("#3b6fb6", "#7ea6d9")
"""Of model chunks with even and odd numbers."""
BACKWARD = ("#d9762b", "#efae78")
IDLE = "#ededed"
PLACEHOLDER = "#ffffff"
OVER_CAP = "#d62728"


def draw_passes(
    axes: Axes,
    timeline: StepTimeline,
    shown: Sequence[tuple[str, RankTimeline]],
    tooltips: dict[str, str],
) -> None:
    """One row a stage, one box a pass; ranks below each other.

    Args:
        axes: an empty panel.
        timeline: the step.
        shown: ranks to draw and what to call them, from top to bottom.
        tooltips: gets a line of text for each pass, by its `gid`.
    """
    from matplotlib.patches import Rectangle

    stages = timeline.stages
    several_chunks = any(timed.chunk for _, rank in shown for timed in rank.passes)
    # About as wide as two digits, at this width of the figure.
    widest_digit = timeline.end / 150
    for number, (label, rank) in enumerate(shown):
        top = number * (stages + 0.8)
        axes.add_patch(
            Rectangle((0, top), timeline.end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
        )
        for timed in rank.passes:
            placeholder = rank.num_samples[timed.slot] == 0
            gid = f"pass-{rank.rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.backward:d}"
            axes.add_patch(
                Rectangle(
                    (timed.start, top + timed.stage + 0.06),
                    timed.end - timed.start,
                    0.88,
                    facecolor=PLACEHOLDER if placeholder else _colour(timed),
                    edgecolor="#888888" if placeholder else "white",
                    hatch="//////" if placeholder else None,
                    linewidth=0.4,
                    gid=gid,
                )
            )
            tooltips[gid] = _describe(rank, timed, several_chunks)
            if not placeholder and timed.end - timed.start > widest_digit:
                axes.text(
                    (timed.start + timed.end) / 2,
                    top + timed.stage + 0.52,
                    str(timed.slot),
                    fontsize=5.5,
                    color="white",
                    ha="center",
                    va="center",
                    clip_on=True,
                )
        for text, place, align in (
            (label, -0.035, "right"),
            (f"{rank.busy:.0%} busy", 1.005, "left"),
        ):
            axes.text(
                place,
                top + stages / 2,
                text,
                fontsize=8,
                ha=align,
                va="center",
                transform=axes.get_yaxis_transform(),
            )
    axes.set_ylim(len(shown) * (stages + 0.8) - 0.8, 0)
    axes.set_yticks(
        [n * (stages + 0.8) + stage + 0.5 for n in range(len(shown)) for stage in range(stages)],
        [f"stage {stage}" for _ in shown for stage in range(stages)],
        fontsize=5.5,
    )
    axes.tick_params(axis="y", length=0, pad=1)
    _without_frame(axes)


def _colour(timed: TimedPass) -> str:
    return (BACKWARD if timed.backward else FORWARD)[timed.chunk % 2]


def _describe(rank: RankTimeline, timed: TimedPass, several_chunks: bool) -> str:
    name = "backward" if timed.backward else "forward"
    chunk = f" chunk {timed.chunk}" if several_chunks else ""
    return (
        f"rank {rank.rank} stage {timed.stage}{chunk}: {name} of {_holds(rank, timed.slot)}, "
        f"{timed.start:.0f} to {timed.end:.0f}"
    )


def _holds(rank: RankTimeline, slot: int) -> str:
    samples = rank.num_samples[slot]
    if not samples:
        return f"slot {slot} (placeholder)"
    return f"slot {slot} ({some(samples, 'sample')}, {rank.tokens[slot]} tokens)"


def draw_strip(figure: Figure, axes: Axes, timeline: StepTimeline) -> None:
    """One row a rank: how many of its stages work at a time.

    Args:
        figure: that `axes` is of.
        axes: an empty panel.
        timeline: the step.
    """
    shares = [timeline.working_stages(r, STRIP_COLUMNS) for r in range(len(timeline.ranks))]
    drawn = axes.imshow(
        shares,
        aspect="auto",
        interpolation="nearest",
        cmap="Greens",
        vmin=0,
        vmax=1,
        extent=(0, timeline.end, len(shares) - 0.5, -0.5),
    )
    axes.set_ylabel("rank", fontsize=8)
    axes.tick_params(labelsize=7)
    _without_frame(axes)
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["idle", "half", "all stages"], fontsize=7)


def draw_fill(
    figure: Figure, axes: Axes, timeline: StepTimeline, cap: int, tooltips: dict[str, str]
) -> None:
    """Ranks by slots: padded tokens of each micro-batch over the cap.

    Args:
        figure: that `axes` is of.
        axes: an empty panel.
        timeline: the step.
        cap: most padded tokens of a micro-batch.
        tooltips: gets a line of text for each micro-batch, by its `gid`.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    fills = [[tokens / cap for tokens in rank.tokens] for rank in timeline.ranks]
    # A peer's plan, or an oversize sample, can be over the cap.
    shades = colormaps["viridis"].with_extremes(over=OVER_CAP)
    drawn = axes.imshow(fills, aspect="auto", cmap=shades, vmin=0, vmax=1)
    cells = len(fills) * len(fills[0])
    for row, rank in enumerate(timeline.ranks):
        for slot, fill in enumerate(fills[row]):
            gid = f"fill-{rank.rank}-{slot}"
            empty = not rank.num_samples[slot]
            axes.add_patch(
                Rectangle(
                    (slot - 0.5, row - 0.5),
                    1,
                    1,
                    facecolor=PLACEHOLDER if empty else "none",
                    edgecolor="#888888" if empty else "white",
                    hatch="//////" if empty else None,
                    linewidth=0.6 if cells <= 2 * MOST_NUMBERED_CELLS else 0,
                    gid=gid,
                )
            )
            tooltips[gid] = f"rank {rank.rank} {_holds(rank, slot)}: {fill:.0%} of the cap"
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
    axes.set_xlabel("slot (number of the micro-batch on its rank)")
    axes.set_ylabel("rank", fontsize=8)
    axes.set_title("padded tokens of each micro-batch, in % of the cap", fontsize=9, loc="left")
    axes.set_xticks(range(0, len(fills[0]), -(-len(fills[0]) // 24)))
    axes.set_yticks(range(0, len(fills), -(-len(fills) // 16)))
    axes.tick_params(labelsize=7, length=2)
    _without_frame(axes)
    over = "max" if max(map(max, fills)) > 1 else "neither"
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1], extend=over)
    bar.ax.set_yticklabels(["0 %", "50 %", "cap"], fontsize=7)


def some(count: int, noun: str) -> str:
    """A number of things, in the singular or the plural."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _without_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
