"""Transfers between pipeline stages: timed without clocks that agree, learnt, and planned with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mcore_batching.planning import ConfigError, CostModel, ParallelDims, PlannerConfig, plan_step
from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.damping import WINDOW_STEPS
from mcore_batching.planning.learnt_costs import LearntCosts
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.transfers import (
    TimedTransfer,
    Transfer,
    exposed,
    learnt_transfers,
    time_of_transfer,
    with_transfers,
)

MODEL = CostModel(per_micro_batch=500.0)
SECONDS_PER_UNIT = 1e-6
TRUTH = Transfer(seconds=2e-4, seconds_per_token=3e-7)
LINKS = 3

Seconds = Callable[[int, int, float, random.Random], float]
"""``(step, link, tokens, random) -> seconds``."""


def learn(
    seconds: Seconds,
    num_steps: int = 6,
    tokens: Callable[[random.Random], float] = lambda generator: generator.uniform(500, 8192),
    before: tuple[Transfer, ...] = (),
    links: range = range(LINKS),
) -> Iterator[tuple[Transfer, ...]]:
    """What is known after each step, of four transfers of each of these links."""
    generator, steps = random.Random(1), []
    for step in range(num_steps):
        drawn = [(link, tokens(generator)) for link in links for _ in range(4)]
        timed = [TimedTransfer(k, t, seconds(step, k, t, generator)) for k, t in drawn]
        steps.append(timed)
        del steps[:-WINDOW_STEPS]
        before = learnt_transfers(before, steps, LINKS, MODEL, SECONDS_PER_UNIT)
        yield before


def error(known: tuple[Transfer, ...], truth: Transfer = TRUTH) -> float:
    """The largest relative error of a transfer's time."""
    assert len(known) == LINKS
    return max(
        abs(each.time(tokens) / truth.time(tokens) - 1) for each in known for tokens in (1000, 8000)
    )


@pytest.mark.parametrize(
    "truth", [TRUTH, Transfer(seconds=5e-4), Transfer(seconds_per_token=1e-7)], ids=str
)
def test_transfers_are_known_within_five_steps(truth: Transfer) -> None:
    *_, known = learn(lambda step, link, tokens, _: truth.time(tokens), num_steps=5)
    assert error(known, truth) < 0.02


def test_links_are_told_apart() -> None:
    *_, known = learn(lambda step, link, tokens, _: (1 + 4 * link) * TRUTH.time(tokens))
    for link, each in enumerate(known):
        assert each.time(4000) == pytest.approx((1 + 4 * link) * TRUTH.time(4000), rel=0.02)


def test_noise_and_stalls_do_not_spoil_it() -> None:
    def seconds(step: int, link: int, tokens: float, generator: random.Random) -> float:
        stalls = step == 4 or generator.random() < 0.08
        return TRUTH.time(tokens) * generator.gauss(1, 0.03) * (20 if stalls else 1)

    for known in list(learn(seconds, num_steps=10))[2:]:
        assert error(known) < 0.15


def test_two_steps_in_a_row_are_a_change() -> None:
    *_, one, two = learn(
        lambda step, link, tokens, _: (1 + 3 * (step > 6)) * TRUTH.time(tokens), num_steps=9
    )
    assert error(one) < 0.1
    assert error(two, Transfer(seconds=8e-4, seconds_per_token=1.2e-6)) < 0.05


def test_noise_that_is_little_beside_passes_is_no_outlier() -> None:
    """Of transfers of next to nothing half are off by more than half, and the mean is meant."""
    means = [
        ordered_sum(each.time(4000) for each in known) / LINKS
        for known in learn(
            lambda *given: 2e-5 * given[-1].expovariate(1), 50, lambda generator: 4000.0
        )
    ]
    assert ordered_sum(means) / 50 == pytest.approx(2e-5, rel=0.1)


def test_what_rows_cannot_tell_apart_stays() -> None:
    """Rows of one length, or nearly, in times that are not quite equal."""
    before = (Transfer(seconds=1e-4, seconds_per_token=1e-7),) * LINKS
    for spread, noise in ((0.0, 0.0), (0.01, 0.02)):
        *_, known = learn(
            lambda *given, noise=noise: 1e-3 * given[-1].gauss(1, noise),
            tokens=lambda generator, spread=spread: 4000 * generator.gauss(1, spread),
            before=before,
        )
        for each in known:
            assert each.seconds == pytest.approx(2e-4, rel=0.01 + 20 * noise)
            assert each.seconds_per_token == pytest.approx(2e-7, rel=0.01 + 5 * noise)


def test_a_link_that_nobody_timed_takes_after_the_others() -> None:
    *_, known = learn(lambda _, __, tokens, ___: TRUTH.time(tokens), links=range(1, LINKS))
    assert error(known) < 0.02
    *_, same = learn(lambda *unused: 1.0, before=known, links=range(0))
    assert same == known


def test_no_transfer_takes_less_than_nothing() -> None:
    *_, known = learn(lambda _, __, tokens, ___: max(0.0, 1e-3 - 1e-7 * tokens))
    assert all(each.seconds > 0 and each.seconds_per_token == 0 for each in known)
    *_, known = learn(lambda *unused: 0.0)
    assert known == (Transfer(),) * LINKS
    *_, known = learn(lambda _, __, tokens, ___: TRUTH.time(tokens), before=known)
    assert error(known) < 0.02


@pytest.mark.parametrize(
    ("round_trip", "idle", "under_1f1b", "interleaved"),
    [
        (4.0, 9.0, 2.0, 2.0),  # neither receiver was busy
        (4.0, 2.0, 2.0, 2.0),
        (9.0, 2.0, 2.0, None),  # one was, and the transfer began when it was not any more
        (4.0, 1.9, 1.9, None),
        (-1.0, 2.0, 0.0, 0.0),
        (math.nan, 2.0, None, None),
        (4.0, math.nan, None, None),
        (4.0, math.inf, None, None),
        (4.0, -math.inf, None, None),
    ],
)
def test_a_transfer_is_told_from_differences_of_either_clock(
    round_trip: float, idle: float, under_1f1b: float | None, interleaved: float | None
) -> None:
    assert time_of_transfer(round_trip, idle, overlapped=False) == under_1f1b
    assert time_of_transfer(round_trip, idle, overlapped=True) == interleaved


@pytest.mark.parametrize(
    ("stages", "chunks", "transfers"), [(1, 1, 0), (2, 1, 1), (4, 1, 1.5), (2, 2, 2), (4, 3, 3)]
)
def test_transfers_that_no_pass_hides(stages: int, chunks: int, transfers: float) -> None:
    dims = ParallelDims(pipeline_parallel=stages, virtual_pipeline=chunks)
    assert exposed(dims) == transfers
    rows, known = [(3000,)] * 4, (TRUTH,) * (stages - 1)
    model = with_transfers(MODEL, known, SECONDS_PER_UNIT, dims)
    longer = SECONDS_PER_UNIT * 3 * (model.micro_batch(rows[0]) - MODEL.micro_batch(rows[0]))
    assert longer == pytest.approx(transfers * TRUTH.time(3000))
    learnt = LearntCosts(
        cost_model=MODEL, seconds_per_unit=SECONDS_PER_UNIT, transfers=known, num_steps=3
    )
    assert learnt.planning_model(dims) == model
    seconds = SECONDS_PER_UNIT * pipeline_time([model.micro_batch(row) for row in rows], dims)
    assert learnt.predicted_seconds(rows, dims) == pytest.approx(seconds)
    plan = plan_step([3000] * 4, dims, PlannerConfig(max_tokens_per_gpu=3000), MODEL)
    assert learnt.predicted_seconds_of_plan(plan, [3000] * 4) == pytest.approx(seconds)
    # What passes cost is learnt without transfers.
    assert learnt.units(rows[0]) == 3 * MODEL.micro_batch(rows[0])
    assert replace(learnt, seconds_per_unit=None).planning_model(dims) == MODEL


def test_the_stage_between_the_slowest_links_holds_up_the_others() -> None:
    links = [Transfer(seconds=each) for each in (1e-3, 4e-3, 2e-3)]
    model = with_transfers(MODEL, links, 1e-3, ParallelDims(pipeline_parallel=4))
    assert model.per_micro_batch == pytest.approx(500 + 1.5 * 3.0 / 3)


def test_they_are_saved_and_older_states_have_none() -> None:
    learnt = LearntCosts(cost_model=MODEL, transfers=(TRUTH, Transfer()), seconds_per_unit=1e-6)
    state = json.loads(json.dumps(learnt.to_data()))
    assert LearntCosts.from_data(state) == learnt
    assert learnt.on_stages(3).transfers == learnt.transfers
    assert learnt.on_stages(4).transfers == ()
    del state["transfers"]
    assert LearntCosts.from_data(state) == replace(learnt, transfers=())


@pytest.mark.parametrize(
    "transfers", [[{"seconds": -1.0}], [{"seconds": math.nan}], [{"hours": 1.0}], [3], None, 5]
)
def test_a_state_whose_transfers_are_none_is_refused(transfers: object) -> None:
    state = LearntCosts(cost_model=MODEL).to_data() | {"transfers": transfers}
    with pytest.raises(ConfigError):
        LearntCosts.from_data(state)
