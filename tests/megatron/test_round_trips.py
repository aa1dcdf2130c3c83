"""Round trips between pipeline stages, each half told on a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mcore_batching.megatron.learning.pass_times import TimedStep
from mcore_batching.megatron.learning.round_trips import NUM_TRIPS, RoundTrips
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import Schedule
from mcore_batching.planning.transfers import TimedTransfer

DP2_PP2 = ParallelDims(data_parallel=2, pipeline_parallel=2)
RANKS = [(replica, stage) for replica in range(2) for stage in range(2)]
ROWS: list[tuple[int, ...]] = [(10, 20), (100,)]
# Passes of two rows, forward 1 s and backward 2 s, by a clock that all agree on. Transfers take 3 s
# for the first row and 5 s for the second, and both stages wait where a row of each is exchanged.
#         forward 0   forward 1   backward 0   backward 1
FIRST = [(0.0, 1.0), (4.0, 5.0), (12.0, 14.0), (20.0, 22.0)]
#         forward 0  backward 0  forward 1     backward 1
SECOND = [(4.0, 5.0), (5.0, 7.0), (12.0, 13.0), (13.0, 15.0)]


def timed(stage: int, ahead: float = 0.0, dims: ParallelDims = DP2_PP2) -> TimedStep:
    passes = FIRST if stage == 0 else SECOND
    return TimedStep(
        rows=ROWS,
        sizes=[1, 1],
        order=Schedule(dims=dims).order(stage, len(ROWS)),
        began=ahead,
        marks=[ahead + mark for each in passes for mark in each],
        predicted_seconds=0.0,
        shared=None,
    )


class Job:
    """The learners of all ranks of two pipelines of two stages."""

    def __init__(self, speaks: bool = True) -> None:
        self.ranks = [
            RoundTrips(DP2_PP2, stage=stage, replica=replica, speaks=speaks)
            for replica, stage in RANKS
        ]

    def learn(self, steps: Sequence[TimedStep | None]) -> list[TimedTransfer]:
        """Of the newest step, as every rank knows it, given what each has timed of it."""
        told = [rank.told(step) for rank, step in zip(self.ranks, steps, strict=True)]
        sums = [sum(each) for each in zip(*(sums for sums, _ in told), strict=True)]
        idle = [max(each) for each in zip(*(idle for _, idle in told), strict=True)]
        assert len(sums) == 2 * len(idle) == 2 * NUM_TRIPS
        assert not any(math.isnan(each) for each in idle)
        known = [rank.learn(sums, idle) for rank in self.ranks]
        assert all(each == known[0] for each in known)
        return known[0][-1]


def on_all(*ahead: float) -> list[TimedStep | None]:
    """Steps as timed on all ranks, by clocks so far ahead of each other."""
    return [timed(stage, of) for (_, stage), of in zip(RANKS, ahead, strict=True)]


def test_two_stages_tell_transfers_by_their_own_clocks() -> None:
    job = Job()
    for _ in range(2):
        seen = set(job.learn(on_all(0.0, 7000.0, -300.0, 5e6)))
        # The first row comes alone and goes back beside the second, for which both stages wait.
        # The second is waited for, that long again, until the next stage has run the first.
        assert seen == {TimedTransfer(0, 65.0, 4.0), TimedTransfer(0, 100.0, 5.0)}


def test_replicas_tell_it_in_turn() -> None:
    job = Job()
    slow = [replace(step, marks=[3 * m for m in step.marks]) for step in on_all(*[0.0] * 4) if step]
    mixed = [*on_all(*[0.0] * 4)[:2], *slow[2:]]
    assert [max(each.seconds for each in job.learn(mixed)) for _ in range(4)] == [5, 15, 5, 15]


def test_other_ranks_of_a_stage_tell_nothing() -> None:
    assert Job(speaks=False).learn(on_all(0.0, 0.0, 0.0, 0.0)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_half_that_is_not_known_is_no_transfer(rank: int) -> None:
    steps = on_all(0.0, 0.0, 0.0, 0.0)
    steps[rank] = None
    assert Job().learn(steps) == []
    broken = timed(rank)
    broken.marks[6 if rank == 0 else 0] = math.nan  # where what one row had to wait for ends
    steps[rank] = broken
    kept = Job().learn(steps)
    assert {each.tokens for each in kept} == ({65.0} if rank == 0 else {100.0})


def test_a_stage_that_is_late_for_the_step_makes_no_transfer_longer() -> None:
    """The first row was sent, and the second stage was not there."""
    late = timed(1)
    steps: list[TimedStep | None] = [timed(0), replace(late, began=2.0), None, None]
    assert min(each.seconds for each in Job().learn(steps)) == 2.0


@pytest.mark.parametrize(("stage", "links"), [(0, [0]), (2, [1, 2]), (3, [2])])
def test_a_stage_speaks_of_its_own_links(stage: int, links: list[int]) -> None:
    """Of three; interleaved, where no row that comes in waits for one that goes out."""
    dims = ParallelDims(pipeline_parallel=4, virtual_pipeline=2)
    order = Schedule(dims=dims).order(stage, 4)
    rows: list[tuple[int, ...]] = [(10,), (100,), (400,), (1000,)]
    step = replace(timed(1), order=order, marks=[1.0 + n for n in range(2 * len(order))], rows=rows)
    step = replace(step, sizes=[1, 1, 1, 4])  # the last row is cut into four
    sums, idle = RoundTrips(dims, stage=stage, replica=0, speaks=True).told(step)
    for number, stood in enumerate(idle):
        slot, link = divmod(number, 3)
        # Half of it may have been for what went out; before the first pass nothing did.
        known = -1.0 if slot == 0 and link < stage else -0.5
        assert stood == (known if link in links else -math.inf)
        tokens = [10, 100, 400, 250][slot] / 2
        assert sums[2 * number + 1] == (tokens if link in links else 0.0)


def test_placeholders_tell_nothing() -> None:
    steps = [step and replace(step, rows=[(), (100,)]) for step in on_all(*[0.0] * 4)]
    assert {each.tokens for each in Job().learn(steps)} == {50.0, 100.0}
    steps = [step and replace(step, rows=[(), ()]) for step in on_all(*[0.0] * 4)]
    assert Job().learn(steps) == []


def test_links_of_a_long_pipeline_take_turns() -> None:
    dims = ParallelDims(pipeline_parallel=32)
    rank = RoundTrips(dims, stage=0, replica=0, speaks=True)
    links: list[int] = []
    for _ in range(6):
        found = rank.learn([2.0, 10.0] * NUM_TRIPS, [-1.0] * NUM_TRIPS)
        links += [each.link for each in found[-1]]
    assert set(links) == set(range(31))
    assert RoundTrips(ParallelDims(), stage=0, replica=0, speaks=True).told(None) == ([], [])
