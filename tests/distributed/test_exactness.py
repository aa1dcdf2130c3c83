"""Every layout, model and feature against one process, one sample per forward pass, nothing packed.

Jobs of the random draw, by seeds that cover every pair of a layout and a model, of a layout and a
feature, and of a model and a feature; see `kit.covering`. Tolerances: `kit.random_comparison`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from kit.covering import covered_by, is_late, to_be_covered
from kit.harness import Job
from kit.random_draw import drawn_job
from kit.random_verdict import job_of, report, verdict
from kit.samples import SHAPES

VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split()]


EVERY_VERSION = _seeds("""
    17011 29157 11143 25515 36672 15037 28289 7547 19568 30136 13014 37460 17955 17046 11124
    35122 11181 3727 26914 13344 39945 7997 23038 36320 3934 5449 24 11099 2170 1063 2838
    936 29579 37189 23058 26538 683 3348 494 538
""")
"""Seeds of models that every version of Megatron builds."""
LATE = _seeds("""
    24136 18813 31532 12333 20776 11750 37535 33503 15397 4007 18735 36874 33381 30820 35341
    25867 3585 28128 11347 15847 25584 8917 560 28109 13117 6110 16394 6576 36573 11474 2584
    3578 5162 529
""")
"""Seeds of the others, after those."""
ARRAY = [job_of(seed) for seed in (*EVERY_VERSION, *LATE)]

# Samples lie 40, 3, 0 and 1 on the data-parallel ranks.
PLAIN = {
    "lopsided": True,
    "exchange": True,
    "dynamic_CP": False,
    "without_the_flag": False,
    "other_layers": False,
    "hybrid": False,
    "multi-token_prediction": False,
    "attention": None,
    "own_packing": False,
    "rollouts": 1,
    "kind": "dense",
}
UNEVEN: dict[str, dict[str, Any]] = {
    "dp4": {"layout": (4, 1, 1, 1)},
    "dp2-pp2-vpp2": {"layout": (2, 2, 1, 1), "virtual_pipeline": True, "group_size": False},
    "dp2-cp2": {"layout": (2, 1, 2, 1)},
    "dp4-ep2": {"layout": (4, 1, 1, 1), "kind": "moe", "expert_parallel": 2},
    "dp2-tp2-sp": {"layout": (2, 1, 1, 2), "sequence_parallel": True},
}
SHARED_ROWS = {"dynamic_CP": True, "mixed_sizes": True, "lopsided": False, "layout": (4, 1, 1, 1)}
SCARCE = {"one sample": 1567, "no responses": 194}
"""Seeds of a rollout of which there is little to share."""


@pytest.mark.parametrize("job", ARRAY, ids=str)
def test_equals_reference(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Outputs in origin order, losses, metrics, gradients and weights after every step."""
    kind, said = verdict(job, ranks)
    if is_late(job.parameters["job"]) and VERSION < (0, 19) and kind in ("not built", "refused"):
        pytest.skip(said.splitlines()[-1])
    assert kind == "equal", report(job, said)


@pytest.mark.parametrize("late", [False, True], ids=["every version", "all"])
def test_every_pair_is_covered(late: bool) -> None:
    """Else `python -m kit.covering` says which seeds do."""
    seeds = [*EVERY_VERSION, *LATE] if late else EVERY_VERSION
    covered = [covered_by(drawn_job(seed)) for seed in seeds]
    assert not to_be_covered(late=late).difference(*covered)


@pytest.mark.parametrize(
    "job",
    [job_of(1, f"uneven-{name}", nproc=4, **PLAIN | layout) for name, layout in UNEVEN.items()],
    ids=str,
)
def test_a_rollout_that_lies_unevenly(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Samples run on all ranks; outputs come back to the one that brought them."""
    kind, said = verdict(job, ranks)
    assert kind == "equal", report(job, said)


@pytest.mark.parametrize(
    "job",
    [job_of(seed, name, nproc=4, **PLAIN | SHARED_ROWS) for name, seed in SCARCE.items()],
    ids=str,
)
def test_rows_that_ranks_share_though_there_is_little(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    samples = [response for _, response, _ in job.parameters["job"]["rollouts"][0]["samples"]]
    assert len(samples) == 1 or not any(samples)
    kind, said = verdict(job, ranks)
    assert kind == "equal", report(job, said)


def crossing(kind: str) -> Job:
    forced = {"nproc": 1, "kind": "dense", "other_layers": True, "other_layer": kind}
    job = job_of(5, f"{kind}-state-across-samples", **forced)
    job.parameters["job"]["state_crosses_samples"] = True
    return job


@pytest.mark.parametrize(
    "job",
    [crossing(kind) for kind in ("mamba", *(("hybrid-mamba", "hybrid-gdn") * (VERSION > (0, 17))))],
    ids=str,
)
def test_state_that_crosses_samples_would_be_seen(job: Job, ranks: list[dict[str, Any]]) -> None:
    """The fault that all comparisons of such layers are there for, in the kernels themselves."""
    (rank,) = ranks
    found = rank["differences"]
    gradients = [value for name, value in found.items() if name.startswith("gradient of")]
    assert min(found["log_probs before"], max(gradients)) > 1000


EXCHANGE = {"dynamic_batch_exchange": True}
SHARED = {"dynamic_batch_context_parallel": 2}
SHARE_PREFIXES = {"dynamic_batch_share_prefixes": True}
FORWARD_CAP = "dynamic_batch_forward_only_max_tokens_per_gpu"
LAYOUTS = {
    "dp2-pp2": {"data_parallel": 2, "pipeline_parallel": 2},
    "dp4": {"data_parallel": 4},
    "dp2-cp2": {"data_parallel": 2, "context_parallel": 2},
}
MOVED: dict[str, dict[str, Any]] = {
    "exchange": EXCHANGE,
    # A cap under which no two samples share a micro-batch.
    "exchange-forward-cap": EXCHANGE | {FORWARD_CAP: 1},
    "shared": SHARED,
    "exchange-prefixes": EXCHANGE | SHARE_PREFIXES,
    "shared-prefixes": SHARED | SHARE_PREFIXES,
}


def there_and_back(layout: str, name: str, planner: dict[str, Any]) -> Any:
    dims = LAYOUTS[layout]
    given = {"dims": dims, "reference": "dense", "spread": "empty", "planner": planner}
    job = Job(f"{layout}-{name}-there-and-back", "kit.shared_rows:there_and_back", 4, dims, given)
    is_usual = f"{layout}-{name}" in ("dp2-pp2-shared", "dp2-pp2-exchange-prefixes")
    return pytest.param(job, marks=() if is_usual else pytest.mark.long)


@pytest.mark.parametrize(
    "job",
    [
        there_and_back(layout, name, planner)
        for layout in LAYOUTS
        for name, planner in MOVED.items()
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
    assert any(rank["saved"] for rank in ranks) == shares_prefixes


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
