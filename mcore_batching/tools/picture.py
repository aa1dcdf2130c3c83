"""The picture of a step: its passes over time, one row per stage.

Up to `MOST_ROWS` stages over all ranks are drawn; beyond, those of the slowest, the median and the
fastest rank. Times are the predicted ones of `step_timeline`. matplotlib is imported only to draw.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import MCoreBatchingError, StepPlan, WeighedStep, step_statistics
from mcore_batching.planning.clock import Operation
from mcore_batching.planning.files import write_whole
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.schedule import Kind, Pass, Schedule
from mcore_batching.tools.report import dims_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MOST_ROWS = 40  # stages that fit on a screen at a readable height
# Names of passes, and their colours in model chunks with even and odd numbers.
PASSES: dict[Kind, tuple[str, tuple[str, str]]] = {
    "F": ("forward", ("#3b6fb6", "#7ea6d9")),
    "B": ("backward", ("#d9762b", "#efae78")),
}
IDLE = "#ededed"
SHARED: dict[str, Any] = {"edgecolor": "#111111", "linewidth": 1.0}
PLACEHOLDER: dict[str, Any] = {"facecolor": "#ffffff", "edgecolor": "#888888", "hatch": "//////"}


class PlotError(MCoreBatchingError, ValueError):
    """A picture that cannot be drawn."""


def check_picture(path: str | Path) -> None:
    """Check, before long work, that a picture of this name could be drawn."""
    if Path(path).suffix not in FORMATS:
        raise PlotError(f"expected a name that ends in {' or '.join(FORMATS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("drawing needs matplotlib; pip install 'mcore_batching[plot]'") from None


def draw_step(step: StepPlan, lengths: Sequence[int], path: str | Path) -> None:
    """Draw one step into a .png or .svg file; its plan may be over the cap."""
    check_picture(path)
    import matplotlib

    figure = step_figure(step, lengths)
    ending, picture = Path(path).suffix[1:], io.BytesIO()
    # No date and no random ids: the same figure gives the same text.
    metadata = {"Date": None} if ending == "svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(picture, format=ending, dpi=150, metadata=metadata)
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}; name another file") from error


def step_figure(step: StepPlan, lengths: Sequence[int]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    timeline, statistics = step_timeline(step, lengths), step_statistics(step, lengths)
    shown = [(f"rank {rank.rank}", rank) for rank in timeline.ranks]
    if len(shown) * timeline.stages > MOST_ROWS:
        shown = [(f"{name}\nrank {rank.rank}", rank) for name, rank in timeline.extremes().items()]
    # Inches, by the rows.
    height = 0.16 * len(shown) * (timeline.stages + 1) + 1.5
    figure = Figure(figsize=(13, height), layout="constrained")
    axes = figure.subplots()
    rows = timeline.stages + 0.8  # and a gap
    for number, (label, rank) in enumerate(shown):
        _draw_rank(axes, step, timeline, rank, label, number * rows)
    axes.set_ylim(len(shown) * rows, 0)  # the first one on top
    axes.axvline(statistics.floor_time, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlim(0, timeline.end * 1.002 or 1.0)
    axes.set_xlabel(
        "predicted time, in units of cost (a row per stage; dashed: no plan ends before)"
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    summary = (
        f"{counted(statistics.num_samples, 'sample')}, "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank, "
        f"{counted(statistics.num_placeholders, 'placeholder')}; the step ends at "
        f"{statistics.time_over_floor:.3f} x the floor, stages work {timeline.busy:.0%} of it"
    )
    title = dims_line(step.dims, step.config)
    figure.suptitle(f"{title}\n{summary}", fontsize=11, x=0.01, ha="left")
    _add_legend(figure, step)
    return figure


def _draw_rank(
    axes: Axes, step: StepPlan, timeline: StepTimeline, rank: RankTimeline, label: str, top: float
) -> None:
    """One row per stage, one box per pass; the rank's first stage is the row at `top`."""
    stages = timeline.stages
    # Idle is the background: passes cover all of a row but the bubble.
    _add_box(axes, (0, top), timeline.end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
    # About as wide as two digits, at this width of the figure.
    widest_digits = timeline.end / 150
    for timed in rank.passes:
        width, row = timed.end - timed.start, top + timed.stage
        is_placeholder = step.micro_batches[rank.rank][timed.slot] == ()
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
        style["facecolor"] = PASSES[timed.kind][1][timed.chunk % 2]
        if is_placeholder:
            style |= PLACEHOLDER
        elif step.context_parallel is not None and step.row_size(rank.rank, timed.slot) > 1:
            style |= SHARED
        gid = f"pass-{rank.rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}"
        _add_box(axes, (timed.start, row + 0.06), width, 0.88, gid=gid, **style)
        if not is_placeholder and width > widest_digits:
            place = (timed.start + width / 2, row + 0.52)
            middle: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            axes.text(*place, str(timed.slot), color="white", fontsize=5.5, **middle)
    # Beside the axes in x (shares of their width), at the rank's rows in y.
    beside = axes.get_yaxis_transform()
    for text, x, align in ((label, -0.005, "right"), (f"{rank.busy:.0%} busy", 1.005, "left")):
        place = (x, top + stages / 2)
        axes.text(*place, text, fontsize=8, ha=align, va="center", transform=beside)


def _add_box(
    axes: Axes, corner: tuple[float, float], width: float, height: float, **style: Any
) -> None:
    """A rectangle."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, height, **style))


def _add_legend(figure: Figure, step: StepPlan) -> None:
    from matplotlib.patches import Patch

    # Chunks alternate between two colours: more could not be distinguished.
    kinds = (", even chunk", ", odd chunk") if step.dims.virtual_pipeline > 1 else ("",)
    handles = [
        Patch(facecolor=colour, label=f"{name}{which}")
        for name, colours in PASSES.values()
        for which, colour in zip(kinds, colours, strict=False)
    ]
    if step.context_parallel is not None:
        handles.append(Patch(facecolor="none", label="ranks share a row", **SHARED))
    handles += [Patch(facecolor=IDLE, label="idle"), Patch(label="placeholder", **PLACEHOLDER)]
    # Below: above, it would cover a long title.
    place = "outside lower left"
    figure.legend(handles=handles, loc=place, ncols=len(handles), fontsize=8, frameon=False)


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    # Stage after stage, each in the order it runs. With expert parallelism a pass ends with this
    # rank's own work, before its slot does.
    passes: tuple[Operation, ...]
    busy: float  # share of the makespan in which its stages work, 1 less the bubble

    @property
    def end(self) -> float:
        """End of its last pass, in units of cost."""
        return max(timed.end for timed in self.passes)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """All ranks' step."""

    ranks: tuple[RankTimeline, ...]  # in the order of `StepPlan.micro_batches`
    end: float  # of the last rank, in units of cost: the step's predicted time
    stages: int

    @property
    def busy(self) -> float:
        """Share of the makespan in which stages work, 1 less the bubble."""
        return sum(rank.busy for rank in self.ranks) / len(self.ranks)

    def extremes(self) -> dict[str, RankTimeline]:
        """The slowest, the median and the fastest rank, by their ends and then their numbers."""
        by_end = sorted(self.ranks, key=lambda rank: (-rank.end, rank.rank))
        return {"slowest": by_end[0], "median": by_end[len(by_end) // 2], "fastest": by_end[-1]}


def step_timeline(step: StepPlan, lengths: Sequence[int]) -> StepTimeline:
    """Simulate a step; its plan covers its samples, and may be over the cap."""
    weighed = WeighedStep.of(step, lengths)
    passes = [clock.operations(rank) for clock in weighed.clocks for rank in range(len(clock.ends))]
    if step.dims.in_lockstep:
        # One clock has the pace of all ranks: a slot takes as long as its slowest micro-batch, and
        # each rank's own passes end earlier within it.
        costs, schedule = weighed.costs_on_stages, weighed.problem.schedule
        pace = [max(slot) for slot in zip(*costs, strict=True)]
        passes = [_within(passes[0], own, pace, schedule) for own in costs]
    end = max(timed.end for of_rank in passes for timed in of_rank)
    stages, timelines = step.dims.pipeline_parallel, []
    for rank, of_rank in enumerate(passes):
        work = sum(timed.end - timed.start for timed in of_rank)
        busy = work / (end * stages) if end else 0.0
        timelines.append(RankTimeline(rank=rank, passes=tuple(of_rank), busy=busy))
    return StepTimeline(ranks=tuple(timelines), end=end, stages=stages)


def _within(
    passes: Sequence[Operation], own: Sequence[float], pace: Sequence[float], schedule: Schedule
) -> list[Operation]:
    """A rank's passes by its `own` costs, each within the time that `pace` gives it."""
    shorter = []
    for timed in passes:
        place = schedule.place_of_cost(timed.stage, Pass(timed.kind, timed.chunk, timed.slot))
        share = own[place] / pace[place] if pace[place] else 1.0
        shorter.append(replace(timed, end=timed.start + (timed.end - timed.start) * share))
    return shorter
