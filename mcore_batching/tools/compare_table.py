"""A comparison of planners as a table, as lines of text, as CSV and as JSON.

Guarantees: all of them are made of `compare.Outcome`'s fields, and none leaves a planner out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict

from mcore_batching.tools.compare import Outcome
from mcore_batching.tools.report import Table

LEGEND = """\
time/floor     predicted end of the step / a time before which no plan's step ends, mean over steps
over cap       micro-batches of several samples over the cap; the worst as a multiple of the cap
rank balance   cost of the heaviest rank / mean over ranks, mean over steps
planning       processor time for one step, mean over steps"""


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """One row a planner."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for outcome in outcomes:
        over = "-"
        if outcome.over_cap is not None:
            over = "none"
        if outcome.over_cap and outcome.worst_over_cap:
            over = f"{outcome.over_cap:.1%}, {outcome.worst_over_cap:.2f}x"
        seconds = outcome.planning_seconds
        rows.append(
            (
                outcome.name,
                f"{outcome.planned}/{outcome.steps}",
                number(outcome.time_over_floor, 3),
                over,
                number(outcome.num_microbatches, 1),
                number(outcome.placeholders, 1),
                number(outcome.rank_balance, 3),
                "-" if seconds is None else f"{1000 * seconds:.1f} ms",
            )
        )
    return Table(
        columns=(
            "planner",
            "steps",
            "time/floor",
            "over cap",
            "micro-batches/rank",
            "placeholders",
            "rank balance",
            "planning",
        ),
        rows=tuple(rows),
    )


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table: the gain on the best peer under the cap, and who has no plan."""
    lines = []
    ours = next((o for o in outcomes if o.kind == "ours"), None)
    rivals = [
        (o.time_over_floor, o.name)
        for o in outcomes
        if o.kind == "peer" and o.keeps_cap and o.time_over_floor is not None
    ]
    if ours and ours.time_over_floor and rivals:
        best, name = min(rivals)
        lines.append(
            f"of the peers that keep the cap {name} is best: its step takes "
            f"{best / ours.time_over_floor:.3f} x the time of {ours.name}'s"
        )
    for outcome in outcomes:
        if outcome.failure:
            missing = outcome.steps - outcome.planned
            lines.append(
                f"{outcome.name} has no plan for {missing} of {outcome.steps} "
                f"step{'s' if outcome.steps != 1 else ''}: {outcome.failure}"
            )
    return lines


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A list of objects, one a planner, with `Outcome`'s fields."""
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=2)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line a planner under a heading of `Outcome`'s fields; None is an empty cell."""
    text = io.StringIO()
    records = [asdict(outcome) for outcome in outcomes]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")
