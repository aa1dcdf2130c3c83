"""What goes wrong on one rank is a named error on all, within seconds; and slime's known faults."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from kit.faults import LAYOUTS, table_of
from kit.harness import Job

SECONDS = 45.0  # an error that came by a collective's timeout would take 60


def job(name: str, function: str, dims: dict[str, Any], *, long: bool = False, **given: Any) -> Any:
    made = Job.of(name, f"kit.{function}", dims, **given)
    return pytest.param(made, marks=pytest.mark.long if long else (), id=name)


DP1, DP2, DP4 = ({"data_parallel": size} for size in (1, 2, 4))
PP2, CP2, TP2 = ({f"{name}_parallel": 2} for name in ("pipeline", "context", "tensor"))
TP2_SP = {**TP2, "sequence_parallel": True}
DP2_EP2, TP2_EP2 = DP2 | {"expert_parallel": 2}, TP2_SP | {"expert_parallel": 2}
SHARED = {"dynamic_batch_context_parallel": 2}
STAY = {"dynamic_batch_exchange": False}


@pytest.mark.parametrize(
    "job",
    [
        job(layout, "faults:faults", dims, layout=layout, long=layout == "cp2")
        for layout, (dims, _) in LAYOUTS.items()
    ],
)
def test_what_is_wrong_on_one_rank_is_a_named_error_on_all(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    unlike = {}
    table = table_of(job.name)
    for fault, *reports in zip(table, *(rank["faults"] for rank in ranks), strict=True):
        [(error, message), *others] = {(report["type"], report["message"]) for report in reports}
        # The rank on which it happened chains its own exception, as the message names it.
        causes = dict(re.findall(r"rank (\d): (\w+Error|\w+Exception): ", message))
        chained = {str(r): each["cause"] for r, each in enumerate(reports) if each["cause"]}
        if others or error != fault.error or fault.text not in message or chained != causes:
            unlike[fault.name] = [(error, message), *others, chained]
        assert max(report["seconds"] for report in reports) < SECONDS, fault.name
    assert unlike == {}
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["grad_norm"] == pytest.approx(ranks[0]["grad_norm"])
        assert rank["grad_norm"] > 0


VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))
ROUTER = "guarantees:router_counts_real_tokens"
OVERSIZE = "guarantees:over_the_cap_is_printed_once"
BY_LENGTHS = "guarantees:found_by_lengths"
MEMORY = "losses:memory_is_shared"
NONFINITE = "losses:nonfinite_loss"
SLIME_PLANS = "hooking:slime_plans_where_it_trains"
JOBS = [
    *(job(f"gradient-over-logits-{n}", MEMORY, d) for n, d in (("dp2", DP2), ("tp2", TP2))),
    job("constant-loss", "losses:constants_fire_every_hook", DP1),
    job("collectives", "guarantees:phases_make_the_collectives_that_are_listed", DP2 | PP2),
    job("silent-placeholders", "shared_rows:silent_placeholders", CP2),
    job("own-weights", "guarantees:replicas_begin_alike", DP2),
    job("later-steps", "guarantees:later_steps", DP2 | PP2),
    job("padding-alone", "guarantees:padding_moves_nothing", DP2_EP2),
    job("prefixes-printed", "guarantees:shared_tokens_are_printed", DP2),
    job("time-outs", "guarantees:wrong_time_outs_are_named", DP2),
    job("experts-tp2", "guarantees:experts_of_all_ranks", TP2_SP, refused=VERSION < (0, 19)),
    job("over-the-cap", OVERSIZE, DP2, row=10, needed=200, max_tokens_per_gpu=10),
    job("over-the-cap-stays", OVERSIZE, DP2, row=10, needed=200, max_tokens_per_gpu=10, **STAY),
    job("over-the-cap-shared", OVERSIZE, DP4, row=10, needed=100, max_tokens_per_gpu=5, **SHARED),
    job("averaged-loss", "losses:averaged_loss_is_warned_of", DP2),
    *(
        job(f"nonfinite-{name}", NONFINITE, DP2 | PP2, fault=name, overlap=False)
        for name in ("loss", "gradient", "field")
    ),
    job("nonfinite-overlapped", NONFINITE, DP2 | PP2, fault="gradient", overlap=True),
    job("nonfinite-loss-scaling", "losses:loss_scaling", PP2),
    job("names", "guarantees:names_of_outputs_and_metrics", DP2 | PP2),
    *(job(f"by-lengths-{n}", BY_LENGTHS, d) for n, d in (("dp2", DP2), ("cp2", CP2))),
    job("slime-style", "guarantees:slime_style", DP2 | PP2),
    job("expert-bias", ROUTER, DP2_EP2, kind="moe", per_rank=4),
    job("expert-bias-later-stage", ROUTER, PP2 | TP2_EP2, kind="moe", per_rank=2),
    *(
        job(f"expert-bias-{kind}", ROUTER, dims, kind=kind, per_rank=count)
        for kind, dims, count, since in (
            ("mtp-moe", DP2_EP2, 6, 17),  # four layers, and one for each of two further tokens
            ("hybrid-moe", TP2_EP2, 2, 18),
            ("hybrid-mtp-moe", TP2_EP2, 3, 18),
        )
        if (0, since) <= VERSION
    ),
    job("slime-plans-dp2", SLIME_PLANS, DP2),
    job("slime-plans-pp2", SLIME_PLANS, PP2),
    job("slime-plans-cp2", SLIME_PLANS, CP2),
    job("slime-plans-tp2-sp", SLIME_PLANS, TP2_SP),
    job("slime-plans-dp2-empty", SLIME_PLANS, DP2, spread="empty"),
]
NEEDS_GLOO = [
    job("groups-remade", "guarantees:groups_made_anew", DP2),
    job("neighbours-send-first", "blocking_p2p:neighbours_send_first", {"pipeline_parallel": 4}),
    job("freed-while-sending", "guarantees:freed_outputs_arrive_whole", PP2),
]


@pytest.mark.parametrize("job", JOBS)
def test_every_rank_finds_what_the_job_states(job: Job, ranks: list[Any]) -> None:
    """The job's docstring says what; it raises where it finds something else."""
    assert len(ranks) == job.nproc


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="makes or reads groups of gloo")
@pytest.mark.parametrize("job", NEEDS_GLOO)
def test_every_rank_finds_it_on_gloo(job: Job, ranks: list[Any]) -> None:
    assert len(ranks) == job.nproc
