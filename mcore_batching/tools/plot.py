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

from mcore_batching.planning import CostModel, PlanningError, StepPlan, step_statistics
from mcore_batching.tools import report
from mcore_batching.tools.picture_page import picture_page
from mcore_batching.tools.step_panels import (
    BACKWARD,
    FORWARD,
    IDLE,
    PLACEHOLDER,
    draw_fill,
    draw_passes,
    draw_strip,
    some,
)
from mcore_batching.tools.timeline import RankTimeline, StepTimeline, step_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
MOST_ROWS = 40


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
    draw_passes(axes[0], timeline, shown, tooltips)
    for drawn in axes[:-1]:
        drawn.axvline(statistics.floor_time, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
        drawn.set_xlim(0, timeline.end * 1.002 or 1.0)
    if not in_full:
        draw_strip(figure, axes[1], timeline)
        axes[0].tick_params(axis="x", labelbottom=False)
    axes[-2].set_xlabel("predicted time, in units of cost (dashed: no plan ends before)")
    axes[-2].tick_params(axis="x", labelsize=7)
    axes[-2].xaxis.set_major_formatter("{x:,.0f}")
    draw_fill(figure, axes[-1], timeline, step.config.cap_tokens(step.dims), tooltips)
    figure.suptitle(
        f"{title or report.layout_line(step.dims, step.config)}\n"
        f"{some(statistics.num_samples, 'sample')}, "
        f"{some(step.num_microbatches, 'micro-batch')} a rank, "
        f"{some(statistics.num_placeholders, 'placeholder')}; the step ends at "
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


def _add_legend(figure: Figure, step: StepPlan) -> None:
    from matplotlib.patches import Patch

    chunked = step.dims.virtual_pipeline > 1
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


def _as_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
