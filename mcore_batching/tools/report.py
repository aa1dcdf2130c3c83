"""Tables and lines of text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning import (
    ParallelDims,
    Plan,
    PlannerConfig,
    StepStatistics,
)
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.statistics import total_statistics

FLOOR = "a mean rank's work on the slowest stage or the longest sample's way through all stages"

# Headings of the table of steps, and the figure of `StepStatistics` below each.
STEP_COLUMNS = {
    "samples": "{.num_samples}",
    "micro-batches/rank": "{.num_microbatches}",
    "token fill": "{.fill:.1%}",
    "padding": "{.padding:.1%}",
    "placeholders": "{.num_placeholders}",
    "oversize": "{.num_oversize}",
    "in flight": "{.peak_inflight_tokens:.0f}",
    "rank balance": "{.rank_balance:.3f}",
    "slot balance": "{.slot_balance:.3f}",
    "time/floor": "{.time_over_floor:.3f}",
}

FLOOR_LEGEND = f"""\
time/floor    predicted end of the step / the floor, before which no plan ends:
              {FLOOR}"""

STEP_LEGEND = f"""\
token fill    tokens of samples / (cap x micro-batches of all ranks, placeholders included);
              low where more micro-batches end the step sooner (the line `count` below)
padding       share of padding in the tokens of micro-batches that hold samples
in flight     most tokens that a first pipeline stage holds activations of at a time
rank balance  cost of the heaviest rank / mean over ranks; 1 is even
slot balance  costliest micro-batch of each slot, added up / mean over ranks; 1 is even
{FLOOR_LEGEND}"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings; as text, right-aligned and two spaces apart."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] | None = None  # a last row, set apart

    def __str__(self) -> str:
        rows = [self.columns, *self.rows, *([self.total] if self.total else [])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        rule = "-" * len(lines[0])
        lines.insert(1, rule)
        if self.total:
            lines.insert(-1, rule)
        return "\n".join(lines)


def step_table(statistics: Sequence[StepStatistics]) -> Table:
    """One row per step and a total; of many steps only the first and the last few."""
    rows = [_step_row(str(index), step) for index, step in enumerate(statistics)]
    total = _step_row("total", total_statistics(statistics))
    return Table(columns=("step", *STEP_COLUMNS), rows=both_ends(rows), total=total)


def both_ends(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The first and the last few rows of many, with a row between that counts those left out."""
    shown = 8  # at each end: twice as many fit on a screen
    if len(rows) <= 2 * shown:
        return tuple(rows)
    left_out = ("…", f"({len(rows) - 2 * shown} steps)", *[""] * (len(rows[0]) - 2))
    return (*rows[:shown], left_out, *rows[-shown:])


def _step_row(name: str, step: StepStatistics) -> tuple[str, ...]:
    return (name, *(figure.format(step) for figure in STEP_COLUMNS.values()))


def plan_heading(plan: Plan) -> str:
    """One line: what was planned, for which parallel dims, under which cap."""
    return (
        f"{counted(plan.num_samples, 'sample')} in {counted(len(plan.steps), 'step')}, "
        f"{dims_line(plan.dims, plan.config)}"
    )


def dims_line(dims: ParallelDims, config: PlannerConfig) -> str:
    """The parallel dims above 1, and the cap: `DP2 x CP4, cap 4000 tokens, 1000 per GPU`."""
    further = {
        "PP": dims.pipeline_parallel,
        "VPP": dims.virtual_pipeline,
        "CP": dims.context_parallel,
        "TP": dims.tensor_parallel,
        "EP": dims.expert_parallel,
    }
    sizes = [f"DP{dims.data_parallel}"]
    sizes += [f"{name}{size}" for name, size in further.items() if size > 1]
    line = " x ".join(sizes) + (" with sequence parallel" if dims.sequence_parallel else "")
    if config.max_context_parallel is None:
        per_gpu = f", {config.max_tokens_per_gpu} per GPU" if dims.context_parallel > 1 else ""
        return f"{line}, cap {config.cap_tokens(dims)} tokens{per_gpu}"
    cap = f"cap {config.max_tokens_per_gpu} tokens per rank"
    return f"{line}, dynamic CP to {config.max_context_parallel}, {cap}"
