"""The picture of an online run: reward, and turns played beside optimizer steps taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from figures import save
from matplotlib.ticker import MaxNLocator
from metrics import OnlineMetrics

REWARD, TURNS, STEPS = "#2b6cb0", "#c05621", "0.25"


def draw_reward(run: Sequence[OnlineMetrics], title: str, out: Path) -> None:
    """Mean reward and share of games won; below, turns and optimizer steps of each iteration.

    Args:
        run: the iterations.
        title: printed above.
        out: PNG file.
    """
    figure, (reward, turns) = plt.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    iterations = [each.iteration for each in run]
    reward.plot(
        iterations, [each.reward for each in run], color=REWARD, linewidth=2.2, label="mean reward"
    )
    reward.plot(
        iterations,
        [each.games_won / each.games for each in run],
        color=REWARD,
        linewidth=1,
        linestyle="--",
        label="share of games won",
    )
    reward.set_ylim(0, 1)
    reward.set_title(f"{title}: {run[0].games} games an iteration", loc="left", fontsize=10)
    reward.legend(frameon=False, loc="lower right")
    turns.plot(iterations, [each.turns for each in run], color=TURNS, label="turns played")
    turns.set_ylim(0)
    turns.set_ylabel("turns", color=TURNS)
    steps = turns.twinx()
    counts = [len(each.steps) for each in run]
    steps.plot(iterations, counts, color=STEPS, linestyle=":", marker=".", label="steps")
    steps.set_ylim(0, max(counts) * 2)
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.set_ylabel("optimizer steps", color=STEPS)
    turns.set_xlabel("iteration")
    turns.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (reward, turns):
        axes.grid(alpha=0.25)
        axes.spines["top"].set_visible(False)
    reward.spines["right"].set_visible(False)
    steps.spines["top"].set_visible(False)
    save(figure, out)
