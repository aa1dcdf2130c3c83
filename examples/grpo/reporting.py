"""Progress bar, line per iteration and final table of a run."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from metrics import IterationMetrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_batching.tools.report import Table

COLUMNS = (
    "iteration",
    "loss",
    "KL",
    "entropy",
    "grad norm",
    "tokens",
    "micro-batches/rank",
    "fill",
    "placeholders",
    "balance",
    "forward-only s",
    "steps s",
)


class Reporter:
    """Prints on rank 0, and nothing elsewhere.

    Args:
        speaks: True on the process that prints.
        line: makes an iteration's line.
        table: makes the table of a run.
    """

    def __init__(
        self,
        speaks: bool,
        line: Callable[[Any], str] | None = None,
        table: Callable[[Sequence[Any]], Table] | None = None,
    ) -> None:
        self._line = line or iteration_line
        self._table = table or run_table
        self.console = Console(quiet=not speaks, soft_wrap=True, highlight=False)
        self._progress: Progress | None = None
        self._speaks = speaks

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    def begin(self, name: str, iterations: int) -> None:
        """Start the progress bar of a run."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self._speaks,
        )
        self._progress.add_task(name, total=iterations)
        self._progress.start()

    def iteration(self, metrics: IterationMetrics) -> None:
        """Print an iteration's line and move the bar."""
        assert self._progress is not None
        self.say(self._line(metrics))
        self._progress.advance(self._progress.task_ids[0])

    def end(self, run: Sequence[IterationMetrics]) -> None:
        """Stop the bar and print the table of the run."""
        assert self._progress is not None
        self._progress.stop()
        if self._speaks:
            print(self._table(run))
            sys.stdout.flush()


def iteration_line(metrics: IterationMetrics) -> str:
    """One iteration in one line; loss, KL and gradient norm are means over its steps."""
    return (
        f"iteration {metrics.iteration:>3}  loss {metrics.mean('loss'):+.5f}  "
        f"KL {metrics.mean('kl'):.5f}  entropy {metrics.mean('entropy'):.3f}  "
        f"grad norm {metrics.mean('grad_norm'):.3f}  "
        f"{metrics.tokens} tokens  {metrics.num_microbatches} micro-batches/rank  "
        f"fill {metrics.fill:.1%}  {metrics.placeholders} placeholders  "
        f"balance {metrics.rank_balance:.3f}  {metrics.seconds:.2f} s"
    )


def run_table(run: Sequence[IterationMetrics]) -> Table:
    """Table of all iterations, with their sums or means."""
    total = (
        "all",
        f"{statistics.fmean(each.mean('loss') for each in run):+.5f}",
        f"{statistics.fmean(each.mean('kl') for each in run):.5f}",
        f"{statistics.fmean(each.mean('entropy') for each in run):.3f}",
        f"{statistics.fmean(each.mean('grad_norm') for each in run):.3f}",
        str(sum(each.tokens for each in run)),
        str(sum(each.num_microbatches for each in run)),
        f"{statistics.fmean(each.fill for each in run):.1%}",
        str(sum(each.placeholders for each in run)),
        f"{statistics.fmean(each.rank_balance for each in run):.3f}",
        f"{sum(each.forward_only_seconds for each in run):.2f}",
        f"{sum(each.step_seconds for each in run):.2f}",
    )
    return Table(columns=COLUMNS, rows=tuple(_row(each) for each in run), total=total)


def _row(metrics: IterationMetrics) -> tuple[str, ...]:
    return (
        str(metrics.iteration),
        f"{metrics.mean('loss'):+.5f}",
        f"{metrics.mean('kl'):.5f}",
        f"{metrics.mean('entropy'):.3f}",
        f"{metrics.mean('grad_norm'):.3f}",
        str(metrics.tokens),
        str(metrics.num_microbatches),
        f"{metrics.fill:.1%}",
        str(metrics.placeholders),
        f"{metrics.rank_balance:.3f}",
        f"{metrics.forward_only_seconds:.2f}",
        f"{metrics.step_seconds:.2f}",
    )
