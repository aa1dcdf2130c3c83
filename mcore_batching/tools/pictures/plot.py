"""The picture of a step: passes over time, working stages over time, fill of every micro-batch.

Up to `MOST_ROWS` stages over all ranks are drawn one row each. Beyond, the slowest, the median and
the fastest rank are drawn so, and every rank is one row of a strip that shows how many of its
stages work. Times are the predicted ones of `step_timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import CostModel, StepPlan, step_statistics
from mcore_batching.planning.pipeline import Kind, Operation
from mcore_batching.tools.pictures.picture import check_picture, save_figure
from mcore_batching.tools.pictures.plot_fill import (
    BLOCK,
    PLACEHOLDER,
    draw_blocks,
    draw_fill,
    slot_text,
    without_frame,
)
from mcore_batching.tools.pictures.timeline import RankTimeline, StepTimeline, step_timeline
from mcore_batching.tools.report import counted, dims_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 40
"""Stages that fit on a screen at a readable height."""
STRIP_COLUMNS = 600
"""Parts of the step in a strip: about three pixels of a .png each."""
RANK_GAP = 0.8
"""Between two ranks, in rows."""
PASSES: dict[Kind, tuple[str, tuple[str, str]]] = {
    "F": ("forward", ("#3b6fb6", "#7ea6d9")),
    "B": ("backward", ("#d9762b", "#efae78")),
    "W": ("weight gradients", ("#4f9a5b", "#94c79c")),
}
"""Names of passes, and their colours in model chunks with even and odd numbers."""
IDLE = "#ededed"


def draw_step(
    step: StepPlan,
    lengths: Sequence[int],
    path: str | Path,
    *,
    cost_model: CostModel | None = None,
    title: str | None = None,
) -> None:
    """Draw one step into a file.

    Args:
        step: a plan that covers its samples; it may be over the cap.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        path: .png, .svg or .html.
        cost_model: the plan's own if None.
        title: first line; the parallel dims and the cap if None.

    Raises:
        PlotError: see `check_picture`, or the file cannot be written.
    """
    check_picture(path)
    figure, tooltips = step_figure(step, lengths, cost_model=cost_model, title=title)
    save_figure(figure, path, tooltips)


def step_figure(
    step: StepPlan,
    lengths: Sequence[int],
    *,
    cost_model: CostModel | None = None,
    title: str | None = None,
) -> tuple[Figure, dict[str, str]]:
    """The picture as a matplotlib figure; arguments as in `draw_step`.

    Returns:
        the figure, and a line of text for each drawn pass and micro-batch by its `gid`.
    """
    from matplotlib.figure import Figure

    timeline = step_timeline(step, lengths, cost_model)
    statistics = step_statistics(step, lengths, cost_model)
    num_ranks = len(timeline.ranks)
    in_full = num_ranks * timeline.stages <= MOST_ROWS
    if in_full:
        shown = [(f"rank {rank.rank}", rank) for rank in timeline.ranks]
    else:
        shown = [(f"{name}\nrank {rank.rank}", rank) for name, rank in timeline.extremes().items()]
    # Inches of each part: passes by their rows, the strip and the fill by ranks, within bounds.
    heights = [0.16 * len(shown) * (timeline.stages + 1) + 0.5]
    if not in_full:
        heights.append(min(3.2, 0.06 * num_ranks + 0.6))
    heights.append(min(3.2, max(1.2, 0.2 * num_ranks + 0.5)))
    figure = Figure(figsize=(13, sum(heights) + 1.5), layout="constrained")
    axes = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    tooltips: dict[str, str] = {}
    _draw_passes(axes[0], timeline, shown, tooltips)
    # The parts above the fill share the axis of time, and the line of the floor.
    for drawn in axes[:-1]:
        drawn.axvline(statistics.floor_time, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
        drawn.set_xlim(0, timeline.end * 1.002 or 1.0)
    if not in_full:
        _draw_strip(figure, axes[1], timeline)
        axes[0].tick_params(axis="x", labelbottom=False)
    axes[-2].set_xlabel("predicted time, in units of cost (dashed: no plan ends before)")
    axes[-2].tick_params(axis="x", labelsize=7)
    axes[-2].xaxis.set_major_formatter("{x:,.0f}")
    cap = step.config.cap_tokens(step.dims)
    if step.context_parallel is not None:
        cap = step.config.max_tokens_per_gpu  # the timeline has each rank's part of a shared row
        draw_blocks(axes[-1], step)
    draw_fill(figure, axes[-1], timeline, cap, tooltips)
    summary = (
        f"{counted(statistics.num_samples, 'sample')}, "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank, "
        f"{counted(statistics.num_placeholders, 'placeholder')}; the step ends at "
        f"{statistics.time_over_floor:.3f} x the floor, stages work {timeline.busy:.0%} of it"
    )
    title = title or dims_line(step.dims, step.config)
    figure.suptitle(f"{title}\n{summary}", fontsize=11, x=0.01, ha="left")
    _add_legend(figure, step)
    return figure, tooltips


def _draw_passes(
    axes: Axes,
    timeline: StepTimeline,
    shown: Sequence[tuple[str, RankTimeline]],
    tooltips: dict[str, str],
) -> None:
    """One row per stage, one box per pass; the ranks of `shown`, with their labels, top down."""
    from matplotlib.patches import Rectangle

    stages = timeline.stages
    height = stages + RANK_GAP
    for number, (label, rank) in enumerate(shown):
        top = number * height
        # Idle is the background: passes cover all of a row but the bubble.
        axes.add_patch(
            Rectangle((0, top), timeline.end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
        )
        _draw_rank_passes(axes, timeline, rank, top, tooltips)
        for text, place, align in (
            (label, -0.035, "right"),
            (f"{rank.busy:.0%} busy", 1.005, "left"),
        ):
            # Beside the axes in x (shares of their width), at the rank's rows in y.
            axes.text(
                place,
                top + stages / 2,
                text,
                fontsize=8,
                ha=align,
                va="center",
                transform=axes.get_yaxis_transform(),
            )
    axes.set_ylim(len(shown) * height - RANK_GAP, 0)  # the first rank on top
    axes.set_yticks(
        [n * height + stage + 0.5 for n in range(len(shown)) for stage in range(stages)],
        [f"stage {stage}" for _ in shown for stage in range(stages)],
        fontsize=5.5,
    )
    axes.tick_params(axis="y", length=0, pad=1)
    without_frame(axes)


def _draw_rank_passes(
    axes: Axes, timeline: StepTimeline, rank: RankTimeline, top: float, tooltips: dict[str, str]
) -> None:
    """The boxes of one rank, whose first stage is the row at `top`."""
    from matplotlib.patches import Rectangle

    # About as wide as two digits, at this width of the figure.
    widest_digits = timeline.end / 150
    several_chunks = any(timed.chunk for timed in rank.passes)
    for number, timed in enumerate(rank.passes):
        placeholder = rank.num_samples[timed.slot] == 0
        colour = PASSES[timed.kind][1][timed.chunk % 2]
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white"}
        # An .svg keeps the gid as the group's id, by which a page finds its line of text.
        gid = f"pass-{rank.rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}"
        if timed.kind == "W":
            gid += f"-{number}"  # one W may run in several pieces
        axes.add_patch(
            Rectangle(
                (timed.start, top + timed.stage + 0.06),
                timed.end - timed.start,
                0.88,
                linewidth=0.4,
                gid=gid,
                **(PLACEHOLDER if placeholder else style),
            )
        )
        tooltips[gid] = _pass_text(rank, timed, several_chunks)
        if not placeholder and timed.end - timed.start > widest_digits:
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


def _pass_text(rank: RankTimeline, timed: Operation, several_chunks: bool) -> str:
    name, _ = PASSES[timed.kind]
    chunk = f" chunk {timed.chunk}" if several_chunks else ""
    return (
        f"rank {rank.rank} stage {timed.stage}{chunk}: {name} of {slot_text(rank, timed.slot)}, "
        f"{timed.start:.0f} to {timed.end:.0f}"
    )


def _draw_strip(figure: Figure, axes: Axes, timeline: StepTimeline) -> None:
    """One row per rank: the share of its stages that work, over time."""
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
    without_frame(axes)
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["idle", "half", "all stages"], fontsize=7)


def _add_legend(figure: Figure, step: StepPlan) -> None:
    from matplotlib.patches import Patch

    chunked = step.dims.virtual_pipeline > 1
    # Chunks alternate between two colours: more could not be told apart.
    kinds = (", even chunk", ", odd chunk") if chunked else ("",)
    drawn = [PASSES[kind] for kind in PASSES if kind != "W" or step.split_backward]
    handles = [
        Patch(facecolor=colours[chunk], label=f"{name}{kind}")
        for name, colours in drawn
        for chunk, kind in enumerate(kinds)
    ]
    if step.context_parallel is not None:
        handles.append(Patch(facecolor="none", edgecolor=BLOCK, label="ranks that share a row"))
    handles += [Patch(facecolor=IDLE, label="idle"), Patch(label="placeholder", **PLACEHOLDER)]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=False)
