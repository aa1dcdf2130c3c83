"""``--dynamic-batch-warm-up-at-cap``: rows at the cap come first, and nothing remains of them.

Everything is compared bit for bit: the passes of training see the same numbers in the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job
from kit.samples import CAP_TOKENS

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {
    **DROPOUT,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
OVERLAPPED = {"overlap_grad_reduce": True}
GATHERED = {**OVERLAPPED, "use_distributed_optimizer": True, "overlap_param_gather": True}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
DP2_CP2 = {"data_parallel": 2, "context_parallel": 2}
TP2_SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}


def job(name: str, nproc: int, dims: dict[str, Any], **parameters: Any) -> Job:
    given = {"kind": "dense", "settings": DROPOUT, "planner": {}, "ddp": {}} | parameters
    given |= {"dims": dims, "reference": given["kind"]}
    return Job(f"warm-up-{name}", "kit.warm_up:compare", nproc, dims, given)


def jobs() -> list[Any]:
    """Each with the tokens of every pass, chunk by chunk; with --long but for the first."""
    experts = {"kind": "moe", "settings": EXPERTS, "ddp": OVERLAPPED}
    at_cap, planner = [CAP_TOKENS] * 2, "dynamic_batch_"
    made = [
        (
            job("experts", 4, {**TP2_SP, **PP2_VPP2, "expert_parallel": 2}, **experts),
            [at_cap * 2] * 2,
        ),
        (
            job("experts-dp2", 4, {**DP2_PP2, **PP2_VPP2, "expert_parallel": 2}, **experts),
            [at_cap * 2] * 2,
        ),
        (job("gathered", 4, DP2_PP2, ddp=GATHERED), [at_cap]),
        (job("shared", 4, DP2_PP2, planner={f"{planner}context_parallel": 2}), [at_cap]),
        (job("shared-cp2", 4, DP2_CP2, planner={f"{planner}context_parallel": 4}), [[24]]),
        (
            job("cp2-padded", 2, {"context_parallel": 2}, planner={f"{planner}pad_total_to": 20}),
            [[40 // 2]],
        ),
    ]
    return [
        pytest.param(*each, marks=pytest.mark.long if number else ())
        for number, each in enumerate(made)
    ]


@pytest.mark.parametrize(
    ("job", "passes"), jobs(), ids=lambda value: str(value) if isinstance(value, Job) else ""
)
def test_training_is_what_it_was(
    job: Job, ranks: list[dict[str, Any]], passes: list[list[int]]
) -> None:
    changed = {"configuration", "reduction of gradients"}
    if job.parameters["kind"] == "moe":
        changed |= {"gradients", "buffers", "routers' records"}
    # Under sequence parallelism dropout draws from a generator of each rank's own.
    parallel = bool(job.dims and job.dims.get("sequence_parallel"))
    changed |= {"tracked random numbers" if parallel else "random numbers"}
    for rank in ranks:
        assert rank["passes"] == passes
        assert set(rank["changed"]) == changed  # and given back:
        assert not any(rank["calls"])
        assert rank["left"] == []
        assert rank["differing"] == []
        assert rank["passes_without"] == []


def failing(what: str) -> Job:
    parameters = {"dims": DP2_PP2, "reference": "dense", "what": what}
    return Job(f"warm-up-{what.replace(' ', '-')}", "kit.warm_up:fails", 4, DP2_PP2, parameters)


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        (
            failing("no memory"),
            "ForwardFailedError",
            "rank 3: DynamicBatchArgumentError: warm-up at --max-tokens-per-gpu 48: "
            "OutOfMemoryError: Tried to allocate 158.00 GiB",
        ),
        (
            failing("fp8"),
            "CollationFailedError",
            "rank 3: DynamicBatchArgumentError: FP8 and FP4 modules keep scales and maxima of the "
            "rows they have seen, which a warm-up would change: unset "
            "--dynamic-batch-warm-up-at-cap",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Job) else "",
)
def test_what_goes_wrong_on_one_rank_is_raised_on_all(
    job: Job, ranks: list[dict[str, Any]], error: str, text: str
) -> None:
    assert [rank["type"] for rank in ranks] == [error] * 4
    for rank in ranks:
        assert text in rank["message"]
        assert rank["left"] == []
