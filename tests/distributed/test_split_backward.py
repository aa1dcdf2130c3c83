"""Backward passes split in two: the same gradients to the bit, sent on before the weights' run.

Where passes are split, a weight adds up its micro-batches in the order in which whole passes do, so
nothing may differ, not even in the last bit. Only where some passes are whole and others are not,
the order is another, and sums differ by float32's rounding.
"""

from __future__ import annotations

import dataclasses
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kit.harness import Job, results, run_jobs

PP2 = {"pipeline_parallel": 2}
PP4 = {"pipeline_parallel": 4}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
TP2_SP_PP2 = {**TP2_PP2, "sequence_parallel": True}
PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}
DP2_PP2_VPP2 = {**DP2_PP2, "virtual_pipeline": 2}
EP2_PP2 = {**DP2_PP2, "expert_parallel": 2}

ROUNDING = 2e-5
"""As of gradients in `test_exactness`: an error of the right size is beyond 1e-3."""
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}
"""Some six a stage, each reduced as soon as its gradients are there."""
DISTRIBUTED = {**BUCKETS, "use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROOM = {"dynamic_batch_split_backward_memory": 40.0}
"""Under full recomputation what waits is many times what is held before; else no pass is split."""
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
DYNAMIC_CP = {"dynamic_batch_context_parallel": 2}
EXCHANGE = {"dynamic_batch_exchange": True}
EXPERTS = {"kind": "moe", "planner": EXCHANGE}
"""Ranks that wait for each other in every slot split passes where one plan is of all alone."""
HAS_HYBRID_MODEL = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 18)

LONG = pytest.mark.long
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp4": (PP4, {"num_layers": 8}),
    "dp2-pp2-overlap": (DP2_PP2, {"ddp": BUCKETS}),
    "dp2-pp2-some-overlap": (DP2_PP2, {"ddp": BUCKETS, "some": True}),
    "dp2-pp2-aligned": (DP2_PP2, {"ddp": DISTRIBUTED, "aligned": True}),
    "tp2-sp-pp2": (TP2_SP_PP2, {}),
    # Gradients of experts are divided where their reduction starts: before it all have to be there.
    "ep2-pp2": (EP2_PP2, {**EXPERTS, "ddp": BUCKETS, "calculate_per_token_loss": False}),
    "dp2-pp2-vpp2": (DP2_PP2_VPP2, {"ddp": DISTRIBUTED}),
    "pp2-tied-biases": (PP2, {"tied": True, "add_bias_linear": True}),
    "pp2-full": (PP2, {**FULL, "planner": ROOM}),
    "pp2-fused": (PP2, {"fused": True}),
    "pp2-fused-some": (PP2, {"fused": True, "some": True}),
    "pp2-engine-some": (PP2, {"kind": "engine", "some": True}),
    "pp2-vpp2": (PP2_VPP2, {}),
    "dynamic-cp": (DP2_PP2, {"ddp": BUCKETS, "planner": DYNAMIC_CP}),
}
"""Name to layout and settings."""
LONG_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cp2-pp2-dynamic": (
        {"context_parallel": 2, **PP2},
        {"planner": {**DYNAMIC_CP, "max_tokens_per_gpu": 96}},
    ),
    "pp2-vpp2-dynamic": (DP2_PP2_VPP2, {"planner": DYNAMIC_CP}),
    "dynamic-cp-some": (DP2_PP2, {"planner": DYNAMIC_CP, "some": True}),
    "pp4-vpp2": ({**PP4, "virtual_pipeline": 2}, {"num_layers": 8}),
    "dp2-pp2-distributed": (DP2_PP2, {"ddp": DISTRIBUTED}),
    "dp2-pp2-empty": (DP2_PP2, {"ddp": BUCKETS, "spread": "empty"}),
    "dp2-pp2-vpp2-aligned": (DP2_PP2_VPP2, {"ddp": DISTRIBUTED, "aligned": True}),
    "dp2-pp2-vpp2-some": (DP2_PP2_VPP2, {"ddp": BUCKETS, "some": True}),
    "dp2-pp2-exchange": (DP2_PP2, {"planner": EXCHANGE}),
    "cp2-pp2": ({"context_parallel": 2, **PP2}, {}),
    "tp2-pp2": (TP2_PP2, {}),
    "tp2-sp-pp2-full-some": (TP2_SP_PP2, {**FULL, "planner": ROOM, "some": True}),
    "ep2-pp2-some": (EP2_PP2, {**EXPERTS, "some": True}),
    "pp2-some": (PP2, {"some": True}),
    "pp2-engine": (PP2, {"kind": "engine"}),
    "pp2-selective": (PP2, SELECTIVE),
    "pp2-mean": (PP2, {"calculate_per_token_loss": False}),
    "pp2-deallocated-not": (PP2, {"deallocate_pipeline_outputs": False}),
    "pp2-single-transfers": (PP2, {"batch_p2p_comm": False}),
    "pp2-fused-output": (PP2, {"planner": {"dynamic_batch_fuse_output_layer": True}}),
    "pp2-bf16": (PP2, {"bf16": True}),
}
if HAS_HYBRID_MODEL:
    CASES["pp2-hybrid"] = (PP2, {"kind": "hybrid"})
    CASES["pp2-mtp"] = (PP2, {"kind": "mtp"})
    LONG_CASES["pp2-hybrid-mamba"] = (PP2, {"kind": "hybrid-mamba"})
    LONG_CASES["pp2-mla"] = (PP2, {"kind": "mla"})


def job(name: str, function: str, dims: dict[str, Any], **parameters: Any) -> Job:
    sizes = ("data_parallel", "context_parallel", "tensor_parallel", "pipeline_parallel")
    nproc = math.prod(dims.get(size, 1) for size in sizes)
    function = f"kit.split_backward:{function}"
    return Job(f"split-{name}", function, nproc, dims, {"dims": dims, **parameters})


def compared() -> list[Any]:
    made: list[Any] = [job(n, "compare_steps", dims, **case) for n, (dims, case) in CASES.items()]
    long = [job(n, "compare_steps", dims, **case) for n, (dims, case) in LONG_CASES.items()]
    for name, dims in (("pp4", PP4), ("pp2-vpp2", PP2_VPP2), ("dp2-pp2-vpp2", DP2_PP2_VPP2)):
        long.append(job(f"{name}-blocking", "compare_blocking", dims))
    return made + [pytest.param(each, marks=pytest.mark.long) for each in long]


def check_compared(job: Job, ranks: list[Any]) -> None:
    for rank in ranks:
        if job.parameters.get("some"):
            assert rank["gradients"] < ROUNDING
            assert rank["weights"] < ROUNDING
        else:
            assert (rank["gradients"], rank["weights"]) == (0.0, 0.0)
        assert rank["restored"]
        if job.parameters.get("spread") == "empty" and not rank["bytes"]:
            assert not rank["left"]
            continue
        assert len(rank["bytes"]) == 3
        for waited, planned in rank["bytes"]:
            assert 0 < waited <= planned
        linear = [name for name in rank["left"] if "linear_fc" in name or "linear_qkv" in name]
        assert linear or "hybrid" in job.name
        # Embedding and output layer stay in the pass, with norms, routers and biases.
        assert not [name for name in rank["left"] if "embedding" in name or "output" in name]
        assert not [name for name in rank["others"] if name.endswith(("fc1.weight", "fc2.weight"))]


@pytest.mark.parametrize("job", compared(), ids=str)
def test_split_steps_are_the_whole_ones(job: Job, ranks: list[Any]) -> None:
    check_compared(job, ranks)


REDUCED = [
    job("order", "order_of_reductions", DP2_PP2, ddp={**BUCKETS, "bucket_size": 1}),
    job("order-vpp2", "order_of_reductions", DP2_PP2_VPP2, ddp=DISTRIBUTED),
]


@pytest.mark.parametrize("job", REDUCED, ids=str)
def test_replicas_with_other_plans_reduce_in_one_order(job: Job, ranks: list[Any]) -> None:
    for stage, (one, other) in enumerate(zip(ranks[::2], ranks[1::2], strict=True)):
        assert one == other
        for order in one:
            # Megatron has several buckets on the first stage alone.
            assert len(order) > 3 or stage
            assert len(order) == len(set(order))


RECORDED = [
    job("recorded-pp4", "recorded_step", PP4, last_alone=False),
    job("recorded-pp4-last", "recorded_step", PP4, last_alone=True),
    job("recorded-pp2-vpp2", "recorded_step", PP2_VPP2, last_alone=False),
]


@pytest.mark.parametrize("job", RECORDED, ids=str)
def test_weights_run_after_the_post_and_before_the_wait(job: Job, ranks: list[Any]) -> None:
    interleaved = "virtual_pipeline" in job.parameters["dims"]
    for stage, events in enumerate(ranks):
        last = max(at for at, event in enumerate(events) if event[0] == "B")
        runs = [at for at, event in enumerate(events) if event[0] == "W" and at < last]
        is_last = stage == len(ranks) - 1
        assert runs or (job.parameters["last_alone"] and not is_last)
        for at in runs:
            before, after = around(events, at)
            # The first stage's forward passes and the last one's backward passes wait for nothing.
            waits_for_nothing = after[0] in "FB" and (stage == 0 or is_last)
            assert (before[0], after[0]) == ("post", "wait") or waits_for_nothing
            # The interleaved schedule has asked for the next input before the pass that was.
            assert "recv" in before[1] or interleaved or waits_for_nothing
        for at in runs if stage else []:
            # The gradient that was made last is on its way.
            made = max(before for before in range(at) if events[before][0] == "B")
            posts = [event[1] for event in events[made:at] if event[0] == "post"]
            assert any("tensor_send_prev" in names for names in posts)


def around(events: list[Any], at: int) -> tuple[Any, Any]:
    """The events before and after W."""
    before = [event for event in events[:at] if event[0] != "W"]
    return before[-1], next(event for event in events[at:] if event[0] != "W")


@pytest.mark.parametrize("job", RECORDED[1:2], ids=str)
def test_a_neighbour_has_the_gradient_before_the_weights_are_done(
    job: Job, ranks: list[Any]
) -> None:
    *_, before, last = ranks
    arrived = [end for what, names, _, end in before if what == "wait" and "recv_next" in names]
    runs = [(start, end) for what, _, start, end in last if what == "W"]
    assert len(runs) > 2
    for start, end in runs[:-1]:
        assert any(start - 0.01 < at < end for at in arrived)


@pytest.mark.parametrize(
    "job",
    [job("left", "left_by_a_failure", PP2, ddp=BUCKETS, aligned=True, kind="engine")],
    ids=str,
)
def test_a_failure_leaves_no_hook_and_nothing_waiting(job: Job, ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank == {
            "replaced": True,
            "restored": True,
            "cleared": True,
            "flushed": False,
            "flushed at the end": True,
        }


@pytest.mark.parametrize("job", [job("infinite", "failed_step", DP2_PP2, infinite=True)], ids=str)
def test_infinite_weight_gradients_are_found(job: Job, ranks: list[str]) -> None:
    for said in ranks:
        assert said.startswith("NonFiniteError"), said


@pytest.mark.parametrize("job", [job("other", "failed_step", TP2_PP2, infinite=False)], ids=str)
def test_tensor_parallel_ranks_that_split_otherwise_are_named(job: Job, ranks: list[str]) -> None:
    """They would gather their inputs for W in another order, and wait for each other."""
    for said in ranks:
        assert said.startswith("PlanMismatchError: ")
        assert "rank 3: split backward passes (sha256)" in said


def told(name: str, dims: dict[str, Any], **parameters: Any) -> Job:
    made = job(f"clock-{name}", "", dims, seconds=10.0, blocking=True, **parameters)
    return dataclasses.replace(made, function="kit.split_clock:asleep")


CLOCKS = [
    told("pp4", PP4),
    told("pp2-vpp2", PP2_VPP2),
    pytest.param(told("pp4-vpp2", {**PP4, "virtual_pipeline": 2}, memory=1.25), marks=LONG),
    pytest.param(told("dp2-pp2", DP2_PP2), marks=LONG),
]


@pytest.mark.parametrize("job", CLOCKS, ids=str)
def test_steps_end_when_their_plan_says(job: Job, ranks: list[Any]) -> None:
    """On clocks that transfers carry, blocking as NCCL's do, while nobody really sleeps."""
    (whole, before), (split, after) = (
        (ranks[0][plan][0], min(map(max, zip(*(rank[plan][1] for rank in ranks), strict=True))))
        for plan in ("whole", "split")
    )
    assert split < 0.97 * whole
    assert before == pytest.approx(whole, rel=0.005)
    assert after == pytest.approx(split, rel=0.005)


HOOKED = (
    "tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication.forward",
    "tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication.backward",
    "pipeline_parallel.p2p_communication._p2p_ops",
    "pipeline_parallel.p2p_communication._batched_p2p_ops",
    "pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes",
    "pipeline_parallel.schedules.forward_step",
    "pipeline_parallel.schedules.backward_step",
    "distributed.param_and_grad_buffer._ParamAndGradBucketGroup.register_grad_ready",
)
"""Functions of Megatron's that are replaced, or whose arguments are known."""
ENGINE = {"fuse_wgrad_accumulation": True, "use_bias": False, "wgrad_store": "one"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"planner": {"dynamic_batch_no_planned_shapes": True}}, "unset --dynamic-batch-no-planned"),
    ({"model": {"delay_wgrad_compute": True}}, "unset --delay-wgrad-compute"),
    (
        {"model": {"overlap_dispatch_backward_with_experts_wgrad": True}},
        "unset --overlap-dispatch-backward-with-experts-wgrad",
    ),
    ({"model": {"moe_shared_expert_overlap": True}}, "unset --moe-shared-expert-overlap"),
    ({"model": {"use_ring_exchange_p2p": True}}, "unset --use-ring-exchange-p2p"),
    ({"model": {"gtp_weight_remat_size": 2}}, "unset --tensor-parallel-num-weight-shards"),
    ({"ddp": {"use_megatron_fsdp": True}}, "unset --use-megatron-fsdp"),
    (
        {"model": {"expert_gtp_weight_remat_size": 2}},
        "unset --expert-tensor-parallel-num-weight-shards",
    ),
    ({"ddp": {"use_custom_fsdp": True}}, "unset --use-custom-fsdp"),
    ({"unwrapped": True}, "is not Megatron's DistributedDataParallel"),
    *(({"other function": name}, f"{'.'.join(name.split('.')[-2:])} as known") for name in HOOKED),
    ({"engine": {**ENGINE, "wgrad_store": None}}, "install 2.3 or later"),
    ({"engine": {**ENGINE, "use_bias": True}}, "set --disable-bias-linear"),
    (
        {"engine": {**ENGINE, "fuse_wgrad_accumulation": False}},
        "unset --no-gradient-accumulation-fusion",
    ),
    ({"engine": ENGINE, "debugged": True}, "start without nvdlfw_inspect"),
    ({"engine": ENGINE, "debugged": False}, ""),
]


@pytest.mark.parametrize(
    "job", [job("refused", "refused", PP2, cases=[c for c, _ in REFUSED])], ids=str
)
def test_what_cannot_be_split_is_refused_by_name(job: Job, ranks: list[list[str]]) -> None:
    for said in ranks:
        for text, (_, wanted) in zip(said, REFUSED, strict=True):
            if not wanted:
                assert not text
                continue
            assert text.startswith("DynamicBatchArgumentError: ")
            assert wanted in text
            # Nothing else is wrong.
            assert text.count("--dynamic-batch-split-backward") == 2, text


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (job("alone", "without_effect", {}), "without pipeline stages"),
        (
            job("experts", "without_effect", EP2_PP2, kind="moe"),
            "with expert parallelism where each rank plans its own samples",
        ),
    ],
    ids=str,
)
def test_no_effect_is_said_once(job: Job, reason: str, ranks: list[list[str]]) -> None:
    *others, (said,) = ranks
    assert not any(others)
    assert f"--dynamic-batch-split-backward has no effect {reason}" in said


CHECKOUTS = os.environ.get("MCORE_BATCHING_MEGATRON_LM")


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUTS, reason="MCORE_BATCHING_MEGATRON_LM is not set")
@pytest.mark.parametrize("release", ["core_v0.17.1", "core_v0.18.2", "core_v0.19.0", "main"])
def test_other_releases(release: str, tmp_path: Path) -> None:
    checkout = Path(CHECKOUTS or "") / release
    if not checkout.is_dir():
        pytest.skip(f"no {checkout}")
    if release != "core_v0.17.1":
        pytest.importorskip("triton")  # which they import, and torch for the CPU comes without
    names = ("dp2-pp2-overlap", "tp2-sp-pp2", "ep2-pp2", "dp2-pp2-vpp2", "pp4")
    jobs = [job(name, "compare_steps", CASES[name][0], **CASES[name][1]) for name in names]
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(checkout)}):
        found = run_jobs(jobs, tmp_path)
    for each in jobs:
        check_compared(each, results(found[each.name]))
