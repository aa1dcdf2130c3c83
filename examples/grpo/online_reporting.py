"""Line per iteration and final sums of an online run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from metrics import OnlineMetrics

from mcore_batching.tools.report import Table

COLUMNS = (
    "iterations",
    "reward",
    "games won",
    "turns",
    "samples",
    "optimizer steps",
    "KL",
    "passes in play",
    "placeholders",
    "play s",
    "micro-batches/rank in training",
    "placeholders",
    "forward-only s",
    "steps s",
)


def iteration_line(metrics: OnlineMetrics) -> str:
    """One iteration in one line; KL is the mean over its steps."""
    return (
        f"iteration {metrics.iteration:>3}  reward {metrics.reward:.3f}  "
        f"won {metrics.games_won}/{metrics.games}  {metrics.turns} turns in "
        f"{metrics.samples} samples  {len(metrics.steps)} optimizer steps  "
        f"KL {metrics.mean('kl'):.4f}  {metrics.placeholders} placeholders, "
        f"{metrics.sampling_placeholders} in play  {metrics.seconds:.2f} s"
    )


def reward_summary(run: Sequence[OnlineMetrics]) -> str:
    """Mean reward over up to 5 iterations at either end, and the turns and steps between."""
    some = min(5, len(run))
    first, last = (
        statistics.fmean(each.reward for each in part) for part in (run[:some], run[-some:])
    )
    return (
        f"mean reward {first:.3f} in the first {some} iterations, {last:.3f} in the last {some}; "
        f"{sum(each.turns for each in run)} turns played, "
        f"{sum(len(each.steps) for each in run)} optimizer steps"
    )


def run_table(run: Sequence[OnlineMetrics]) -> Table:
    """Sums or means of all iterations, of which each has had its line."""
    total = (
        str(len(run)),
        f"{statistics.fmean(each.reward for each in run):.3f}",
        f"{sum(each.games_won for each in run) / sum(each.games for each in run):.0%}",
        str(sum(each.turns for each in run)),
        str(sum(each.samples for each in run)),
        str(sum(len(each.steps) for each in run)),
        f"{statistics.fmean(each.mean('kl') for each in run):.4f}",
        str(sum(each.sampling_passes for each in run)),
        str(sum(each.sampling_placeholders for each in run)),
        f"{sum(each.sampling_seconds for each in run):.2f}",
        str(sum(each.num_microbatches for each in run)),
        str(sum(each.placeholders for each in run)),
        f"{sum(each.forward_only_seconds for each in run):.2f}",
        f"{sum(each.step_seconds for each in run):.2f}",
    )
    return Table(columns=COLUMNS, rows=(total,))
