"""The picture of a step: passes over time, working stages over time, fill of every micro-batch.

Up to `MOST_ROWS` stages over all ranks are drawn one row each. Beyond, the slowest, the median and
the fastest rank are drawn so, and every rank is one row of a strip that shows how many of its
stages work. Every pass and every micro-batch is a patch with a `gid` and a line of text. Times are
the predicted ones of `step_timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import CostModel, StepPlan, step_statistics
from mcore_batching.planning.pipeline import Kind, Operation
from mcore_batching.tools.picture import check_picture, save_figure
from mcore_batching.tools.report import counted, dims_line
from mcore_batching.tools.timeline import RankTimeline, StepTimeline, step_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 40
MOST_NUMBERED_CELLS = 200
STRIP_COLUMNS = 600
RANK_GAP = 0.8
"""Between two ranks, in rows."""
PASSES: dict[Kind, tuple[str, tuple[str, str]]] = {
    "F": ("forward", ("#3b6fb6", "#7ea6d9")),
    "B": ("backward", ("#d9762b", "#efae78")),
}
"""Names of passes, and their colours in model chunks with even and odd numbers."""
IDLE = "#ededed"
BLOCK = "#e8a200"
OVER_CAP = "#d62728"
PLACEHOLDER: dict[str, Any] = {"facecolor": "#ffffff", "edgecolor": "#888888", "hatch": "//////"}


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
    """The picture as a matplotlib figure.

    Arguments as in `draw_step`.

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
    heights = [0.16 * len(shown) * (timeline.stages + 1) + 0.5]
    if not in_full:
        heights.append(min(3.2, 0.06 * num_ranks + 0.6))
    heights.append(min(3.2, max(1.2, 0.2 * num_ranks + 0.5)))
    figure = Figure(figsize=(13, sum(heights) + 1.5), layout="constrained")
    axes = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    tooltips: dict[str, str] = {}
    _draw_passes(axes[0], timeline, shown, tooltips)
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
        cap = step.config.max_tokens_per_gpu
        _draw_blocks(axes[-1], step)
    _draw_fill(figure, axes[-1], timeline, cap, tooltips)
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
        axes.add_patch(
            Rectangle((0, top), timeline.end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
        )
        _draw_rank_passes(axes, timeline, rank, top, tooltips)
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
    axes.set_ylim(len(shown) * height - RANK_GAP, 0)
    axes.set_yticks(
        [n * height + stage + 0.5 for n in range(len(shown)) for stage in range(stages)],
        [f"stage {stage}" for _ in shown for stage in range(stages)],
        fontsize=5.5,
    )
    axes.tick_params(axis="y", length=0, pad=1)
    _without_frame(axes)


def _draw_rank_passes(
    axes: Axes, timeline: StepTimeline, rank: RankTimeline, top: float, tooltips: dict[str, str]
) -> None:
    """The boxes of one rank, whose first stage is the row at `top`."""
    from matplotlib.patches import Rectangle

    # About as wide as two digits, at this width of the figure.
    widest_digits = timeline.end / 150
    several_chunks = any(timed.chunk for timed in rank.passes)
    for timed in rank.passes:
        placeholder = rank.num_samples[timed.slot] == 0
        colour = PASSES[timed.kind][1][timed.chunk % 2]
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white"}
        gid = f"pass-{rank.rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}"
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
        f"rank {rank.rank} stage {timed.stage}{chunk}: {name} of {_slot_text(rank, timed.slot)}, "
        f"{timed.start:.0f} to {timed.end:.0f}"
    )


def _slot_text(rank: RankTimeline, slot: int) -> str:
    samples = rank.num_samples[slot]
    if not samples:
        return f"slot {slot} (placeholder)"
    shared = f" on {rank.sizes[slot]} ranks" if rank.sizes[slot] > 1 else ""
    return f"slot {slot} ({counted(samples, 'sample')}, {rank.tokens[slot]} tokens{shared})"


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
    _without_frame(axes)
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["idle", "half", "all stages"], fontsize=7)


def _draw_fill(
    figure: Figure, axes: Axes, timeline: StepTimeline, cap: int, tooltips: dict[str, str]
) -> None:
    """Ranks by slots: padded tokens of each micro-batch over the cap."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    fills = [[tokens / cap for tokens in rank.tokens] for rank in timeline.ranks]
    # Another framework's plan, or an oversize sample, can be over the cap.
    shades = colormaps["viridis"].with_extremes(over=OVER_CAP)
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
            tooltips[gid] = f"rank {rank.rank} {_slot_text(rank, slot)}: {fill:.0%} of the cap"
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
    over = "max" if max(map(max, fills)) > 1 else "neither"
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1], extend=over)
    bar.ax.set_yticklabels(["0 %", "50 %", "cap"], fontsize=7)


def _draw_blocks(axes: Axes, step: StepPlan) -> None:
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


def _label_fill(axes: Axes, fills: Sequence[Sequence[float]]) -> None:
    axes.set_xlabel("slot (number of the micro-batch on its rank)")
    axes.set_ylabel("rank", fontsize=8)
    axes.set_title("padded tokens of each micro-batch, in % of the cap", fontsize=9, loc="left")
    axes.set_xticks(range(0, len(fills[0]), -(-len(fills[0]) // 24)))
    axes.set_yticks(range(0, len(fills), -(-len(fills) // 16)))
    axes.tick_params(labelsize=7, length=2)
    _without_frame(axes)


def _add_legend(figure: Figure, step: StepPlan) -> None:
    from matplotlib.patches import Patch

    chunked = step.dims.virtual_pipeline > 1
    kinds = (", even chunk", ", odd chunk") if chunked else ("",)
    handles = [
        Patch(facecolor=colours[chunk], label=f"{name}{kind}")
        for name, colours in PASSES.values()
        for chunk, kind in enumerate(kinds)
    ]
    if step.context_parallel is not None:
        handles.append(Patch(facecolor="none", edgecolor=BLOCK, label="ranks that share a row"))
    handles += [Patch(facecolor=IDLE, label="idle"), Patch(label="placeholder", **PLACEHOLDER)]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=False)


def _without_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
