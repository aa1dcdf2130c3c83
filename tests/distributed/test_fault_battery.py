"""Faults that end a job, or that it has to live through, on every layout, with the time it took.

All layouts with ``--long``; the table is printed at the end.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.battery import FAULTS, STOPPED_SECONDS, End, always_on, layouts_of, run_battery
from kit.harness import JobFailedError, results, run_jobs
from kit.stock_jobs import FLAG, PP2, TP2, TP2_CP2, VPP2, job, steps

from mcore_batching.megatron.watch import EXIT_CODE

SECONDS = 60.0  # generous: two cores may carry eight processes; a time-out would take 100

Ends = dict[tuple[str, str], list[End]]
"""By fault and layout, rank by rank."""


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ends]:
    """How each rank of each selected job ended; in the end the table."""
    chosen = {
        (item.callspec.params["fault"], item.callspec.params["layout"]): None
        for item in request.session.items
        if "ends" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    }
    chosen |= {("none", layout): None for fault, layout in chosen if FAULTS[fault].where == "0"}
    found = run_battery([*chosen], tmp_path_factory.mktemp("battery"))
    yield found
    lines = []
    for (fault, layout), ranks in sorted(found.items()):
        how = ", ".join(f"{each.error or 'exit'} {each.exit_code}" for each in ranks)
        seconds = max(each.seconds for each in ranks)
        lines.append(f"{fault:26s} {layout:13s} {seconds:7.1f} s  {how}")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n")


def rows(is_survived: bool) -> list[Any]:
    """Faults and layouts."""
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


RESUMED = {"DP2 PP2": PP2, "DP2 PP2 VPP2": VPP2, "DP2 TP2": TP2, "TP2 CP2": TP2_CP2}


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)
@pytest.mark.parametrize("layout", RESUMED)
def test_killed_in_a_checkpoint_and_resumed(layout: str, tmp_path: Path) -> None:
    """All ranks end; the run goes on from the checkpoint before, bit for bit."""
    words = [*steps(6, evaluations=0), *RESUMED[layout], *FLAG]
    saves = [*words, "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    moment = tmp_path / "moment"
    killed = job("killed", *saves, function="killed_in_checkpoint", moment=str(moment))
    failed = run_jobs([killed], tmp_path / "killed")["killed"]
    seconds = time.time() - float(moment.read_text())
    assert isinstance(failed, JobFailedError)
    assert seconds < SECONDS
    print(f"{layout}: all ranks gone after {seconds:.1f} s")
    runs = [job("whole", *words), job("resumed", *saves, "--load", str(tmp_path / "saved"))]
    whole, resumed = map(results, run_jobs(runs, tmp_path / "runs").values())
    for reference, record in zip(whole, resumed, strict=True):
        names = ("iteration", "loss", "grad_norm", "learning_rate", "consumed_samples")
        wanted, made = (
            [[step[name] for name in names] for step in steps]
            for steps in (reference["steps"][2:], record["steps"])
        )
        assert made == wanted
