"""Faults that end a job, or that it has to live through, on every layout, with the time it took.

Run with ``--long``; the table is printed at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kit.battery import SLOW_SECONDS, STOPPED_SECONDS
from kit.forked import End, run_forked
from kit.harness import Job

from mcore_batching.megatron.failure_watch import EXIT_CODE

pytestmark = pytest.mark.long

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {"data_parallel": 2}),
    "TP2": (2, {"tensor_parallel": 2}),
    "CP2": (2, {"context_parallel": 2}),
    "PP2 VPP2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "DP2 PP2": (4, {"data_parallel": 2, "pipeline_parallel": 2}),
}
FATAL = {
    "layer, forward": "PipelineFailedError",
    "layer, backward": "PipelineFailedError",
    "optimizer": "PipelineFailedError",
    "loss": "ForwardFailedError",
    "loss is NaN": "NonFiniteError",
    "other settings": "PlanMismatchError",
    "no data": "PlanningFailedError",
    "SIGKILL": "PipelineFailedError",
}
SURVIVED = {"none": 0, "SIGSTOP": STOPPED_SECONDS, "slow": SLOW_SECONDS, "disk full": 0}
SECONDS = 60.0  # generous: two cores may carry four processes; a time-out would take 100


def name_of(fault: str, layout: str) -> str:
    return re.sub(r"\W+", "-", f"{fault} {layout}")


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest,
    references: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, list[End]]]:
    """How each rank of each selected job ended; in the end the table."""
    chosen = {
        (item.callspec.params["fault"], item.callspec.params["layout"]): None
        for item in request.session.items
        if "ends" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    }
    chosen |= {("none", layout): None for fault, layout in chosen if fault in SURVIVED}
    jobs = []
    for fault, layout in chosen:
        nproc, dims = LAYOUTS[layout]
        parameters = {"dims": dims, "reference": references["dense"], "fault": fault}
        jobs.append(
            Job(name_of(fault, layout), "kit.battery:train", nproc, dims, parameters, SECONDS + 60)
        )
    found = run_forked(jobs, tmp_path_factory.mktemp("battery"))
    yield found
    lines = [f"{'fault':16s} {'layout':9s} {'seconds':>7s}  ends"]
    for fault, layout in sorted(chosen):
        ranks = found[name_of(fault, layout)]
        how = ", ".join(f"{each.error or 'exit'} {each.exit_code}" for each in ranks)
        seconds = max(each.seconds for each in ranks)
        lines.append(f"{fault:16s} {layout:9s} {seconds:7.1f}  {how}")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", FATAL)
def test_every_rank_ends_with_the_named_error(
    fault: str, layout: str, ends: dict[str, list[End]]
) -> None:
    *others, faulty = ends[name_of(fault, layout)]
    if fault == "SIGKILL":
        assert faulty.exit_code == -9
    else:
        assert faulty.error == FATAL[fault], faulty
    for rank in others:
        # Raised, or printed by a process that could not be released.
        assert rank.exit_code == (1 if rank.error else EXIT_CODE), rank
        assert FATAL[fault] in (rank.error or rank.message), rank
        assert rank.seconds < SECONDS
    if FATAL[fault] == "PipelineFailedError" and fault != "SIGKILL":
        cause = "out of memory, on purpose"
        assert all(cause in rank.message for rank in [*others, faulty])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", [fault for fault in SURVIVED if fault != "none"])
def test_every_rank_goes_on(fault: str, layout: str, ends: dict[str, list[End]]) -> None:
    expected, found = ends[name_of("none", layout)], ends[name_of(fault, layout)]
    assert [rank.exit_code for rank in found] == [0] * len(found), found
    assert [rank.value for rank in found] == [rank.value for rank in expected]
    if SURVIVED[fault]:
        assert min(rank.seconds for rank in found) > SURVIVED[fault] - 1
    else:
        assert "no more steps are recorded" in found[0].message
