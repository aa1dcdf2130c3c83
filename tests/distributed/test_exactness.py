"""Every layout against the unpacked single-process reference.

Differences are relative to the largest entry of the tensor. float32 has a unit roundoff of 6e-8;
a value here is a sum of up to some hundred products in an order that depends on the layout, so
results of right programs differ by some 1e-7 to 1e-6. A token of a neighbour let in, a placeholder
counted, a sample forgotten or doubled changes them by 1e-3 and more.
"""

from __future__ import annotations

import itertools
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.harness import Job, reference_files, results, run_jobs, with_reference
from kit.objective import DEFAULT_OBJECTIVE, OBJECTIVES
from kit.samples import CAP_TOKENS, CHAINS, SHAPES, share

LOG_PROBS = 2e-6
GRADIENTS = 2e-5  # deepest sums: over all tokens of the batch, through four layers
WEIGHTS = 1e-5  # Adam multiplies an error of the gradient by up to lr / epsilon = 10
METRICS = 2e-6

# bfloat16 keeps 8 bits, so that each rounding is up to 4e-3 of a value; some tens of them in a row
# add up to a few per cent of the largest entry, also between two runs that are both right.
BFLOAT16 = 5e-2

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "dense", {}),
    "dp2": (2, "dense", {"data_parallel": 2}),
    "tp2": (2, "dense", {"tensor_parallel": 2}),
    "tp2-sp": (2, "dense", {"tensor_parallel": 2, "sequence_parallel": True}),
    "cp2": (2, "dense", {"context_parallel": 2}),
    "dp2-ep2": (2, "moe", {"data_parallel": 2, "expert_parallel": 2}),
    "cp2-ep2": (2, "moe", {"context_parallel": 2, "expert_parallel": 2}),
    "tp2-sp-ep2": (
        2,
        "moe",
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    ),
    "dp4": (4, "dense", {"data_parallel": 4}),
    "pp4": (4, "dense", {"pipeline_parallel": 4}),
    "cp2-pp2": (4, "dense", {"context_parallel": 2, "pipeline_parallel": 2}),
    "cp4": (4, "dense", {"context_parallel": 4}),
    "dp2-cp2": (4, "dense", {"data_parallel": 2, "context_parallel": 2}),
    "dp2-pp2": (4, "dense", {"data_parallel": 2, "pipeline_parallel": 2}),
    "dp2-pp2-vpp2": (
        4,
        "dense",
        {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ),
    "tp2-sp-pp2": (
        4,
        "dense",
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    ),
    "cp2-tp2-sp": (
        4,
        "dense",
        {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "dp2-cp2-pp2": (
        8,
        "dense",
        {"data_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2},
    ),
}


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
STAYING = {"dynamic_batch_exchange": False}
FORWARD_CAP = "dynamic_batch_forward_only_max_tokens_per_gpu"
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    # The last micro-batch starts the reduction: a placeholder there has to touch every parameter.
    "dp2-pp2-overlapped-reduction": (
        "dp2-pp2",
        {"overlap": True, "spread": "empty", "planner": STAYING},
    ),
    "dp2-pp2-vpp2-overlapped-reduction": (
        "dp2-pp2-vpp2",
        {"overlap": True, "spread": "empty", "planner": STAYING},
    ),
    "dp4-lopsided": ("dp4", {"spread": "lopsided"}),
    "dp4-overlapped-reduction-distributed-optimizer": (
        "dp4",
        {"overlap": True, "distributed_optimizer": True},
    ),
    "cp2-tp2-sp-padded": (
        "cp2-tp2-sp",
        {"planner": {"dynamic_batch_pad_each_to": 12, "dynamic_batch_pad_total_to": 16}},
    ),
    # Under the first the sample of 200 tokens fits beside others, under the second more samples
    # are oversize than in training.
    "dp2-pp2-forward-cap-of-256": ("dp2-pp2", {"planner": {FORWARD_CAP: 256}}),
    "dp2-pp2-forward-cap-of-12": ("dp2-pp2", {"planner": {FORWARD_CAP: 12}}),
    "dp2-ep2-padded": ("dp2-ep2", {"planner": {"dynamic_batch_pad_total_to": 16}}),
    "dp2-pp2-first-fit-as-it-falls": (
        "dp2-pp2",
        {"planner": {"dynamic_batch_packing": "first-fit", "dynamic_batch_fill": "placeholder"}},
    ),
    "dp2-pp2-overlapped-gather": (
        "dp2-pp2",
        {"overlap_gather": True, "distributed_optimizer": True, "spread": "empty"},
    ),
    "cp2-recomputed-activations": ("cp2", {"settings": RECOMPUTED}),
    "dp2-pp2-shapes-exchanged": (
        "dp2-pp2",
        {"planner": {"dynamic_batch_no_planned_shapes": True}},
    ),
    # Fabricated samples count in no mean, neither of the policy term nor of the KL term. Without
    # an objective's name: policy by token mean, KL by sample mean.
    "dp2-pp2-padding-samples": ("dp2-pp2", {"padded_to": 8, "spread": "uneven"}),
    "dp2-pp2-padding-samples-on-one-rank": ("dp2-pp2", {"padded_to": 7, "spread": "empty"}),
    "cp2-padding-samples": ("cp2", {"padded_to": 40}),
    **{
        f"{dims}-padding-samples-{objective}": (
            dims,
            {"padded_to": padded_to, "objective": objective},
        )
        for dims, padded_to in (("dp2-pp2", 8), ("cp2", 40))
        for objective in OBJECTIVES
        if objective != DEFAULT_OBJECTIVE
    },
    # Experts that no router would choose: one token routed otherwise shows in its log-probs.
    "dp2-ep2-replayed-routing": ("dp2-ep2", {"kind": "replay", "spread": "empty"}),
    "cp2-ep2-replayed-routing": ("cp2-ep2", {"kind": "replay"}),
    "tp2-sp-ep2-replayed-routing": ("tp2-sp-ep2", {"kind": "replay"}),
    "dp2-pp2-vpp2-replayed-routing-recomputed": (
        "dp2-pp2-vpp2",
        {"kind": "replay", "spread": "empty", "settings": RECOMPUTED},
    ),
    "tp2-sp-query-key-norms": ("tp2-sp", {"kind": "qk"}),
    "dp2-window": ("dp2", {"kind": "window"}),
    "cp2-window": ("cp2", {"kind": "window"}),
    "dp2-sinks": ("dp2", {"kind": "sinks"}),
    "cp2-sinks": ("cp2", {"kind": "sinks"}),
    "tp2-sinks": ("tp2", {"kind": "sinks"}),
    "dp2-mrope": ("dp2", {"kind": "mrope"}),
    "dp2-frozen": ("dp2", {"kind": "frozen", "spread": "empty"}),
    "dp2-pp2-frozen": ("dp2-pp2", {"kind": "frozen", "spread": "empty"}),
    "dp2-lora": ("dp2", {"kind": "lora", "spread": "empty"}),
    "dp2-pp2-lora-overlapped-reduction": (
        "dp2-pp2",
        {"kind": "lora", "spread": "empty", "overlap": True},
    ),
    "tp2-lora": ("tp2", {"kind": "lora"}),
    "cp2-lora-recomputed": ("cp2", {"kind": "lora", "settings": RECOMPUTED}),
    # State that flowed from one sample of a row to the next would be off by most of a gradient.
    "dp2-mamba": ("dp2", {"kind": "mamba", "spread": "fewer"}),
    "cp2-mamba": ("cp2", {"kind": "mamba"}),
    "dp2-pp2-mamba": ("dp2-pp2", {"kind": "mamba", "spread": "empty"}),
    "tp2-mamba": ("tp2", {"kind": "mamba"}),
    "tp2-sp-mamba": ("tp2-sp", {"kind": "mamba"}),
    "dp2-cp2-learned-positions": ("dp2-cp2", {"kind": "learned"}),
    # Without the flag: two samples a micro-batch, however long.
    "dp2-pp2-fixed-size": (
        "dp2-pp2",
        {
            "planner": {
                "use_dynamic_batch_size": False,
                "max_tokens_per_gpu": None,
                "micro_batch_size": 2,
            }
        },
    ),
}
"""Settings beside the matrix: name to layout and what differs."""
VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))
HAS_HYBRID_MODEL = VERSION >= (0, 18)
if HAS_HYBRID_MODEL:  # dense, of experts, and with state that ends with every sample
    # 0.16 cannot build multi-latent attention without Transformer Engine.
    SPECIAL |= {f"{name}-mla": (name, {"kind": "mla"}) for name in ("dp2", "cp2")}
    SPECIAL |= {
        f"{layout}-{kind}": (layout, {"kind": kind, "spread": spread})
        for layout, kind, spread in (
            ("dp2", "hybrid", "empty"),
            ("cp2", "hybrid", "uneven"),
            ("dp2-pp2", "hybrid", "uneven"),
            ("dp2-pp2-vpp2", "hybrid", "empty"),
            ("dp2-ep2", "hybrid-moe", "empty"),
            ("tp2-sp-ep2", "hybrid-moe", "uneven"),
            ("dp2", "hybrid-mamba", "empty"),
            ("cp2", "hybrid-mamba", "uneven"),
            ("dp2-pp2", "hybrid-mamba", "empty"),
            ("dp2", "hybrid-gdn", "empty"),
            ("cp2", "hybrid-gdn", "uneven"),
            ("dp2-pp2", "hybrid-gdn", "empty"),
            ("tp2", "hybrid-mamba", "uneven"),
            *itertools.product(
                ("tp2-sp", "cp2-tp2-sp"), ("hybrid-mamba", "hybrid-gdn"), ["uneven"]
            ),
        )
    }


FUSED = {"dynamic_batch_fuse_output_layer": True}
MEAN = {"per_token_loss": False}
MULTI_TOKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dp2": ("dp2", "mtp", {"spread": "empty"}),
    "dp2-uneven": ("dp2", "mtp", {}),
    "dp2-mean": ("dp2", "mtp", {"spread": "empty", **MEAN}),
    "dp2-deep": ("dp2", "mtp-deep", {"spread": "fewer"}),
    "dp2-padding-samples": ("dp2", "mtp", {"padded_to": 8}),
    "dp2-prefixes": ("dp2", "mtp", {"planner": {"dynamic_batch_share_prefixes": True}}),
    "cp2": ("cp2", "mtp", {}),
    "cp2-mean": ("cp2", "mtp", MEAN),
    "dp2-fused-output-layer": ("dp2", "mtp", {"planner": FUSED, "spread": "empty"}),
    "tp2-sp-fused-output-layer": ("tp2-sp", "mtp", {"planner": FUSED}),
    "tp2-sp": ("tp2-sp", "mtp", {}),
    "tp2-sp-mean": ("tp2-sp", "mtp", {"settings": RECOMPUTED, **MEAN}),
    "dp2-ep2": ("dp2-ep2", "mtp-moe", {"spread": "empty"}),
    "dp2-ep2-mean": ("dp2-ep2", "mtp-moe", MEAN),
    "dp2-pp2": ("dp2-pp2", "mtp", {"spread": "empty"}),
    "dp2-pp2-mean": ("dp2-pp2", "mtp", MEAN),
    "dp2-pp2-distributed-optimizer": (
        "dp2-pp2",
        "mtp",
        {"distributed_optimizer": True, "overlap": True, "spread": "empty"},
    ),
    "dp2-pp2-vpp2": ("dp2-pp2-vpp2", "mtp", {"spread": "empty", "settings": RECOMPUTED}),
    "dp2-pp2-vpp2-mean": ("dp2-pp2-vpp2", "mtp", MEAN),
    "cp2-tp2-sp-padded": (
        "cp2-tp2-sp",
        "mtp",
        {"planner": {"dynamic_batch_pad_each_to": 12, "dynamic_batch_pad_total_to": 16}},
    ),
    "cp2-pp2": ("cp2-pp2", "mtp", {"planner": {FORWARD_CAP: 60}}),
    "dp2-pp2-repeated": ("dp2-pp2", "mtp-repeated", {"spread": "empty"}),
}
"""Models that predict further tokens: name to layout, kind and what differs."""
MULTI_TOKEN_OF_HYBRIDS = {
    "dp2-hybrid": ("dp2", "hybrid-mtp", {"spread": "empty"}),
    "cp2-hybrid": ("cp2", "hybrid-mtp", MEAN),
    "dp2-pp2-vpp2-hybrid": ("dp2-pp2-vpp2", "hybrid-mtp", {"spread": "empty"}),
    "tp2-sp-ep2-hybrid": ("tp2-sp-ep2", "hybrid-mtp-moe", {}),
}
if VERSION >= (0, 19):
    MULTI_TOKEN |= {
        "dp2-detached": ("dp2", "mtp-detached", {"spread": "empty", **MEAN}),
        "dp2-pp2-detached": ("dp2-pp2", "mtp-detached", {"planner": FUSED}),
    }
if VERSION >= (0, 17):
    MULTI_TOKEN |= MULTI_TOKEN_OF_HYBRIDS if HAS_HYBRID_MODEL else {}
    SPECIAL |= {
        f"{name}-multi-token": (layout, {"kind": kind, **changes})
        for name, (layout, kind, changes) in MULTI_TOKEN.items()
    }


if VERSION >= (0, 19):
    # Sparse attention to all of a sample, to 6 tokens of it, and with the loss of its indexer, in
    # which a placeholder's one token counts 0.
    SPECIAL |= {
        f"{layout}-{kind}": (layout, {"kind": kind, "spread": spread})
        for layout, kind, spread in (
            *itertools.product(["cp2"], ("hybrid-dsa", "hybrid-dsa-top"), ["uneven"]),
            *itertools.product(("dp2", "dp2-pp2"), ("hybrid-dsa", "hybrid-dsa-top"), ["empty"]),
            ("dp2", "hybrid-dsa-loss", "empty"),
            ("dp2", "hybrid-mla", "empty"),
        )
    }


MEAN_NAME = "-mean-over-micro-batches"
SPECIAL |= {
    f"{name}{MEAN_NAME}": (layout, {"per_token_loss": False, **changes})
    for name, (layout, changes) in SPECIAL.items()
    if layout in ("dp2", "cp2", "tp2", "dp2-pp2")
    and name == f"{layout}-{changes.get('kind')}"
    and "dsa-loss" not in name
}


LONG_SPECIAL = {
    *(name for name in SPECIAL if name.endswith(MEAN_NAME)),
    *(name for name in SPECIAL if name.startswith("cp2-tp2-sp-hybrid")),
    "cp2-tp2-sp-padded",
    "cp2-ep2-replayed-routing",
    "tp2-sp-ep2-replayed-routing",
    # The other one of a kind, or of a pair that has this layout or this objective, runs always.
    *(f"cp2-padding-samples-{objective}" for objective in OBJECTIVES if "trained" not in objective),
    "dp2-pp2-padding-samples-token-mean",
    "dp2-pp2-padding-samples-sample-mean",
    "dp4-overlapped-reduction-distributed-optimizer",
}


CP2 = {"context_parallel": 2}


def special_job(name: str) -> Job:
    """A setting beside the matrix."""
    layout_name, changes = SPECIAL[name]
    nproc, kind, dims = LAYOUTS[layout_name]
    parameters = {"dims": dims, "kind": kind, **changes}
    parameters["reference"] = parameters["kind"]
    return Job(name, "kit.exactness:compare", nproc, dims, parameters)


def special_jobs() -> list[Any]:
    """The settings beside the matrix."""
    made: list[Any] = [
        pytest.param(special_job(name), marks=pytest.mark.long if name in LONG_SPECIAL else ())
        for name in SPECIAL
    ]
    parameters = {"dims": CP2, "kind": "mamba", "reference": "mamba"}
    name, function = "cp2-mamba-frameworks-rows", "kit.exactness:compare_rows_of_frameworks"
    return [*made, Job(name, function, 2, CP2, parameters)]


BLOCKING: list[tuple[str, dict[str, Any]]] = [
    ("dp2-pp2-vpp2", {"spread": "empty", "planner": {FORWARD_CAP: 60}}),
    ("dp2-pp2-vpp2", {"spread": "uneven", "overlap": True}),
    ("dp2-pp2-vpp2", {"spread": "empty"}),
    ("dp2-pp2-vpp2", {"settings": {"overlap_p2p_comm_warmup_flush": True}}),
    ("dp2-pp2", {"spread": "empty", "overlap_gather": True, "distributed_optimizer": True}),
    ("cp2-pp2", {}),
    ("cp2-pp2", {"planner": {FORWARD_CAP: 60}}),
    ("pp4", {}),
    ("pp4", {"planner": {FORWARD_CAP: 60}}),
    ("pp4", {"settings": {"batch_p2p_comm": False}}),
]
"""Settings that also run where transfers between stages block as NCCL's do; without --long the
first alone."""


def blocking_jobs() -> list[Any]:
    """`BLOCKING` as jobs."""
    made = []
    for number, (layout_name, changes) in enumerate(BLOCKING):
        nproc, kind, dims = LAYOUTS[layout_name]
        parameters = {"dims": dims, "kind": kind, "reference": kind, **changes}
        name = f"{layout_name}-blocking-{number}"
        job = Job(name, "kit.exactness:compare_blocking", nproc, dims, parameters)
        made.append(pytest.param(job, marks=pytest.mark.long if number else ()))
    return made


EVERY_VARIANT = {"dp2-pp2", "dp2-ep2"}
"""Layouts of which every spread and variant runs without --long; of the others uneven and empty
ranks."""


def jobs() -> list[Any]:
    """Every layout, with uneven and empty ranks, both ways of dividing the loss, and optimizers."""
    made = []
    for layout_name, (nproc, kind, dims) in LAYOUTS.items():
        spreads = ["fewer", "uneven", "empty"] if dims.get("data_parallel", 1) > 1 else ["uneven"]
        variants = {
            "": {},
            MEAN_NAME: {"per_token_loss": False},
            "-distributed-optimizer": {"distributed_optimizer": True},
        }
        for spread in spreads:
            for variant, changes in variants.items():
                if spread == "fewer" and changes:
                    continue
                parameters = changes | {
                    "dims": dims,
                    "kind": kind,
                    "reference": kind,
                    "spread": spread,
                }
                if spread == "empty":  # samples that stay, and placeholders beside them
                    parameters["planner"] = STAYING
                name = f"{layout_name}-{spread}{variant}"
                job = Job(name, "kit.exactness:compare", nproc, dims, parameters)
                leave_out = layout_name not in EVERY_VARIANT and bool(variant or spread == "fewer")
                # Eight processes on few cores take half a minute for the first job alone.
                leave_out |= nproc > 4
                made.append(pytest.param(job, marks=pytest.mark.long if leave_out else ()))
    return made


SHARE_PREFIXES = {"dynamic_batch_share_prefixes": True}
EXCHANGE = {"dynamic_batch_exchange": True}
PREFIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("one", {}),
    "dp2": ("dp2", {}),
    "dp2-empty-distributed-optimizer": ("dp2", {"spread": "empty", "distributed_optimizer": True}),
    "dp2-own-forward-plan": ("dp2", {"planner": {FORWARD_CAP: 60}}),
    "dp2-mamba": ("dp2", {"kind": "mamba", "spread": "fewer"}),
    "one-fused-output-layer": ("one", {"planner": {"dynamic_batch_fuse_output_layer": True}}),
    **{
        f"one-{objective}": ("one", {"objective": objective})
        for objective in OBJECTIVES
        if objective != DEFAULT_OBJECTIVE
    },
    **{
        f"{layout}-{objective}": (layout, {"objective": objective})
        for layout in ("dp2", "dp2-pp2", "dp2-pp2-vpp2", "cp2", "tp2-sp", "dp2-ep2")
        for objective in OBJECTIVES
        if objective != DEFAULT_OBJECTIVE
    },
    **{
        f"dp2-{name}-{objective}": ("dp2", {"objective": objective, "planner": planner})
        for name, planner in (("exchange", EXCHANGE), ("own-forward-plan", {FORWARD_CAP: 60}))
        for objective in OBJECTIVES
        if objective != DEFAULT_OBJECTIVE
    },
    "dp2-padding-samples": ("dp2", {"padded_to": 8}),
    "dp2-mean-over-micro-batches": ("dp2", {"per_token_loss": False}),
    "cp2": ("cp2", {}),
    "cp2-own-forward-plan": ("cp2", {"planner": {FORWARD_CAP: 60}, "kind": "qk"}),
    "cp2-learned-positions": ("cp2", {"kind": "learned"}),
    "cp2-mamba": ("cp2", {"kind": "mamba"}),
    "cp2-window": ("cp2", {"kind": "window"}),
    "dp2-mrope": ("dp2", {"kind": "mrope"}),
    "tp2-sp": ("tp2-sp", {}),
    "dp2-ep2": ("dp2-ep2", {"spread": "empty"}),
    "dp2-ep2-replayed-routing": ("dp2-ep2", {"kind": "replay"}),
    "cp2-ep2-replayed-routing": ("cp2-ep2", {"kind": "replay"}),
    "dp2-pp2": ("dp2-pp2", {"spread": "empty"}),
    "dp2-pp2-vpp2": ("dp2-pp2-vpp2", {"settings": RECOMPUTED}),
    "cp2-pp2": ("cp2-pp2", {"planner": {FORWARD_CAP: 60}}),
    "cp2-tp2-sp-padded": (
        "cp2-tp2-sp",
        {"planner": {"dynamic_batch_pad_each_to": 12, "dynamic_batch_pad_total_to": 16}},
    ),
    "dp2-exchange": ("dp2", {"planner": EXCHANGE}),
    "dp2-exchange-own-forward-plan": ("dp2", {"planner": EXCHANGE | {FORWARD_CAP: 60}}),
    "dp2-exchange-padding-samples": ("dp2", {"planner": EXCHANGE, "padded_to": 8}),
    "dp2-pp2-exchange": ("dp2-pp2", {"planner": EXCHANGE, "spread": "empty"}),
    "dp2-ep2-exchange-replayed-routing": ("dp2-ep2", {"planner": EXCHANGE, "kind": "replay"}),
}
"""Samples that begin others, computed in those: name to layout and what differs."""
if HAS_HYBRID_MODEL:
    PREFIXES |= {
        f"{layout}-{kind}": (layout, {"kind": kind})
        for layout, kind in (
            ("dp2", "mla"),
            ("cp2", "mla"),
            ("dp2", "hybrid"),
            ("dp2-ep2", "hybrid-moe"),
            ("cp2", "hybrid-mamba"),
            ("dp2", "hybrid-gdn"),
            ("cp2", "hybrid-gdn"),
        )
    }
PREFIXES_WITHOUT_LONG = {
    "one",
    "dp2",
    "dp2-own-forward-plan",
    "dp2-padding-samples",
    "one-sample-mean-with-kl",
    "cp2",
    "cp2-mamba",
    "tp2-sp",
    "dp2-ep2-replayed-routing",
    "dp2-pp2",
    "dp2-pp2-vpp2",
    "dp2-exchange",
}


def prefix_jobs() -> list[Any]:
    """`PREFIXES` as jobs."""
    made = []
    for name, (layout_name, changes) in PREFIXES.items():
        nproc, kind, dims = LAYOUTS[layout_name]
        parameters = {"dims": dims, "kind": kind, **changes}
        parameters["reference"] = parameters["kind"]
        parameters["planner"] = SHARE_PREFIXES | parameters.get("planner", {})
        job = Job(f"{name}-prefixes", "kit.exactness:compare", nproc, dims, parameters)
        made.append(
            pytest.param(job, marks=() if name in PREFIXES_WITHOUT_LONG else pytest.mark.long)
        )
    return made


def assert_computed_once(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Of all samples those are computed that begin no other one that their rank brings."""
    replicas, computed = job.dims.get("data_parallel", 1), 0
    for replica in range(replicas):
        spread = job.parameters.get("spread", "uneven")
        brought = share({"total_lengths": SHAPES}, spread, replica, replicas)
        chains = [[turn for turn in chain if turn in brought] for chain in CHAINS]
        hosted = {turn for _, *turns in filter(None, chains) for turn in turns}
        computed += sum(SHAPES[i][0] for i in brought if i not in hosted)
    assert computed < sum(total for total, _ in SHAPES)
    on_each = len(ranks) // _num_ranks(job.dims)
    assert sum(rank["computed"] for rank in ranks) == computed * on_each


def _num_ranks(dims: dict[str, Any]) -> int:
    """Ranks that may share a row."""
    return int(dims.get("data_parallel", 1) * dims.get("context_parallel", 1))


def assert_equal_to(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Outputs, gradients, weights and metrics of all ranks are the reference's."""
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    assert max(rank["weights"] for rank in ranks) < WEIGHTS
    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENTS)
        if rank["last_stage"]:
            assert rank["metrics"].keys() == expected["metrics"].keys()
            for name, value in expected["metrics"].items():
                assert rank["metrics"][name] == pytest.approx(value, rel=METRICS), name


@pytest.mark.parametrize("job", prefix_jobs(), ids=str)
def test_shared_prefixes_equal_reference(
    job: Job, ranks: list[dict[str, Any]], references: dict[str, str]
) -> None:
    """Beginnings that samples share are computed once, and nothing else changes."""
    expected = torch.load(references[job.parameters["kind"]], weights_only=True)
    expected |= expected["objectives"][job.parameters.get("objective", DEFAULT_OBJECTIVE)]
    if "padded_to" not in job.parameters:  # else there are padding samples besides
        assert_computed_once(job, ranks)
    unpadded = {"context_parallel", "sequence_parallel"}.isdisjoint(job.dims)
    for rank in ranks:
        if unpadded and rank["tokens"]:  # not on the first stage alone; a placeholder has one
            assert rank["tokens"] == rank["computed"] + rank["placeholders"]
    assert_equal_to(expected, ranks)


SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2-shared": ("dp2", {}),
    "dp2-shared-own-plan": ("dp2", {"plan": "own", "spread": "empty"}),
    "dp2-shared-recomputed-activations": ("dp2", {"settings": RECOMPUTED}),
    "dp2-shared-recomputed-attention": (
        "dp2",
        {"settings": {"recompute_granularity": "selective"}},
    ),
    "dp2-shared-distributed-optimizer": ("dp2", {"distributed_optimizer": True, "overlap": True}),
    "dp2-shared-learned-positions": ("dp2", {"kind": "learned"}),
    "dp2-shared-query-key-norms": ("dp2", {"kind": "qk"}),
    "dp2-ep2-shared": ("dp2-ep2", {}),
    "dp2-ep2-shared-empty": ("dp2-ep2", {"spread": "empty"}),
    "dp4-shared": ("dp4", {"spread": "empty"}),
    "dp4-shared-own-plan": ("dp4", {"plan": "own", "spread": "fewer"}),
    "dp4-shared-recomputed-activations": ("dp4", {"settings": RECOMPUTED}),
    "dp4-shared-distributed-optimizer": ("dp4", {"distributed_optimizer": True}),
    "dp2-pp2-shared": ("dp2-pp2", {"spread": "empty"}),
    "dp2-pp2-shared-own-plan": ("dp2-pp2", {"plan": "own"}),
    "dp2-pp2-shared-recomputed-activations": ("dp2-pp2", {"settings": RECOMPUTED}),
    "dp2-pp2-shared-shapes-exchanged": (
        "dp2-pp2",
        {"planner": {"dynamic_batch_no_planned_shapes": True}},
    ),
    "dp2-pp2-vpp2-shared": ("dp2-pp2-vpp2", {}),
    "dp2-pp2-vpp2-shared-recomputed-activations": ("dp2-pp2-vpp2", {"settings": RECOMPUTED}),
    # Beside a context-parallel size: both ranks of a replica bring its samples, each runs its own.
    "dp2-cp2-shared": ("dp2-cp2", {"spread": "empty"}),
    "dp2-cp2-shared-own-plan": ("dp2-cp2", {"plan": "own", "spread": "fewer"}),
    "dp2-cp2-shared-recomputed-activations": ("dp2-cp2", {"settings": RECOMPUTED}),
    "dp2-cp2-shared-distributed-optimizer": ("dp2-cp2", {"distributed_optimizer": True}),
    "dp2-cp2-shared-learned-positions": ("dp2-cp2", {"kind": "learned"}),
    "cp4-shared": ("cp4", {}),
    "cp2-pp2-shared": ("cp2-pp2", {}),
    "cp2-pp2-vpp2-shared": ("cp2-pp2-vpp2", {"settings": RECOMPUTED}),
    "cp2-tp2-sp-shared": ("cp2-tp2-sp", {}),
    "cp2-ep2-shared": ("cp2-ep2", {}),
    "dp2-tp2-sp-shared": ("dp2-tp2-sp", {"spread": "empty"}),
    "dp2-tp2-sp-shared-padded": (
        "dp2-tp2-sp",
        {"planner": {"dynamic_batch_pad_each_to": 12, "dynamic_batch_pad_total_to": 16}},
    ),
    "dp2-shared-prefixes": ("dp2", {"planner": SHARE_PREFIXES}),
    **{
        f"dp2-shared-prefixes-{objective}": (
            "dp2",
            {"planner": SHARE_PREFIXES, "objective": objective},
        )
        for objective in OBJECTIVES
        if objective != DEFAULT_OBJECTIVE
    },
    "dp4-shared-prefixes": ("dp4", {"planner": SHARE_PREFIXES, "spread": "fewer"}),
    "dp2-pp2-shared-prefixes": ("dp2-pp2", {"planner": SHARE_PREFIXES, "spread": "empty"}),
    "dp2-cp2-shared-prefixes": ("dp2-cp2", {"planner": SHARE_PREFIXES, "plan": "own"}),
}
"""Rows of context-parallel sizes of their own: name to layout and what differs."""
if HAS_HYBRID_MODEL:
    SHARED["dp2-shared-hybrid"] = ("dp2", {"kind": "hybrid"})
    SHARED["dp2-shared-multi-token"] = ("dp2", {"kind": "mtp"})
SHARED_LAYOUTS = LAYOUTS | {
    "dp2-tp2-sp": (
        4,
        "dense",
        {"data_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "cp2-pp2-vpp2": (
        4,
        "dense",
        {"context_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ),
}
SHARED_WITHOUT_LONG = {
    "dp2-shared",
    "dp2-shared-multi-token",
    "dp4-shared",
    "dp2-pp2-shared",
    "dp2-shared-prefixes",
}


def shared_jobs() -> list[Any]:
    """`SHARED` as jobs."""
    made = []
    for name, (layout_name, changes) in SHARED.items():
        nproc, kind, dims = SHARED_LAYOUTS[layout_name]
        parameters = {"dims": dims, "kind": kind, "plan": "mixed", **changes}
        parameters["reference"] = parameters["kind"]
        flag = {"dynamic_batch_context_parallel": _num_ranks(dims)}
        parameters["planner"] = flag | parameters.get("planner", {})
        job = Job(name, "kit.shared_rows:compare", nproc, dims, parameters)
        made.append(
            pytest.param(job, marks=() if name in SHARED_WITHOUT_LONG else pytest.mark.long)
        )
    return made


@pytest.mark.parametrize("job", shared_jobs(), ids=str)
def test_rows_of_several_sizes_equal_reference(
    job: Job, ranks: list[dict[str, Any]], references: dict[str, str]
) -> None:
    """Rows on 1, 2 and 4 ranks in one step, log-probs back where their samples came from."""
    expected = torch.load(references[job.parameters["kind"]], weights_only=True)
    expected |= expected["objectives"][job.parameters.get("objective", DEFAULT_OBJECTIVE)]
    width = _num_ranks(job.dims)
    sizes = {size for rank in ranks for size in rank["sizes"]}
    assert sizes == {1, 2, width} if job.parameters["plan"] == "mixed" else width in sizes
    assert len({tuple(rank["counts"]) for rank in ranks}) == 1
    assert_equal_to(expected, ranks)
    exchanged = job.parameters["planner"].get("dynamic_batch_no_planned_shapes", False)
    for rank in ranks:
        assert bool(rank["messages"]["shapes"]) == exchanged
    if job.parameters["planner"].get("dynamic_batch_share_prefixes"):
        assert_computed_once(job, ranks)


CHANGING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp2-pp2": ("dense", LAYOUTS["dp2-pp2"][2], {}),
    "dp2-pp2-vpp2": ("dense", LAYOUTS["dp2-pp2-vpp2"][2], {}),
    "tp2-sp-pp2": ("dense", LAYOUTS["tp2-sp-pp2"][2], {}),
    "cp2-pp2": ("dense", LAYOUTS["cp2-pp2"][2], {}),
    "dp2-pp2-exchange": ("dense", LAYOUTS["dp2-pp2"][2], {"dynamic_batch_exchange": True}),
    "dp4-shared": ("dense", LAYOUTS["dp4"][2], {"dynamic_batch_context_parallel": 4}),
}
"""Layouts, kinds of models and settings in which plans follow costs that change."""


@pytest.mark.long
@pytest.mark.parametrize(
    "job",
    [
        Job(
            f"{name}-changing-plans",
            "kit.changing_plans:compare",
            4,
            dims,
            {"dims": dims, "kind": kind, "reference": f"{kind}-trained", "planner": planner},
        )
        for name, (kind, dims, planner) in CHANGING.items()
    ],
    ids=str,
)
def test_training_whose_plans_follow_learnt_costs_equals_reference(
    job: Job, ranks: list[list[dict[str, Any]]]
) -> None:
    """Six steps in a row: no plan of them changes what the ones after it start from."""
    assert ranks[0][-1]["learnt"]
    assert any(step["plan"] != rank[0]["plan"] for rank in ranks for step in rank)
    for step in (step for rank in ranks for step in rank):
        assert step["loss"] < METRICS
        assert step["grad_norm"] < GRADIENTS
        assert step["weights"] < WEIGHTS


BACK_WITHOUT_LONG = {"dp2-pp2-shared", "dp2-pp2-exchange-prefixes"}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            Job(
                f"{layout}-{name}-there-and-back",
                "kit.shared_rows:there_and_back",
                nproc,
                LAYOUTS[layout][2],
                {
                    "dims": LAYOUTS[layout][2],
                    "reference": "dense",
                    "spread": "empty",
                    "planner": planner,
                },
            ),
            marks=() if f"{layout}-{name}" in BACK_WITHOUT_LONG else pytest.mark.long,
        )
        for layout, nproc in (("dp2-pp2", 4), ("dp4", 4), ("dp2-cp2", 4))
        for name, planner in (
            ("exchange", {"dynamic_batch_exchange": True}),
            # A cap under which no two samples share a micro-batch.
            ("exchange-forward-cap", {"dynamic_batch_exchange": True, FORWARD_CAP: 1}),
            ("shared", {"dynamic_batch_context_parallel": 2}),
            ("exchange-prefixes", EXCHANGE | SHARE_PREFIXES),
            ("shared-prefixes", {"dynamic_batch_context_parallel": 2} | SHARE_PREFIXES),
        )
        if layout != "dp2-cp2" or FORWARD_CAP not in planner  # two ranks take 4 tokens at least
    ],
    ids=str,
)
def test_values_come_back_to_the_place_of_their_samples(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    """Fields of every kind move with their samples, also added ones; outputs come back."""
    for rank in ranks:
        assert rank["trained"] == ranks[0]["trained"]
        assert [len(rank["trained"]), sum(rank["trained"])] == [3, len(SHAPES)]
        assert rank["equal"] == (
            dict.fromkeys(("tokens", "source", "long", "pixels", "weight", "beside"), True)
            if rank["last_stage"]
            else {}
        )
    assert any(rank["moved"] for rank in ranks)
    if FORWARD_CAP in job.parameters["planner"]:
        last = [rank["forward_rows"] for rank in ranks if rank["last_stage"]]
        assert sum(last) == len(SHAPES)
    shares_prefixes = job.parameters["planner"].get("dynamic_batch_share_prefixes", False)
    assert any(rank["hosted"] for rank in ranks) == shares_prefixes


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            Job(
                f"dp4-scarce-{what.replace(' ', '-')}",
                "kit.shared_rows:scarce",
                4,
                {"data_parallel": 4},
                {"dims": {"data_parallel": 4}, "reference": "dense", "what": what},
            ),
            marks=() if what == "no responses" else pytest.mark.long,
        )
        for what in ("one sample", "one token", "no responses")
    ],
    ids=str,
)
def test_rows_with_little_to_share_are_what_they_are_on_one_rank(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        alone, shared = rank["one rank"], rank["mixed sizes"]
        assert shared["num_tokens"] == alone["num_tokens"]
        assert shared["metrics"] == pytest.approx(alone["metrics"], rel=METRICS, abs=1e-7)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=GRADIENTS, abs=1e-7)
        assert len(shared["log_probs"]) == len(alone["log_probs"])
        for ours, expected in zip(shared["log_probs"], alone["log_probs"], strict=True):
            assert ours == pytest.approx(expected, rel=LOG_PROBS)
    sizes = {size for rank in ranks for size in rank["mixed sizes"]["sizes"]}
    assert max(sizes) == 4


@pytest.mark.parametrize(
    "job",
    [
        Job(
            "cp2-shared-silent-placeholders",
            "kit.shared_rows:silent_placeholders",
            2,
            {"context_parallel": 2},
            {"dims": {"context_parallel": 2}, "reference": "dense"},
        )
    ],
    ids=str,
)
def test_ranks_of_a_replica_need_not_ask_for_the_same_log_probs(job: Job, ranks: list[Any]) -> None:
    """Under dynamic CP they run rows of their own; without, they have to."""
    (first, rows), (second, no_rows) = ranks
    assert sorted([rows, no_rows]) == [[0], [1]]
    assert first == second


@pytest.mark.parametrize("job", [*jobs(), *special_jobs(), *blocking_jobs()], ids=str)
def test_equals_reference(
    job: Job, ranks: list[dict[str, Any]], references: dict[str, str]
) -> None:
    """Loss, log-probs in origin order, gradients and updated weights, with real uneven ranks."""
    expected = torch.load(references[job.parameters["kind"]], weights_only=True)
    expected |= expected["objectives"][job.parameters.get("objective", DEFAULT_OBJECTIVE)]
    assert len({tuple(rank["counts"]) for rank in ranks}) == 1
    assert all(rank["last_is_real"] for rank in ranks)
    assert any(rank["oversize"] for rank in ranks)  # the cap holds 48 tokens, one sample has 200
    short_of_samples = job.parameters.get("spread", "uneven") != "fewer"
    short_of_samples &= job.parameters.get("padded_to") is None
    stays = job.parameters.get("planner", {}).get("dynamic_batch_exchange", True) is False
    if short_of_samples and stays and job.dims.get("data_parallel", 1) > 1:
        assert any(rank["placeholders"] for rank in ranks)
    forward_cap = job.parameters.get("planner", {}).get(FORWARD_CAP)
    if forward_cap is not None:
        forward_cap *= job.dims.get("context_parallel", 1)
        fullest, wider = max(rank["forward_fullest"] for rank in ranks), forward_cap > CAP_TOKENS
        assert (CAP_TOKENS if wider else 0) < fullest <= forward_cap
        assert (ranks[0]["forward_count"] < ranks[0]["counts"][0]) == wider
    assert_equal_to(expected, ranks)
    # The plan says what shape each tensor has that stages send each other.
    exchanged = job.parameters.get("planner", {}).get("dynamic_batch_no_planned_shapes", False)
    for rank in ranks:
        assert bool(rank["messages"]["shapes"]) == exchanged
        assert bool(rank["messages"]["tensors"]) == (job.dims.get("pipeline_parallel", 1) > 1)


CHECKOUTS = os.environ.get("MCORE_BATCHING_MEGATRON_LM")
IN_OTHER_RELEASES = (
    *("dp2", "dp2-ep2-mean", "cp2", "tp2-sp-fused-output-layer"),
    *("dp2-pp2-vpp2-mean", "dp2-pp2-repeated"),
)
"""Of `MULTI_TOKEN`."""


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUTS, reason="MCORE_BATCHING_MEGATRON_LM is not set")
@pytest.mark.parametrize("release", ["core_v0.17.1", "core_v0.18.2", "main"])
def test_further_tokens_in_other_releases(release: str, tmp_path: Path) -> None:
    checkout = Path(CHECKOUTS or "") / release
    if not checkout.is_dir():
        pytest.skip(f"no {checkout}")
    jobs = [special_job(f"{name}-multi-token") for name in IN_OTHER_RELEASES]
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(checkout)}):
        references = reference_files(tmp_path, [*{job.parameters["kind"] for job in jobs}])
        for nproc in (2, 4):
            together = [with_reference(job, references) for job in jobs if job.nproc == nproc]
            found = run_jobs(together, tmp_path / f"{nproc}")
            for job in together:
                test_equals_reference(job, results(found[job.name]), references)


@pytest.mark.parametrize(
    "job",
    [
        Job(
            f"{kind}-state-across-samples",
            "kit.exactness:compare_with_state_across_samples",
            1,
            {},
            {"dims": {}, "kind": kind, "reference": kind},
        )
        for kind in ("mamba", *(("hybrid-mamba", "hybrid-gdn") if HAS_HYBRID_MODEL else ()))
    ],
    ids=str,
)
def test_state_that_crosses_samples_would_be_seen(job: Job, ranks: list[dict[str, Any]]) -> None:
    """The fault that all comparisons of such layers are there for, in the kernels themselves."""
    (rank,) = ranks
    assert rank["log_probs"] > 1000 * LOG_PROBS
    assert rank["gradients"] > 1000 * GRADIENTS


@pytest.mark.parametrize(
    "job",
    [
        Job(
            "dp2-pp2-bfloat16",
            "kit.exactness:compare",
            4,
            LAYOUTS["dp2-pp2"][2],
            {
                "dims": LAYOUTS["dp2-pp2"][2],
                "kind": "dense",
                "reference": "dense",
                "spread": "empty",
                "settings": {"bf16": True},
            },
        )
    ],
    ids=str,
)
def test_bfloat16_follows_the_float32_reference(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Megatron's half-precision wrapper and optimizer, within what bfloat16 rounds."""
    assert max(rank["log_probs"] for rank in ranks) < BFLOAT16
    assert 0 < max(rank["gradients"] for rank in ranks) < BFLOAT16
    assert max(rank["weights"] for rank in ranks) < BFLOAT16


@pytest.mark.parametrize(
    "job",
    [
        Job(
            "dp2-own-weights",
            "kit.model:weights_where_ranks_begin_with_their_own",
            2,
            {"data_parallel": 2},
        )
    ],
    ids=str,
)
def test_replicas_begin_alike_whatever_their_random_numbers(job: Job, ranks: list[float]) -> None:
    assert ranks[0] == ranks[1] != 0.0
