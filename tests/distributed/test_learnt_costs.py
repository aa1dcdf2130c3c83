"""Costs that training learns: stages cost what a hidden model says, and it is found out.

Passes move a clock of their own process, so that times are what they are meant to be, however busy
the machine; one job, with --long, sleeps.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job
from kit.learning import CAP, STALLED

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.learning.learnt_costs import LearntCosts
from mcore_batching.planning.pipeline import Clock, Schedule
from mcore_batching.planning.plans.records import read_records
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools import replay
from mcore_batching.tools.cli import main

DIMS = {"data_parallel": 2, "pipeline_parallel": 2}
CONFIG = PlannerConfig(max_tokens_per_gpu=CAP, plan_effort=60)
SECONDS_PER_UNIT = 1e-5
LEARNT_BY = 5
"""Steps after which the model is to be known."""

LAUNCHES = {"linear": 1.0, "quadratic": 0.002, "per_micro_batch": 200.0, "backward_ratio": 1.5}
ATTENTION = {"linear": 1.0, "quadratic": 0.08, "per_micro_batch": 4.0, "backward_ratio": 2.5}
BOTH = {"linear": 1.0, "quadratic": 0.02, "per_micro_batch": 40.0, "backward_ratio": 2.0}

LENGTHS = list(range(2, 80, 3))

Ranks = list[Any]


def job(name: str, function: str = "learn", dims: dict[str, int] = DIMS, **parameters: Any) -> Job:
    return Job(f"learn-{name}", f"kit.learning:{function}", 4, dims, {"dims": dims, **parameters})


def on(*jobs: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("job", jobs, ids=str)


def assert_agreed(ranks: Ranks) -> None:
    """Every rank knows the same, and runs its part of one plan, at every step."""
    for rank in ranks[1:]:
        for own, first in zip(rank, ranks[0], strict=True):
            for name in ("plan", "state", "ranks", "lengths"):
                assert own[name] == first[name]


def prediction_error(step: dict[str, Any], dims: dict[str, int] = DIMS) -> float:
    """Of the step's time by what was learnt, against the hidden model's."""
    shape, hidden = ParallelDims(**dims), CostModel(**step["hidden"])
    learnt = LearntCosts.from_data(step["state"])
    rows = [[[step["lengths"][i] for i in samples] for samples in rank] for rank in step["ranks"]]

    def end(model: CostModel) -> float:
        schedule = Schedule(dims=shape, backward_ratio=model.backward_ratio)
        return max(Clock(list(map(model.micro_batch, rank)), schedule).end for rank in rows)

    predicted = (learnt.seconds_per_unit or 0.0) * end(learnt.cost_model)
    return predicted / (SECONDS_PER_UNIT * end(hidden)) - 1


def predicted_seconds(step: dict[str, Any]) -> float:
    """Of the step's plan over all ranks, by what was learnt."""
    plan, learnt = StepPlan.from_json(step["whole"]), LearntCosts.from_data(step["state"])
    assert learnt.seconds_per_unit is not None
    return learnt.seconds_per_unit * predicted_step_time(plan, step["lengths"], learnt.cost_model)


def loss_of_time(
    step: dict[str, Any], dims: dict[str, int] = DIMS, config: PlannerConfig = CONFIG
) -> float:
    """Time of all samples' plan by what was learnt over that by the hidden model, under it."""
    shape, hidden = ParallelDims(**dims), CostModel(**step["hidden"])

    def time(model: CostModel) -> float:
        plan: StepPlan = plan_step(step["lengths"], shape, config, model)
        return predicted_step_time(plan, step["lengths"], hidden)

    return time(CostModel(**step["state"]["cost_model"])) / time(hidden) - 1


@on(
    job("launches", hidden=LAUNCHES),
    job("attention", hidden=ATTENTION),
    job("drifting", hidden=BOTH, drift=0.03, num_steps=8),
)
def test_a_hidden_model_is_known_within_five_steps(job: Job, ranks: Ranks) -> None:
    assert_agreed(ranks)
    # The first step, which compiles, counts for nothing; the second is read for the third.
    known = [step["state"]["seconds_per_unit"] is not None for step in ranks[0]]
    assert all(step["plan again"] == step["plan"] for step in ranks[0])
    assert known == [False, False] + [True] * (len(known) - 2)
    for step in ranks[0][LEARNT_BY:]:
        assert abs(prediction_error(step)) < 0.05
        assert loss_of_time(step) < 0.02


@on(job("launches", hidden=LAUNCHES))
def test_the_model_of_each_step_is_recorded(job: Job, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(ranks[0][-1]["recorded"])
    records = read_records(tmp_path)
    for record, step in zip(records, ranks[0], strict=True):
        assert record.plan.cost_model == CostModel(**step["state"]["cost_model"])
        assert record.seconds_per_unit == step["state"]["seconds_per_unit"]
    # And replayed in one unit, from those of each, which are not the same.
    *_, learnt = replay.by_setting(replay.replay(records))
    factor = learnt[0].record.seconds_per_unit
    assert factor is not None
    recorded = records[-len(learnt) :]
    assert len({record.seconds_per_unit for record in recorded}) == len(learnt) > 2
    expected = [
        (record.seconds_per_unit or 0.0) * predicted_step_time(record.plan, record.lengths)
        for record in recorded
    ]
    assert [factor * step.predicted for step in learnt] == pytest.approx(expected)


@on(job("interleaved", hidden=BOTH, dims={**DIMS, "virtual_pipeline": 2}, num_steps=4))
def test_times_of_a_stages_chunks_are_added_up(job: Job, ranks: Ranks) -> None:
    assert_agreed(ranks)
    for step in ranks[0][3:]:
        assert abs(prediction_error(step, job.parameters["dims"])) < 0.05


# Global ranks 0 and 1 are the first stage; 3 is slower than its twin.
@on(job("unequal-ranks", hidden=BOTH, slower=[0.8, 0.8, 1.2, 1.5]))
def test_ranks_that_measure_different_times_plan_alike(job: Job, ranks: Ranks) -> None:
    assert_agreed(ranks)
    last = ranks[0][-1]
    assert loss_of_time(last) < 0.02


def row_errors(step: dict[str, Any], seconds_per_unit: float = SECONDS_PER_UNIT) -> list[float]:
    """Of the time of each row by what was learnt, against the hidden model's."""
    plan, hidden = StepPlan.from_json(step["whole"]), CostModel(**step["hidden"])
    learnt = LearntCosts.from_data(step["state"])
    assert learnt.seconds_per_unit is not None
    errors = []
    for row in plan.rows():
        lengths = [step["lengths"][i] for i in row.samples]
        truth = hidden.on_ranks(row.size).micro_batch(lengths) * (1 + hidden.backward_ratio)
        predicted = learnt.seconds_per_unit * learnt.units(lengths, row.size)
        errors.append(abs(predicted / (seconds_per_unit * truth) - 1))
    return errors


COMMUNICATION = {**BOTH, "context_parallel_overhead": 0.4, "context_parallel_fixed": 30.0}
DP4 = {"data_parallel": 4}
DP2_CP2 = {"data_parallel": 2, "context_parallel": 2}


@on(
    pytest.param(
        job("shared-rows", hidden=COMMUNICATION, dims=DP4, max_context_parallel=4),
        marks=pytest.mark.long,
    ),
    pytest.param(
        job("shared-rows-of-pairs", hidden=COMMUNICATION, dims=DP2_CP2, max_context_parallel=4),
        marks=pytest.mark.long,
    ),
    job(
        "shared-rows-and-stages",
        hidden=COMMUNICATION,
        slower=[0.8, 0.8, 1.2, 1.2],
        max_context_parallel=2,
        num_steps=7,
    ),
)
def test_what_communication_costs_is_known_within_five_steps(job: Job, ranks: Ranks) -> None:
    """Though all ranks of a row but one wait there, and measure that, too."""
    assert_agreed(ranks)
    most = job.parameters["max_context_parallel"]
    plans = [StepPlan.from_json(step["whole"]) for step in ranks[0]]
    assert {1, most} <= {row.size for plan in plans for row in plan.rows()}
    config = dataclasses.replace(CONFIG, max_context_parallel=most)
    for step, plan in zip(ranks[0][LEARNT_BY:], plans[LEARNT_BY:], strict=True):
        # Where stages differ, all times are learnt as much too low.
        assert max(row_errors(step)) < (0.15 if "slower" in job.parameters else 0.05)
        assert loss_of_time(step, job.parameters["dims"], config) < 0.02
        if "slower" not in job.parameters:
            truth = predicted_step_time(plan, step["lengths"], CostModel(**step["hidden"]))
            assert predicted_seconds(step) == pytest.approx(SECONDS_PER_UNIT * truth, rel=0.05)


@on(job("two-models", function="alternate", hidden=[LAUNCHES, ATTENTION], num_steps=5))
def test_an_actor_and_a_critic_have_costs_of_their_own(job: Job, ranks: Ranks) -> None:
    for states in ranks:
        assert states == ranks[0]
        for state, hidden in zip(states, job.parameters["hidden"], strict=True):
            learnt, row = LearntCosts.from_data(state), (40, 24, 8)
            truth = CostModel(**hidden).micro_batch(row) * (1 + hidden["backward_ratio"])
            assert learnt.seconds_per_unit is not None
            predicted = learnt.seconds_per_unit * learnt.units(row)
            assert predicted == pytest.approx(SECONDS_PER_UNIT * truth, rel=0.05)


@on(job("experts", hidden=ATTENTION, dims={**DIMS, "expert_parallel": 2}, num_steps=7))
def test_ranks_that_wait_in_every_slot_do_not_take_it_for_work(job: Job, ranks: Ranks) -> None:
    """Every rank measures the time of the costliest row of its slot."""
    assert_agreed(ranks)
    # Which row is the costliest is known a step later.
    for step in ranks[0][LEARNT_BY + 1 :]:
        assert max(row_errors(step)) < 0.05


COSTLY = {**ATTENTION, "context_parallel_overhead": 0.6, "context_parallel_fixed": 10.0}


def experts_and_shared_rows(name: str, most: int, hidden: dict[str, float], **dims: int) -> Job:
    dims = {**DP4, "expert_parallel": 2, **dims}
    return job(name, hidden=hidden, dims=dims, max_context_parallel=most, num_steps=12)


@on(
    experts_and_shared_rows("experts-and-pairs", 2, COSTLY),
    pytest.param(
        experts_and_shared_rows("experts-and-shared-rows", 4, COMMUNICATION),
        marks=pytest.mark.long,
    ),
    pytest.param(
        experts_and_shared_rows("all-experts", 4, COSTLY, expert_parallel=4),
        marks=pytest.mark.long,
    ),
)
def test_both_kinds_of_waiting_together_spoil_nothing(job: Job, ranks: Ranks) -> None:
    """Which row is waited for depends on what communication costs, and the other way round."""
    assert_agreed(ranks)
    most = job.parameters["max_context_parallel"]
    sizes = {row.size for step in ranks[0] for row in StepPlan.from_json(step["whole"]).rows()}
    assert {1, most} <= sizes
    # A row that was never the costliest is known only to cost no more: single rows are off by up to
    # 90 % for a step. It costs no time, and whole steps are known by the tenth.
    config = dataclasses.replace(CONFIG, max_context_parallel=most)
    for step in ranks[0][LEARNT_BY:]:
        assert loss_of_time(step, job.parameters["dims"], config) < 0.03
    for step in ranks[0][9:]:
        plan = StepPlan.from_json(step["whole"])
        truth = predicted_step_time(plan, step["lengths"], CostModel(**step["hidden"]))
        assert predicted_seconds(step) == pytest.approx(SECONDS_PER_UNIT * truth, rel=0.05)


@on(job("faults", hidden=BOTH, faults=True))
def test_a_stalled_step_and_nans_spoil_nothing(job: Job, ranks: Ranks) -> None:
    assert_agreed(ranks)
    assert [step["updated"] for step in ranks[0]] == [i != STALLED for i in range(6)]
    for step in ranks[0][STALLED + 1 :]:
        assert abs(prediction_error(step)) < 0.05
        assert loss_of_time(step) < 0.02


@on(job("resumed", function="resume", hidden=LAUNCHES, num_steps=4))
def test_a_resumed_job_plans_by_what_was_learnt(job: Job, ranks: Ranks, tmp_path: Path) -> None:
    """Or another one, and a command, by the file that the first one left."""
    for rank in ranks:
        assert rank["state"] == ranks[0]["state"]
        assert CostModel(**rank["resumed"]) == CostModel(**rank["state"]["cost_model"])
        assert rank["resumed"]["per_micro_batch"] == pytest.approx(200.0, rel=0.1)
        assert rank["file"] == rank["resumed"]
        # Some rank without its state would plan by another model, and hang the others.
        assert rank["alone"].startswith("PlanMismatchError")
        assert "what was learnt of costs is" in rank["alone"]
        assert rank["flag"].startswith("PlanMismatchError")
        assert "costs are learnt is " in rank["flag"]
        assert rank["unreadable"]["per_micro_batch"] == 256.0  # the first guess
    file, lengths, plan = (tmp_path / name for name in ("cost.json", "lengths.txt", "plan.json"))
    file.write_text(ranks[0]["cost model"])
    lengths.write_text("\n".join(map(str, LENGTHS)))
    flags = f"--dp 2 --pp 2 --max-tokens-per-gpu {CAP} --plan-effort 60 --no-advice".split()
    assert main(["plan", str(lengths), *flags, "--cost-model", str(file), "--out", str(plan)]) == 0
    model = CostModel(**ranks[0]["resumed"])
    expected = plan_step(LENGTHS, ParallelDims(**DIMS), CONFIG, model)
    assert expected != plan_step(LENGTHS, ParallelDims(**DIMS), CONFIG)
    assert StepPlan.from_json(plan.read_text()) == expected


def assert_predicted(ranks: Ranks) -> None:
    """Other work makes passes take longer than they sleep; reductions and the update are beside."""
    errors = []
    for of_ranks in list(zip(*ranks, strict=True))[LEARNT_BY - 1 :]:
        measured, predicted = (max(s[key] for s in of_ranks) for key in ("seconds", "predicted"))
        errors.append(abs(measured / predicted - 1))
    assert statistics.median(errors) < 0.2


@pytest.mark.long  # on a busy machine sleepers wake late
@on(
    job(
        "asleep",
        hidden=BOTH,
        sleeps=True,
        seconds_per_unit=2e-4,
    )
)
def test_steps_that_really_sleep_take_what_was_predicted(job: Job, ranks: Ranks) -> None:
    """What a stage waits for its neighbour is not its own."""
    assert_agreed(ranks)
    assert_predicted(ranks)


@pytest.mark.long
@on(
    job(
        "shared-rows-asleep",
        hidden=COMMUNICATION,
        dims=DP4,
        max_context_parallel=4,
        sleeps=True,
        seconds_per_unit=2e-4,
        num_steps=8,
    )
)
def test_ranks_that_really_wait_in_shared_rows_do_not_take_it_for_work(
    job: Job, ranks: Ranks
) -> None:
    assert_agreed(ranks)
    errors = row_errors(ranks[0][-1], 2e-4)
    assert sum(errors) / len(errors) < 0.15
    assert_predicted(ranks)
