"""Progress bar, line per iteration and final sums of a run."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from metrics import IterationMetrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_batching.tools.report import Table

COLUMNS = (
    "iterations",
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

LOW_FILL = 0.75
"""Below it a line says why micro-batches are not filled to the cap."""
LEAST_FILL = 1e-3
"""Below it are micro-batches of the baseline alone, under a cap that no sample comes near."""


class Reporter:
    """Prints on rank 0, and nothing elsewhere.

    Args:
        speaks: True on the process that prints.
        line: makes an iteration's line.
        table: makes the sums of a run.
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
        """Stop the bar and print the sums of the run."""
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
        f"fill {_shown_fill(metrics)}  {metrics.placeholders} placeholders  "
        f"balance {metrics.rank_balance:.3f}  {metrics.seconds:.2f} s"
    )


def _shown_fill(metrics: IterationMetrics) -> str:
    """Share of the cap that is filled and, where it is low, why."""
    if metrics.fill < LEAST_FILL:
        return "no cap (one sample each)"
    # As many hold the tokens, whatever their samples: no plan has fewer.
    least = math.ceil(metrics.fill * metrics.num_microbatches)
    is_low = metrics.fill < LOW_FILL and least < metrics.num_microbatches
    reason = f" ({least} full ones would end the steps later)" if is_low else ""
    return f"{metrics.fill:.1%}{reason}"


def run_table(run: Sequence[IterationMetrics]) -> Table:
    """Sums or means of all iterations, of which each has had its line."""
    total = (
        str(len(run)),
        f"{statistics.fmean(each.mean('loss') for each in run):+.5f}",
        f"{statistics.fmean(each.mean('kl') for each in run):.5f}",
        f"{statistics.fmean(each.mean('entropy') for each in run):.3f}",
        f"{statistics.fmean(each.mean('grad_norm') for each in run):.3f}",
        str(sum(each.tokens for each in run)),
        str(sum(each.num_microbatches for each in run)),
        f"{statistics.fmean(each.fill for each in run):.1%}"
        if run[0].fill > LEAST_FILL
        else "no cap",
        str(sum(each.placeholders for each in run)),
        f"{statistics.fmean(each.rank_balance for each in run):.3f}",
        f"{sum(each.forward_only_seconds for each in run):.2f}",
        f"{sum(each.step_seconds for each in run):.2f}",
    )
    return Table(columns=COLUMNS, rows=(total,))
