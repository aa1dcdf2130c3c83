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

VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split()]


EVERY_VERSION = _seeds("""
    8708 19925 26426 37460 19568 33069 14654 2068 17427 13573 24586 29385 21016 34532 25222
    26404 10336 16650 38694 24410 23044 5382 22331 11646 26634 23641 2980 39554 1572 27267
    35473 18013 14319 22509 10587 11930 22049 14060 2924
""")
"""Seeds of models that every version of Megatron builds."""
LATE = _seeds("""
    9332 11429 15618 38583 22688 10012 7170 2706 32150 34819 18348 14980 9577 18737 7576 7835
    31180 34 30862 20096 21803 21645 15819 27612 9704 21359 29755 7424 36957 331 9470 28381
    17102 5505 26220 1272 5672 19606 19926 20715
""")
"""Seeds of the others, after those."""
ARRAY = [job_of(seed) for seed in (*EVERY_VERSION, *LATE)]

# Samples lie 40, 3, 0 and 1 on the data-parallel ranks.
PLAIN: dict[str, Any] = {
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
# Nine of 18 samples on each rank, in steps of four.
STAYING = {
    "layout": (2, 1, 1, 1),
    "lopsided": False,
    "exchange": False,
    "rollout_0,_steps": "global batch size",
}
# Of the second tensor-parallel rank all entries are banned.
BANNED = {"layout": (1, 1, 1, 2), "fused_output": False, "entropy's_mean": "token"}
SHARED_ROWS = {"dynamic_CP": True, "mixed_sizes": True, "lopsided": False, "layout": (4, 1, 1, 1)}
# 13 samples of 39 tokens are computed as 294, up to five nodes behind each other.
BRANCHES: dict[str, Any] = PLAIN | {
    "nproc": 1,
    "layout": (1, 1, 1, 1),
    "turns": True,
    "shared_prefixes": True,
    "rollout_0,_steps": "one",
    "rollout_0,_padding_samples": False,
    "cap": 100,
    "samples_of_a_row": False,
    "worker": None,
    "positions": "rope",
    "trained": "all",
    "bfloat16": False,
    "loss_masks": "weights",
    "lopsided": False,
}
DEPTHS = {"multi-token_prediction": True, "depths": 2, "detached_heads": False}
SPECIAL = [
    *(job_of(1, f"uneven-{name}", nproc=4, **PLAIN | each) for name, each in UNEVEN.items()),
    job_of(1468, "samples-that-stay", nproc=2, **PLAIN | STAYING),
    job_of(3, "banned-infinite", nproc=2, banned="infinite", temperature=0.7, **PLAIN | BANNED),
    job_of(3, "banned-lowest", nproc=2, banned="lowest", temperature=1.0, **PLAIN | BANNED),
    job_of(1567, "one-sample", nproc=4, **PLAIN | SHARED_ROWS),
    job_of(194, "no-responses", nproc=4, **PLAIN | SHARED_ROWS),
    job_of(174, "branches-one-rank", **BRANCHES),
    job_of(174, "branches-cp2", **BRANCHES | {"layout": (1, 1, 2, 1), "nproc": 2}),
    job_of(174, "branches-further-tokens", **BRANCHES | DEPTHS),
]
"""What the array has too rarely: samples on few ranks, little to share, many branches."""


@pytest.mark.parametrize("job", [*ARRAY, *SPECIAL], ids=str)
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


def test_special_jobs_are_what_they_are_named_for() -> None:
    rollouts = {job.name: job.parameters["job"]["rollouts"][0] for job in SPECIAL}
    assert len(rollouts["one-sample"]["samples"]) == 1
    assert not any(response for _, response, _ in rollouts["no-responses"]["samples"])
    owners = [rank for _, _, rank in rollouts["samples-that-stay"]["samples"]]
    assert owners == [0] * 9 + [1] * 9
    assert rollouts["samples-that-stay"]["global_batch_size"] == 4


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
