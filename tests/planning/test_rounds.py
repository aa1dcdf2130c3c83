"""Rounds: which numbers of slots are tried, and which step of each stays."""

from __future__ import annotations

import pytest
from planning_cases import log_normal

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.rounds import Rounds, thinned, useful_counts

PP8 = ParallelDims(data_parallel=4, pipeline_parallel=8)
LENGTHS = log_normal(256, 2, median=4000, sigma=1.5, cap=100_000)


def rounds_of(lengths: list[int], dims: ParallelDims, cap: int = 100_000) -> Rounds:
    config = PlannerConfig(max_tokens_per_gpu=cap)
    return Rounds(Objective(Problem.of(lengths, dims, config, CostModel())))


def test_the_step_of_the_soonest_round_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds do not always end sooner than those before them."""
    ends, make_round = [], Rounds._round

    def watched(rounds: Rounds, count: int) -> float | None:
        ends.append(make_round(rounds, count))
        return ends[-1]

    monkeypatch.setattr(Rounds, "_round", watched)
    rounds = rounds_of(LENGTHS, PP8)
    rounds.make(32, in_vain=3)
    assert len(ends) > 3
    assert rounds.best[32].end == min(ends) < max(ends)


def test_numbers_on_both_sides_of_the_best_two_are_tried() -> None:
    rounds = rounds_of(LENGTHS, PP8)
    problem = rounds.objective.problem
    counts = useful_counts(problem.fewest_rows, problem.num_samples, 4, PP8)
    rounds.compare(keep=0.0)
    assert set(rounds.offsets) >= {*counts[::2], counts[-1]}
    for count in rounds.soonest[:2]:
        at = counts.index(count)
        assert set(counts[max(0, at - 1) : at + 2]) <= set(rounds.offsets)


def test_placeholders_come_first() -> None:
    """With fewer samples than slots, where they delay others least while the pipeline fills."""
    rounds = rounds_of(
        [900, 800, 700, 600, 500], ParallelDims(data_parallel=2, pipeline_parallel=4)
    )
    rounds.make(8)
    for slots in rounds.best[8].ranks:
        assert list(map(bool, slots)) == sorted(map(bool, slots))


def test_a_few_ranks_have_about_the_work_of_all_of_them() -> None:
    dims = ParallelDims(data_parallel=64, pipeline_parallel=4)
    whole = rounds_of(log_normal(2048, 4, median=4000, sigma=1.0, cap=100_000), dims)
    few = thinned(whole, 8)
    assert few.ranks == 8
    assert few.objective.problem.num_samples == 256
    assert few._work == pytest.approx(whole._work, rel=0.01)
