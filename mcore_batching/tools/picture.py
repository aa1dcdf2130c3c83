"""The picture of a step: its passes over time, one row per stage.

Up to `MOST_ROWS` stages over all ranks are drawn; beyond, those of the slowest, the median and the
fastest rank. Times are the predicted ones of `step_passes`. matplotlib is imported only to draw.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import StepPlan, WeighedStep, step_statistics
from mcore_batching.planning.clock import Operation
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.schedule import Kind, Pass, Schedule
from mcore_batching.tools.options import UsageError, write
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


def check_picture(path: str | Path) -> None:
    """Check, before long work, that a picture of this name could be drawn."""
    if Path(path).suffix not in FORMATS:
        raise UsageError(f"expected a name that ends in {' or '.join(FORMATS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("drawing needs matplotlib; pip install 'mcore_batching[plot]'") from None


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
    write(path, picture.getvalue())


def step_figure(step: StepPlan, lengths: Sequence[int]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    passes, statistics = step_passes(step, lengths), step_statistics(step, lengths)
    stages, end = step.dims.pipeline_parallel, statistics.step_time
    # The share of the step in which a rank's stages work.
    busy = [_work(own) / (end * stages) if end else 0.0 for own in passes]
    shown = {f"rank {rank}": rank for rank in range(len(passes))}
    if len(shown) * stages > MOST_ROWS:
        ends = [max(timed.end for timed in own) for own in passes]
        by_end = sorted(shown.values(), key=ends.__getitem__, reverse=True)
        places = {"slowest": 0, "median": len(by_end) // 2, "fastest": -1}
        shown = {f"{name}\nrank {by_end[at]}": by_end[at] for name, at in places.items()}
    # Inches, by the rows.
    height = 0.16 * len(shown) * (stages + 1) + 1.5
    figure = Figure(figsize=(13, height), layout="constrained")
    axes = figure.subplots()
    rows = stages + 0.8  # and a gap
    for number, (label, rank) in enumerate(shown.items()):
        labels = label, f"{busy[rank]:.0%} busy"
        _draw_rank(axes, step, rank, passes[rank], end, labels, number * rows)
    axes.set_ylim(len(shown) * rows, 0)  # the first one on top
    axes.axvline(statistics.floor_time, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlim(0, end * 1.002 or 1.0)
    axes.set_xlabel(
        "predicted time, in units of cost (a row per stage; dashed: no plan ends before)"
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    mean = sum(busy) / len(busy)
    summary = (
        f"{counted(statistics.num_samples, 'sample')}, "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank, "
        f"{counted(statistics.num_placeholders, 'placeholder')}; the step ends at "
        f"{statistics.time_over_floor:.3f} x the floor, stages work {mean:.0%} of it"
    )
    title = dims_line(step.dims, step.config)
    figure.suptitle(f"{title}\n{summary}", fontsize=11, x=0.01, ha="left")
    _add_legend(figure, step)
    return figure


def _draw_rank(
    axes: Axes,
    step: StepPlan,
    rank: int,
    passes: Sequence[Operation],
    end: float,
    labels: tuple[str, str],
    top: float,
) -> None:
    """One row per stage, one box per pass; the rank's first stage is the row at `top`, and a label
    stands on either side."""
    stages = step.dims.pipeline_parallel
    # Idle is the background: passes cover all of a row but the bubble.
    _add_box(axes, (0, top), end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
    # About as wide as two digits, at this width of the figure.
    widest_digits = end / 150
    for timed in passes:
        width, row = timed.end - timed.start, top + timed.stage
        is_placeholder = step.micro_batches[rank][timed.slot] == ()
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
        style["facecolor"] = PASSES[timed.kind][1][timed.chunk % 2]
        if is_placeholder:
            style |= PLACEHOLDER
        elif step.context_parallel is not None and step.row_size(rank, timed.slot) > 1:
            style |= SHARED
        gid = f"pass-{rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}"
        _add_box(axes, (timed.start, row + 0.06), width, 0.88, gid=gid, **style)
        if not is_placeholder and width > widest_digits:
            place = (timed.start + width / 2, row + 0.52)
            middle: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            axes.text(*place, str(timed.slot), color="white", fontsize=5.5, **middle)
    # Beside the axes in x (shares of their width), at the rank's rows in y.
    beside = axes.get_yaxis_transform()
    for text, x, align in zip(labels, (-0.005, 1.005), ("right", "left"), strict=True):
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


def step_passes(step: StepPlan, lengths: Sequence[int]) -> list[list[Operation]]:
    """The passes of each rank [ranks], stage after stage, each in the order it runs them; the plan
    covers its samples, and may be over the cap. With expert parallelism a pass ends with the rank's
    own work, before its slot does."""
    weighed = WeighedStep.of(step, lengths)
    if not step.dims.in_lockstep:
        return [clock.operations(r) for clock in weighed.clocks for r in range(len(clock.ends))]
    # One clock has the pace of all ranks: a slot takes as long as its slowest micro-batch.
    costs, schedule = weighed.costs_on_stages, weighed.problem.schedule
    pace = [max(slot) for slot in zip(*costs, strict=True)]
    passes = weighed.clocks[0].operations()
    return [[_shortened(timed, own, pace, schedule) for timed in passes] for own in costs]


def _shortened(
    timed: Operation, own: Sequence[float], pace: Sequence[float], schedule: Schedule
) -> Operation:
    """A pass by a rank's `own` costs, begun as `pace` begins it."""
    place = schedule.place_of_cost(timed.stage, Pass(timed.kind, timed.chunk, timed.slot))
    share = own[place] / pace[place] if pace[place] else 1.0
    return replace(timed, end=timed.start + (timed.end - timed.start) * share)


def _work(passes: Sequence[Operation]) -> float:
    return sum(timed.end - timed.start for timed in passes)
