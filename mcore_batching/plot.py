"""Draws a step: the pipeline's time line and how full every micro-batch is.

Up to `MOST_ROWS` stages over all ranks are drawn one row each. Beyond, the slowest, the median and
the fastest rank are drawn so, and every rank is one row of a strip that shows how many of its
stages work.

Guarantees: matplotlib is imported only to draw; the picture shows the predicted times of
`step_timeline` and nothing measured; an .html picture needs no other file and no network.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_batching import report
from mcore_batching.picture_page import picture_page
from mcore_batching.planning import CostModel, PlanningError, StepPlan, step_statistics
from mcore_batching.timeline import RankTimeline, StepTimeline, TimedPass, step_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
MOST_ROWS = 40
MOST_NUMBERED_CELLS = 200
STRIP_COLUMNS = 600

FORWARD = ("#3b6fb6", "#7ea6d9")
"""Of model chunks with even and odd numbers."""
BACKWARD = ("#d9762b", "#efae78")
IDLE = "#ededed"
PLACEHOLDER = "#ffffff"
OVER_CAP = "#d62728"


class PlotError(PlanningError):
    """A picture that cannot be drawn as asked."""


def check_picture(path: str | Path) -> None:
    """Whether a picture of this name could be drawn here; to be asked before long work.

    Raises:
        PlotError: an ending that is none of `FORMATS`, or no matplotlib.
    """
    if Path(path).suffix not in FORMATS:
        raise PlotError(f"a picture must end in {', '.join(FORMATS)}, got {path}; set --plot so")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(
            "drawing needs matplotlib, which is not installed; pip install 'mcore_batching[plot]'"
        ) from None


def draw_step(
    step: StepPlan,
    lengths: Sequence[int],
    path: str | Path,
    *,
    cost_model: CostModel | None = None,
    title: str | None = None,
) -> None:
    """Draw one step.

    Args:
        step: a plan that covers its samples; it may be over the cap.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        path: .png, .svg or .html.
        cost_model: the plan's own if None.
        title: what is drawn; the layout if None.

    Raises:
        PlotError: see `check_picture`, or the file cannot be written.
    """
    check_picture(path)
    figure, tooltips = step_figure(step, lengths, cost_model=cost_model, title=title)
    save_figure(figure, path, tooltips)


def save_figure(figure: Figure, path: str | Path, tooltips: Mapping[str, str]) -> None:
    """Write a figure to a file of one of `FORMATS`.

    Args:
        figure: what to write.
        path: where to.
        tooltips: text for what has this `gid` in the figure, on a page.

    Raises:
        PlotError: the file cannot be written.
    """
    path = Path(path)
    try:
        if path.suffix == ".html":
            path.write_text(picture_page(_as_svg(figure), tooltips), encoding="utf-8")
        elif path.suffix == ".svg":
            path.write_text(_as_svg(figure), encoding="utf-8")
        else:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error}; set --plot to a writable file") from None


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
    shown = _shown_ranks(timeline, in_full)
    rows = len(shown) * (timeline.stages + 1)
    heights = [0.16 * rows + 0.5]
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
    _draw_fill(figure, axes[-1], timeline, step.config.cap_tokens(step.layout), tooltips)
    figure.suptitle(
        f"{title or report.layout_line(step.layout, step.config)}\n"
        f"{_some(statistics.num_samples, 'sample')}, "
        f"{_some(step.num_microbatches, 'micro-batch')} a rank, "
        f"{_some(statistics.num_placeholders, 'placeholder')}; the step ends at "
        f"{statistics.time_over_floor:.3f} x the floor, stages work {timeline.busy:.0%} of it",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    _add_legend(figure, step)
    return figure, tooltips


def _shown_ranks(timeline: StepTimeline, in_full: bool) -> list[tuple[str, RankTimeline]]:
    if in_full:
        return [(f"rank {rank.rank}", rank) for rank in timeline.ranks]
    return [(f"{name}\nrank {rank.rank}", rank) for name, rank in timeline.extremes().items()]


def _draw_passes(
    axes: Axes,
    timeline: StepTimeline,
    shown: Sequence[tuple[str, RankTimeline]],
    tooltips: dict[str, str],
) -> None:
    """One row a stage, one box a pass; ranks below each other."""
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
    return f"slot {slot} ({_some(samples, 'sample')}, {rank.tokens[slot]} tokens)"


def _draw_strip(figure: Figure, axes: Axes, timeline: StepTimeline) -> None:
    """One row a rank: how many of its stages work at a time."""
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


def _add_legend(figure: Figure, step: StepPlan) -> None:
    from matplotlib.patches import Patch

    chunked = step.layout.virtual_pipeline > 1
    kinds = (", even chunk", ", odd chunk") if chunked else ("",)
    handles = [
        Patch(facecolor=colours[chunk], label=f"{name}{kind}")
        for name, colours in (("forward", FORWARD), ("backward", BACKWARD))
        for chunk, kind in enumerate(kinds)
    ]
    handles += [
        Patch(facecolor=IDLE, label="idle"),
        Patch(facecolor=PLACEHOLDER, edgecolor="#888888", hatch="//////", label="placeholder"),
    ]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=False)


def _some(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _without_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_visible(False)


def _as_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
