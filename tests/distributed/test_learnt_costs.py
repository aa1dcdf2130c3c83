"""Costs that training learns: stages cost what a hidden model says, and it is found out.

Passes move a clock of their own process, so that times are what they are meant to be, however busy
the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job

from mcore_batching.planning import CostModel
from mcore_batching.planning.plans.records import read_records
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools import replay

DIMS = {"data_parallel": 2, "pipeline_parallel": 2}
SECONDS_PER_UNIT = 1e-5
LEARNT_BY = 5
"""Steps after which the model is to be known."""

ATTENTION = {"linear": 1.0, "quadratic": 0.08, "per_micro_batch": 4.0}
BOTH = {"linear": 1.0, "quadratic": 0.02, "per_micro_batch": 40.0}

Ranks = list[Any]


def job(name: str, dims: dict[str, int] = DIMS, **parameters: Any) -> Job:
    return Job(f"learn-{name}", "kit.learning:learn", 4, dims, {"dims": dims, **parameters})


DRIFTING = job("drifting", hidden=ATTENTION, drift=0.03, num_steps=8)
CHUNKS = job("chunks", hidden=BOTH, dims={**DIMS, "virtual_pipeline": 2})


def on(*jobs: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("job", jobs, ids=str)


def assert_agreed(ranks: Ranks) -> None:
    """Every rank knows the same, and runs its part of one plan, at every step."""
    for rank in ranks[1:]:
        for own, first in zip(rank, ranks[0], strict=True):
            for name in ("plan", "costs", "speed", "ranks", "lengths"):
                assert own[name] == first[name]


def row_errors(step: dict[str, Any]) -> list[float]:
    """Of the time of each row on one rank, as learnt, against the hidden model's."""
    learnt, hidden = CostModel(**step["costs"]), CostModel(**step["hidden"])
    rows = [[step["lengths"][i] for i in samples] for rank in step["ranks"] for samples in rank]
    scale = step["speed"] / SECONDS_PER_UNIT
    return [abs(scale * learnt.micro_batch(row) / hidden.micro_batch(row) - 1) for row in rows]


@on(DRIFTING, pytest.param(CHUNKS, marks=pytest.mark.long))
def test_a_hidden_model_is_known_within_five_steps(job: Job, ranks: Ranks) -> None:
    assert_agreed(ranks)
    # The first step, which compiles, counts for nothing; the second is read for the third.
    known = [step["speed"] is not None for step in ranks[0]]
    assert all(step["plan again"] == step["plan"] for step in ranks[0])
    assert known == [False, False] + [True] * (len(known) - 2)
    for step in ranks[0][LEARNT_BY:]:
        assert max(row_errors(step)) < 0.1


@on(DRIFTING)
def test_the_model_of_each_step_is_recorded(job: Job, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(ranks[0][-1]["recorded"])
    records = read_records(tmp_path)
    for record, step in zip(records, ranks[0], strict=True):
        assert record.plan.cost_model == CostModel(**step["costs"])
        assert record.seconds_per_unit == step["speed"]
    # And replayed in the last one's unit, from those of each, which are not the same.
    *_, learnt = replay.by_setting(replay.replay(records))
    factor = learnt[-1].record.seconds_per_unit
    assert factor is not None
    recorded = records[-len(learnt) :]
    assert len({record.seconds_per_unit for record in recorded}) == len(learnt) > 2
    expected = [
        (record.seconds_per_unit or 0.0) * predicted_step_time(record.plan, record.lengths)
        for record in recorded
    ]
    assert [factor * step.predicted for step in learnt] == pytest.approx(expected)


@on(
    job(
        "rows-alone",
        hidden={**ATTENTION, "context_parallel_overhead": 0.6},
        dims={"data_parallel": 4},
        max_context_parallel=4,
        num_samples=24,
    )
)
def test_rows_that_ranks_share_teach_nothing(job: Job, ranks: Ranks) -> None:
    """They take ten times as long here, as if ranks waited for each other."""
    assert_agreed(ranks)
    assert {size for rank in ranks for step in rank for size in step["sizes"]} > {1}
    for step in ranks[0][LEARNT_BY:]:
        assert max(row_errors(step)) < 0.1
        assert step["costs"].get("context_parallel_overhead", 0.1) == 0.1  # as it was
