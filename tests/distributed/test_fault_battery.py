"""Faults that end a job, or that it has to live through; on every layout with ``--long``."""

from __future__ import annotations

from typing import Any

import pytest
from kit.battery import FAULTS, STOPPED_SECONDS, always_on, layouts_of, run_battery

from mcore_batching.megatron.watch import EXIT_CODE

SECONDS = 60.0  # generous: two cores may carry eight processes; a time-out would take 100

Ends = dict[tuple[str, str], list[Any]]
"""By fault and layout, rank by rank."""


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    chosen = {
        (item.callspec.params["fault"], item.callspec.params["layout"]): None
        for item in request.session.items
        if "ends" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    }
    chosen |= {("none", layout): None for fault, layout in chosen if FAULTS[fault].where == "0"}
    return run_battery([*chosen], tmp_path_factory.mktemp("battery"))


def rows(is_survived: bool) -> list[Any]:
    return [
        pytest.param(fault, layout, marks=() if layout == always_on(fault) else pytest.mark.long)
        for fault, row in FAULTS.items()
        for layout in layouts_of(fault)
        if (row.where == "0") == is_survived
    ]


@pytest.mark.parametrize(("fault", "layout"), rows(is_survived=False))
def test_every_rank_ends_with_the_named_error(fault: str, layout: str, ends: Ends) -> None:
    row, ranks = FAULTS[fault], ends[fault, layout]
    faulty = ranks[0 if "no agent" in layout else -1]
    assert faulty.exit_code == int(row.where), faulty
    for rank in ranks:
        if rank is faulty and int(row.where) < 0:
            continue
        # Raised, or printed by a process that could not be released.
        assert rank.exit_code == (1 if rank.error else EXIT_CODE), rank
        assert row.error in (rank.error or rank.message), rank
        assert row.text in rank.message, rank
        assert rank.seconds < SECONDS
        if "no agent" in layout:
            # The store ends with rank 0: it used to go before the others had read the cause.
            assert "rank 0: " in rank.message, rank
            assert "rank 1: " not in rank.message, rank


@pytest.mark.parametrize(("fault", "layout"), rows(is_survived=True))
def test_every_rank_goes_on(fault: str, layout: str, ends: Ends) -> None:
    expected, found = ends["none", layout], ends[fault, layout]
    assert [rank.exit_code for rank in found] == [0] * len(found), found
    assert [rank.value for rank in found] == [rank.value for rank in expected]
    if not FAULTS[fault].text:
        assert min(rank.seconds for rank in found) > STOPPED_SECONDS - 1
    assert FAULTS[fault].text in found[0].message
