"""Faults that end a job, or that it has to live through, on every layout, with the time it took.

Run with ``--long``; the table is printed at the end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.battery import SLOW_SECONDS, STOPPED_SECONDS
from kit.forked import End, run_forked
from kit.harness import Job, JobFailedError, results, run_jobs
from kit.stock_jobs import FLAG, PP2, TP2, TP2_CP2, VPP2, job, steps

from mcore_batching.megatron.job.failure_watch import EXIT_CODE

pytestmark = pytest.mark.long

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {"data_parallel": 2}),
    "TP2": (2, {"tensor_parallel": 2}),
    "CP2": (2, {"context_parallel": 2}),
    "DP2 shared": (2, {"data_parallel": 2}),
    "PP2 VPP2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "DP2 PP2": (4, {"data_parallel": 2, "pipeline_parallel": 2}),
}
WITHOUT_AGENT = {
    f"{name}, no agent": (2, {dim: 2})
    for name, dim in [
        ("TP2", "tensor_parallel"),
        ("CP2", "context_parallel"),
        ("DP2", "data_parallel"),
        ("PP2", "pipeline_parallel"),
    ]
}
"""Rank 0 hosts the job's store, as under srun, has the fault and ends at once."""
PLANNER: dict[str, dict[str, Any]] = {
    "DP2 shared": {"dynamic_batch_context_parallel": 2},
    "row groups": {"dynamic_batch_context_parallel": 2},
    "later steps": {"global_batch_size": 5},
    "later, SIGKILL": {"global_batch_size": 5},
}
"""Of layouts and faults. The longest sample is cut over both ranks; others are not."""
FATAL = {
    "layer, forward": "PipelineFailedError",
    "layer, backward": "PipelineFailedError",
    "optimizer": "PipelineFailedError",
    "scheduler": "PipelineFailedError",
    "exchange": "PipelineFailedError",
    "later steps": "PipelineFailedError",
    "later, SIGKILL": "",  # the others see its connections close, wherever they are
    "sharing": "PipelineFailedError",
    "gathering": "PipelineFailedError",
    "row groups": "PipelineFailedError",
    "loss": "ForwardFailedError",  # but see `expected`
    "loss is NaN": "NonFiniteError",
    "other settings": "PlanMismatchError",
    "no data": "PlanningFailedError",
    "SIGKILL": "PipelineFailedError",
}
SURVIVED = {"none": 0, "SIGSTOP": STOPPED_SECONDS, "slow": SLOW_SECONDS, "disk full": 0}
SECONDS = 60.0  # generous: two cores may carry four processes; a time-out would take 100


def expected(fault: str, layout: str) -> str:
    """The error's type. A loss that communicates leaves the ranks waiting that share its rows."""
    in_loss = fault == "loss" and layout in ("TP2", "CP2", "DP2 shared")
    return "PipelineFailedError" if in_loss else FATAL[fault]


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
        nproc, dims = (LAYOUTS | WITHOUT_AGENT)[layout]
        agent = layout not in WITHOUT_AGENT
        parameters = {"dims": dims, "reference": references["dense"], "fault": fault}
        parameters["planner"] = PLANNER.get(layout, {}) | PLANNER.get(fault, {})
        parameters["faulty"] = -1 if agent else 0
        name, limit = name_of(fault, layout), SECONDS + 60
        jobs.append(Job(name, "kit.battery:train", nproc, dims, parameters, limit, agent))
    found = run_forked(jobs, tmp_path_factory.mktemp("battery"))
    yield found
    lines = [f"{'fault':21s} {'layout':13s} {'seconds':>7s}  ends"]
    for fault, layout in sorted(chosen):
        ranks = found[name_of(fault, layout)]
        how = ", ".join(f"{each.error or 'exit'} {each.exit_code}" for each in ranks)
        seconds = max(each.seconds for each in ranks)
        lines.append(f"{fault:21s} {layout:13s} {seconds:7.1f}  {how}")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


def fatal() -> list[tuple[str, str]]:
    """Faults and layouts. Megatron has all groups of rows but those on one of CP2's ranks."""
    found = [(fault, layout) for fault in FATAL for layout in LAYOUTS if fault != "row groups"]
    return [*found, ("row groups", "CP2")]


@pytest.mark.parametrize(("fault", "layout"), fatal())
def test_every_rank_ends_with_the_named_error(
    fault: str, layout: str, ends: dict[str, list[End]]
) -> None:
    error = expected(fault, layout)
    *others, faulty = ranks = ends[name_of(fault, layout)]
    for rank in others if "SIGKILL" in fault else ranks:
        # Raised, or printed by a process that could not be released.
        assert rank.exit_code == (1 if rank.error else EXIT_CODE), rank
        assert error in (rank.error or rank.message), rank
        assert rank.seconds < SECONDS
        if error == "PipelineFailedError" and "SIGKILL" not in fault:
            assert "out of memory, on purpose" in rank.message
    if "SIGKILL" in fault:
        assert faulty.exit_code == -9
    else:
        assert faulty.error == error, faulty


def without_agent() -> list[tuple[str, str]]:
    """Functions of the output run on the last stage alone, which rank 0 of a pipeline is not."""
    found = [(each, name) for each in ("loss", "function") for name in WITHOUT_AGENT]
    in_layer = [("layer, forward", name) for name in WITHOUT_AGENT]
    return [*(each for each in found if "PP2" not in each[1]), *in_layer]


@pytest.mark.parametrize(("fault", "layout"), without_agent())
def test_without_an_agent_every_rank_names_the_rank_that_hosts_the_store(
    fault: str, layout: str, ends: dict[str, list[End]]
) -> None:
    """The store ends with rank 0: it used to go before the others had read the cause."""
    for rank in ends[name_of(fault, layout)]:
        assert rank.exit_code == (1 if rank.error else EXIT_CODE), rank
        assert "rank 0: " in rank.message, rank
        assert "out of memory, on purpose" in rank.message, rank
        assert "rank 1: " not in rank.message, rank
        assert rank.seconds < SECONDS


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


RESUMED = {"DP2 PP2": PP2, "DP2 PP2 VPP2": VPP2, "DP2 TP2": TP2, "TP2 CP2": TP2_CP2}


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)
def test_killed_in_a_checkpoint_and_resumed(tmp_path: Path) -> None:
    """All ranks end; the run goes on from the checkpoint before, bit for bit."""
    whole, killed, resumed = [], [], []
    for layout, flags in RESUMED.items():
        name = name_of("checkpoint", layout)
        saved = str(tmp_path / f"{name}-saved")
        words = [*steps(6, evaluations=0), *flags, *FLAG]
        saves = [*words, "--save", saved, "--save-interval", "2"]
        whole.append(job(f"{name}-whole", *words))
        each = job(f"{name}-killed", *saves, function="killed_in_checkpoint")
        moment = str(tmp_path / f"{name}-moment")
        killed.append(dataclasses.replace(each, parameters={**each.parameters, "moment": moment}))
        resumed.append(job(f"{name}-resumed", *saves, "--load", saved))
    expected = run_jobs(whole, tmp_path / "whole")
    for each in killed:
        failed = run_jobs([each], tmp_path / each.name)[each.name]
        seconds = time.time() - float(Path(each.parameters["moment"]).read_text())
        assert isinstance(failed, JobFailedError)
        assert seconds < SECONDS
        print(f"{each.name}: all ranks gone after {seconds:.1f} s")
    found = run_jobs(resumed, tmp_path / "resumed")
    for before, after in zip(whole, resumed, strict=True):
        pairs = zip(results(expected[before.name]), results(found[after.name]), strict=True)
        for reference, record in pairs:
            assert [step["iteration"] for step in record["steps"]] == [3, 4, 5, 6]
            for step, wanted in zip(record["steps"], reference["steps"][2:], strict=True):
                for name in ("loss", "grad_norm", "learning_rate", "consumed_samples"):
                    assert step[name] == wanted[name], (after.name, step["iteration"], name)
