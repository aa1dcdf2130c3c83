"""The picture of a recorded job: predicted and measured time of every step, and the floor.

Steps with other parallel dims, options or another cost model get a part of the picture of their
own. Times are in seconds if any step of a part was measured, else in units of cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_batching.tools.pictures.picture import check_picture, save_figure
from mcore_batching.tools.replay import ReplayedStep, by_setting, relative_errors, seconds_per_unit
from mcore_batching.tools.report import dims_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


def draw_replay(steps: Sequence[ReplayedStep], path: str | Path) -> None:
    """Draw a job into a file.

    Args:
        steps: at least one.
        path: .png, .svg or .html.

    Raises:
        PlotError: see `check_picture`, or the file cannot be written.
    """
    check_picture(path)
    save_figure(replay_figure(steps), path)


def replay_figure(steps: Sequence[ReplayedStep]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    settings = by_setting(steps)
    figure = Figure(figsize=(10, 5.5 * len(settings)), layout="constrained")
    parts = figure.subfigures(len(settings), 1, squeeze=False)[:, 0]
    first = 0
    for part, alike in zip(parts, settings, strict=True):
        if len(settings) > 1:
            plan = alike[0].record.plan
            part.suptitle(dims_line(plan.dims, plan.config))
        _draw(part, alike, first)
        first += len(alike)
    return figure


def _draw(figure: SubFigure, steps: Sequence[ReplayedStep], first: int) -> None:
    """Draw steps of one setting, the first of which is number `first` of the picture."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    factor = seconds_per_unit(steps)
    scale = 1.0 if factor is None else factor
    # On through all parts, as steps are numbered in the job's log.
    numbers = range(first, first + len(steps))
    times, errors = figure.subplots(
        2, 1, sharex=True, height_ratios=[3, 1], gridspec_kw={"hspace": 0.05}
    )
    times.fill_between(
        numbers,
        [scale * step.floor for step in steps],
        color="#ededed",
        label="floor: no plan ends sooner",
    )
    times.plot(
        numbers, [scale * step.predicted for step in steps], color="#3b6fb6", label="predicted"
    )
    measured = [
        (number, step.record.measured_seconds)
        for number, step in zip(numbers, steps, strict=True)
        if step.record.measured_seconds
    ]
    # Dots, not a line: steps that were not measured would be drawn through.
    times.plot(
        [number for number, _ in measured],
        [seconds for _, seconds in measured],
        color="#d9762b",
        linestyle="none",
        marker="o",
        markersize=4,
        label="measured",
    )
    times.set_ylabel("seconds per step" if factor is not None else "units of cost per step")
    times.set_ylim(bottom=0)
    times.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    if factor is not None:
        wrong = relative_errors(steps, factor)
        errors.bar([number for number, _ in measured], wrong, color="#7ea6d9")
        mean = sum(map(abs, wrong)) / max(len(wrong), 1)
        off = f"; predictions are off by {mean:.1%} on average" if wrong else ""
        times.set_title(f"{len(steps)} steps{off}", loc="left")
    errors.axhline(0, color="#333333", linewidth=0.8)
    errors.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    errors.set_ylabel("error")
    errors.set_xlabel("recorded step")
    errors.xaxis.set_major_locator(MaxNLocator(integer=True))
