"""Tables and lines of text for people; nothing is wrapped or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from mcore_batching.planning import (
    ParallelDims,
    Plan,
    PlannerConfig,
    StepStatistics,
    micro_batch_lower_bound,
    step_problem,
)
from mcore_batching.planning.plans.memory import PredictedMemory

SHOWN_STEPS_AT_EACH_END = 8
"""Of a long table: twice as many fit on a screen."""

FLOOR = "a mean rank's work or the longest sample's way through all stages; no plan ends sooner"


class Column(NamedTuple):
    """A column of the table of steps."""

    cell: Callable[[StepStatistics], str]
    meaning: str = ""
    """For the legend, if its heading does not say."""


STEP_COLUMNS = {
    "samples": Column(lambda step: str(step.num_samples)),
    "micro-batches/rank": Column(lambda step: str(step.num_microbatches)),
    "token fill": Column(
        lambda step: f"{step.fill:.1%}",
        "tokens of samples / (cap x micro-batches of all ranks, placeholders included)",
    ),
    "padding": Column(
        lambda step: f"{step.padding:.1%}",
        "share of padding in the tokens of micro-batches that hold samples",
    ),
    "placeholders": Column(lambda step: str(step.num_placeholders)),
    "oversize": Column(lambda step: str(step.num_oversize)),
    "in flight": Column(
        lambda step: f"{step.peak_inflight_tokens:.0f}",
        "most tokens whose activations a first pipeline stage holds at a time",
    ),
    "rank balance": Column(
        lambda step: f"{step.rank_balance:.3f}",
        "cost of the heaviest rank / mean over ranks; 1 is even",
    ),
    "slot balance": Column(
        lambda step: f"{step.slot_balance:.3f}",
        "costliest micro-batch of each slot, added up / mean over ranks; 1 is even",
    ),
    "time/floor": Column(
        lambda step: f"{step.time_over_floor:.3f}",
        f"predicted end of the step / the floor:\n{'':14}{FLOOR}",
    ),
}

STEP_LEGEND = "\n".join(
    f"{name:14}{column.meaning}" for name, column in STEP_COLUMNS.items() if column.meaning
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings."""

    columns: tuple[str, ...]
    """Headings [columns]."""
    rows: tuple[tuple[str, ...], ...]
    """Cells [rows][columns]."""
    total: tuple[str, ...] | None = None
    """A last row [columns], set apart."""


def step_table(statistics: Sequence[StepStatistics]) -> Table:
    """One row per step and a total; of many steps only the first and the last few.

    Args:
        statistics: of each step, in order; at least one.
    """
    rows = [_step_row(str(index), step) for index, step in enumerate(statistics)]
    total = statistics[0]  # `sum` would begin with 0, which is no StepStatistics
    for step in statistics[1:]:
        total += step
    columns = ("step", *STEP_COLUMNS)
    return Table(columns=columns, rows=both_ends(rows), total=_step_row("total", total))


def both_ends(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The first and the last few rows of many, with a row between that counts those left out."""
    shown = SHOWN_STEPS_AT_EACH_END
    if len(rows) <= 2 * shown:
        return tuple(rows)
    left_out = ("…", f"({len(rows) - 2 * shown} steps)", *[""] * (len(rows[0]) - 2))
    return (*rows[:shown], left_out, *rows[-shown:])


def _step_row(name: str, step: StepStatistics) -> tuple[str, ...]:
    return (name, *(column.cell(step) for column in STEP_COLUMNS.values()))


def memory_line(memory: PredictedMemory) -> str:
    """One line: what a rank of the first and of the last stage holds at the peak."""
    first, last, logits = (
        f"{size / 2**30:.2f} GiB"
        for size in (memory.first_stage_bytes, memory.last_stage_bytes, memory.logit_bytes)
    )
    return (
        f"estimated memory per rank beside weights, gradients and optimizer: first stage {first}, "
        f"last stage {last} ({logits} of it for logits)"
    )


def packing_line(plan: Plan, lengths: Sequence[int]) -> str:
    """One line: micro-batches with samples of all steps, over a lower bound of any packing."""
    count = sum(row.samples != () for step in plan.steps for row in step.rows())
    if plan.config.max_context_parallel is not None:  # no bound is known for rows of mixed sizes
        return f"{count} micro-batches with samples in all steps, a shared one counted once"
    bound = sum(micro_batch_lower_bound(step_problem(step, lengths)[0]) for step in plan.steps)
    return (
        f"{count} micro-batches with samples in all steps, {count / bound if bound else 1.0:.3f} x "
        f"the {bound} that no packing takes fewer than"
    )


def plan_heading(plan: Plan) -> str:
    """One line: what was planned, for which parallel dims, under which cap."""
    return (
        f"{counted(plan.num_samples, 'sample')} in {counted(len(plan.steps), 'step')}, "
        f"{f'{len(plan.dropped)} dropped, ' if plan.dropped else ''}"
        f"{dims_line(plan.dims, plan.config)}"
    )


def dims_line(dims: ParallelDims, config: PlannerConfig) -> str:
    """The parallel dims above 1, and the cap: `DP2 x PP4, cap 1000 tokens`."""
    sizes = [
        f"{name}{size}"
        for name, size in (
            ("DP", dims.data_parallel),
            ("PP", dims.pipeline_parallel),
            ("VPP", dims.virtual_pipeline),
            ("CP", dims.context_parallel),
            ("TP", dims.tensor_parallel),
            ("EP", dims.expert_parallel),
        )
        if size > 1 or name == "DP"  # one size at least, where all are 1
    ]
    sequence = " with sequence parallel" if dims.sequence_parallel else ""
    if config.max_context_parallel is not None:
        cap = f"{config.max_tokens_per_gpu} tokens per rank"
        return (
            f"{' x '.join(sizes)}{sequence}, dynamic CP to {config.max_context_parallel}, cap {cap}"
        )
    return f"{' x '.join(sizes)}{sequence}, cap {config.cap_tokens(dims)} tokens"


def counted(count: int, noun: str) -> str:
    """A count with its noun in the singular or the plural: `1 sample`, `2 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def sharing(statistics: StepStatistics) -> str:
    """The tokens saved by samples that share segments, in words; empty where none do."""
    if not statistics.hosted_samples:
        return ""
    samples = statistics.num_samples + statistics.hosted_samples
    return (
        f"{samples:,} samples in {statistics.num_samples:,} rows' worth of tokens: "
        f"{statistics.times_fewer_tokens:.1f}x fewer"
    )


def format_plain(table: Table) -> str:
    """The table as text, columns right-aligned and two spaces apart."""
    rows = [table.columns, *table.rows, *([table.total] if table.total else [])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(lines[0])
    lines.insert(1, rule)
    if table.total:
        lines.insert(-1, rule)
    return "\n".join(lines)


def print_table(table: Table, file: TextIO) -> None:
    """Write the table to `file`."""
    print(format_plain(table), file=file)
