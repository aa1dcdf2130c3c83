"""Samples that stay on their rank, in the units that are packed there."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.megatron.plan import _local_units
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.planning.local import fill_local, least_count, pack_local

CAP = 40
SAMPLES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.booleans()), min_size=1, max_size=12
)
"""Tokens, group and whether this rank has it, of each sample of a step."""


@pytest.mark.parametrize("shares", [False, True])
@given(samples=SAMPLES)
def test_every_sample_of_the_rank_is_in_one_unit_that_fits(
    samples: list[tuple[int, int, bool]], shares: bool
) -> None:
    """Also one without tokens, and one of a group with samples of other ranks."""
    lengths, groups, is_here = (list(each) for each in zip(*samples, strict=True))
    held = [place for place, here in enumerate(is_here) if here]

    def forest(all_lengths: list[int], numbers: list[int]) -> Any:
        own = [all_lengths[n] for n in numbers]
        return forest_of_groups(own, [min(7, n) for n in own], [groups[n] for n in numbers])

    settings = SimpleNamespace(
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=CAP),
        cost_model=CostModel(),
    )
    given_samples: Any = SimpleNamespace(
        settings=settings,
        steps=[range(len(lengths))],
        lengths=lengths,
        forward_only=False,
        beginnings=SimpleNamespace(forest=forest) if shares else None,
        naming=lambda numbers: contextlib.nullcontext(),
    )
    places = {number: at for at, number in enumerate(held)}
    moves: Any = SimpleNamespace(places=places, origin=lambda number: (0, number))
    units, problem = _local_units(given_samples, moves, 0)
    assert sorted(i for unit in units for i in unit.samples) == held
    assert [unit.size for unit in units] == list(problem.lengths)
    assert shares or all(len(unit.samples) == 1 for unit in units)
    packed = pack_local(problem)
    rows = fill_local(problem, packed, least_count(problem, packed))
    assert sorted(at for row in rows for at in row) == list(range(len(units)))
    assert all(sum(units[at].size for at in row) <= CAP for row in rows)
