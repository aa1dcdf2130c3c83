"""The picture of a step: its passes over time, and how full each micro-batch is.

Up to `MOST_ROWS` stages over all ranks are drawn one row each; beyond, those of the slowest, the
median and the fastest rank. Times are the predicted ones of `step_timeline`. matplotlib is
imported only to draw.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_batching.planning import MCoreBatchingError, StepPlan, step_problem, step_statistics
from mcore_batching.planning.clock import Operation
from mcore_batching.planning.files import write_whole
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.statistics import costs_on_stages, step_clocks
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Kind, Pass
from mcore_batching.tools.report import dims_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MOST_ROWS = 40  # stages that fit on a screen at a readable height
# Of more micro-batches the fill is a colour alone: at this width of the figure digits of twice as
# many would overlap.
MOST_NUMBERED_CELLS = 200
RANK_GAP = 0.8  # between two ranks, in rows
# Names of passes, and their colours in model chunks with even and odd numbers.
PASSES: dict[Kind, tuple[str, tuple[str, str]]] = {
    "F": ("forward", ("#3b6fb6", "#7ea6d9")),
    "B": ("backward", ("#d9762b", "#efae78")),
}
IDLE = "#ededed"
BLOCK = "#e8a200"
OVER_CAP = "#d62728"
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
    _save(step_figure(step, lengths), path)


def step_figure(step: StepPlan, lengths: Sequence[int]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    timeline, statistics = step_timeline(step, lengths), step_statistics(step, lengths)
    num_ranks = len(timeline.ranks)
    if num_ranks * timeline.stages <= MOST_ROWS:
        shown = [(f"rank {rank.rank}", rank) for rank in timeline.ranks]
    else:
        shown = [(f"{name}\nrank {rank.rank}", rank) for name, rank in timeline.extremes().items()]
    # Inches of each part: passes by their rows, the fill by ranks, within bounds.
    heights = [0.16 * len(shown) * (timeline.stages + 1) + 0.5]
    heights.append(min(3.2, max(1.2, 0.2 * num_ranks + 0.5)))
    figure = Figure(figsize=(13, sum(heights) + 1.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_passes(above, timeline, shown)
    above.axvline(statistics.floor_time, color="#333333", linestyle=(0, (4, 3)), linewidth=1)
    above.set_xlim(0, timeline.end * 1.002 or 1.0)
    above.set_xlabel("predicted time, in units of cost (dashed: no plan ends before)")
    above.tick_params(axis="x", labelsize=7)
    above.xaxis.set_major_formatter("{x:,.0f}")
    cap = step.config.cap_tokens(step.dims)
    if step.context_parallel is not None:
        cap = step.config.max_tokens_per_gpu  # the timeline has each rank's part of a shared row
        _draw_blocks(below, step)
    _draw_fill(figure, below, timeline, cap)
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


def _draw_passes(
    axes: Axes,
    timeline: StepTimeline,
    shown: Sequence[tuple[str, RankTimeline]],
) -> None:
    """One row per stage, one box per pass; the ranks of `shown`, with their labels, top down."""
    stages = timeline.stages
    height = stages + RANK_GAP
    for number, (label, rank) in enumerate(shown):
        top = number * height
        # Idle is the background: passes cover all of a row but the bubble.
        _add_box(axes, (0, top), timeline.end, stages, facecolor=IDLE, edgecolor="none", zorder=0)
        _draw_rank_passes(axes, timeline, rank, top)
        for text, place, align in (
            (label, -0.035, "right"),
            (f"{rank.busy:.0%} busy", 1.005, "left"),
        ):
            # Beside the axes in x (shares of their width), at the rank's rows in y.
            beside = axes.get_yaxis_transform()
            middle = top + stages / 2
            axes.text(place, middle, text, fontsize=8, ha=align, va="center", transform=beside)
    axes.set_ylim(len(shown) * height - RANK_GAP, 0)  # the first rank on top
    axes.set_yticks(
        [n * height + stage + 0.5 for n in range(len(shown)) for stage in range(stages)],
        [f"stage {stage}" for _ in shown for stage in range(stages)],
        fontsize=5.5,
    )
    axes.tick_params(axis="y", length=0, pad=1)
    axes.spines[:].set_visible(False)


def _draw_rank_passes(axes: Axes, timeline: StepTimeline, rank: RankTimeline, top: float) -> None:
    """The boxes of one rank; its first stage is the row at `top`."""
    # About as wide as two digits, at this width of the figure.
    widest_digits = timeline.end / 150
    for timed in rank.passes:
        is_placeholder = rank.num_samples[timed.slot] == 0
        width, row = timed.end - timed.start, top + timed.stage
        style: dict[str, Any] = {"edgecolor": "white"}
        style["facecolor"] = PASSES[timed.kind][1][timed.chunk % 2]
        if is_placeholder:
            style = PLACEHOLDER
        gid = f"pass-{rank.rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}"
        _add_box(axes, (timed.start, row + 0.06), width, 0.88, linewidth=0.4, gid=gid, **style)
        if not is_placeholder and width > widest_digits:
            _add_text(axes, timed.start + width / 2, row + 0.52, str(timed.slot), fontsize=5.5)


def _draw_fill(figure: Figure, axes: Axes, timeline: StepTimeline, cap: int) -> None:
    """Ranks by slots: padded tokens of each micro-batch over the cap."""
    from matplotlib import colormaps

    fills = [[tokens / cap for tokens in rank.tokens] for rank in timeline.ranks]
    # Another framework's plan, or an oversize sample, can be over the cap.
    shades = colormaps["viridis"].with_extremes(over=OVER_CAP)
    # One image for the colours; the boxes above it are transparent.
    drawn = axes.imshow(fills, aspect="auto", cmap=shades, vmin=0, vmax=1)
    cells = len(fills) * len(fills[0])
    for row, rank in enumerate(timeline.ranks):
        for slot, fill in enumerate(fills[row]):
            gid = f"fill-{rank.rank}-{slot}"
            empty = not rank.num_samples[slot]
            style = PLACEHOLDER if empty else {"facecolor": "none", "edgecolor": "white"}
            _add_box(axes, (slot - 0.5, row - 0.5), 1, 1, linewidth=0.6, gid=gid, **style)
            if cells <= MOST_NUMBERED_CELLS and not empty:
                ink = "#222222" if 0.6 < fill <= 1 else "white"
                _add_text(axes, slot, row, f"{100 * fill:.0f}", fontsize=6, color=ink)
    axes.set_xlabel("slot (number of the micro-batch on its rank)")
    axes.set_ylabel("rank", fontsize=8)
    axes.set_title("padded tokens of each micro-batch, in % of the cap", fontsize=9, loc="left")
    # At most 24 and 16 numbers, which fit beside each other.
    axes.set_xticks(range(0, len(fills[0]), -(-len(fills[0]) // 24)))
    axes.set_yticks(range(0, len(fills), -(-len(fills) // 16)))
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    over = "max" if max(map(max, fills)) > 1 else "neither"  # an arrow on the bar, in red
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, ticks=[0, 0.5, 1], extend=over)
    bar.ax.set_yticklabels(["0 %", "50 %", "cap"], fontsize=7)


def _draw_blocks(axes: Axes, step: StepPlan) -> None:
    """A frame round the ranks that share a micro-batch."""
    frame: dict[str, Any] = {"linewidth": 1.6, "facecolor": "none", "edgecolor": BLOCK, "zorder": 3}
    for row in step.rows():
        if row.size > 1:
            corner, gid = (row.slot - 0.46, row.rank - 0.46), f"block-{row.rank}-{row.slot}"
            _add_box(axes, corner, 0.92, row.size - 0.08, gid=gid, **frame)


def _add_box(
    axes: Axes, corner: tuple[float, float], width: float, height: float, **style: Any
) -> None:
    """A rectangle."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, height, **style))


def _add_text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """A text with its middle at a place; what lies beyond the axes is cut off."""
    axes.text(x, y, text, ha="center", va="center", clip_on=True, **{"color": "white"} | style)


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
        handles.append(Patch(facecolor="none", edgecolor=BLOCK, label="ranks that share a row"))
    handles += [Patch(facecolor=IDLE, label="idle"), Patch(label="placeholder", **PLACEHOLDER)]
    # Below: above, it would cover a long title.
    place = "outside lower left"
    figure.legend(handles=handles, loc=place, ncols=len(handles), fontsize=8, frameon=False)


def _save(figure: Figure, path: str | Path) -> None:
    import matplotlib

    ending, picture = Path(path).suffix[1:], io.BytesIO()
    # No date and no random ids: the same figure gives the same text.
    metadata = {"Date": None} if ending == "svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(picture, format=ending, dpi=150, metadata=metadata)
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}; name another file") from error


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    # Stage after stage, each in the order it runs. With expert parallelism a pass ends with this
    # rank's own work, before its slot does.
    passes: tuple[Operation, ...]
    # Of each micro-batch: padded tokens (under dynamic CP of this rank's part of it) and its
    # samples, 0 for a placeholder.
    tokens: tuple[int, ...]
    num_samples: tuple[int, ...]
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
    problem, ranks = step_problem(step, lengths)
    passes = _passes(step, problem, ranks)
    end = max(timed.end for of_rank in passes for timed in of_rank)
    stages, timelines = step.dims.pipeline_parallel, []
    for rank, micro_batches in enumerate(ranks):
        sizes = tuple(step.row_size(rank, slot) for slot in range(len(micro_batches)))
        tokens = [
            problem.on_ranks[size].row_tokens(samples)
            for samples, size in zip(micro_batches, sizes, strict=True)
        ]
        if step.context_parallel is not None:
            tokens = [count // size for count, size in zip(tokens, sizes, strict=True)]
        work = sum(timed.end - timed.start for timed in passes[rank])
        timelines.append(
            RankTimeline(
                rank=rank,
                passes=tuple(passes[rank]),
                tokens=tuple(tokens),
                num_samples=tuple(map(len, micro_batches)),
                busy=work / (end * stages) if end else 0.0,
            )
        )
    return StepTimeline(ranks=tuple(timelines), end=end, stages=stages)


def _passes(
    step: StepPlan, problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[list[Operation]]:
    """The passes of each rank, all stages together."""
    costs, schedule = costs_on_stages(step, problem, ranks), problem.schedule
    clocks = step_clocks(step, problem, ranks)
    operations = [clock.operations(rank) for clock in clocks for rank in range(len(clock.ends))]
    if not step.dims.in_lockstep:
        return operations
    # With expert parallelism one clock has the pace of all ranks: a slot takes as long as its
    # slowest micro-batch, and each rank's own passes end earlier within it.
    pace = [max(slot) for slot in zip(*costs, strict=True)]

    def own_end(timed: Operation, own: Sequence[float]) -> float:
        place = schedule.place_of_cost(timed.stage, Pass(timed.kind, timed.chunk, timed.slot))
        share = own[place] / pace[place] if pace[place] else 1.0
        return timed.start + (timed.end - timed.start) * share

    return [[replace(timed, end=own_end(timed, own)) for timed in operations[0]] for own in costs]
