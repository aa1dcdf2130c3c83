"""Every layout, model and feature against one process, one sample per forward pass, nothing packed.

Jobs of the random draw, by seeds that cover every pair of a layout and a model, of a layout and a
feature, and of a model and a feature; see `kit.covering`. Tolerances: `kit.random_jobs`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from kit.covering import is_late, uncovered
from kit.harness import Job
from kit.random_draw import job_of, report, verdict

VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))


SEEDS = """
    7980 12371 20306 22049 22817 23044 26801 27267 30381 32662 43172 54758 63223 95907
    100789 117916 118395 123273 125515 131758 132829 152038 162536 170276 175236 177250
    179654 180474 196044 209830 210487 217660 227148 227751 242231 246942 248504
    1272 7029 7835 19926 20096 21645 38579 39289 42841 52263 60797 63955 65636 71804 72361
    76358 102444 109474 126867 127028 146482 148606 148712 149184 165960 166695 169582
    172724 185587 191427 198979 203304 206460 224825 237180 247624
"""
ARRAY = [job_of(int(seed)) for seed in SEEDS.split()]

PLAIN: dict[str, Any] = {
    "lopsided": False,
    "exchange": True,
    "dynamic_CP": False,
    "as_they_come": False,
    "other_layers": False,
    "hybrid": False,
    "multi-token_prediction": False,
    "attention": None,
    "own_packing": False,
    "rollouts": 1,
    "kind": "dense",
}
# Nine of 18 samples on each rank, in steps of four.
STAYING = {
    "layout": (2, 1, 1, 1),
    "exchange": False,
    "rollout_0,_steps": "global batch size",
}
# Of the second tensor-parallel rank all entries are banned.
BANNED = {"layout": (1, 1, 1, 2), "fused_output": False, "entropy's_mean": "token"}
SHARED_ROWS = {"dynamic_CP": True, "mixed_sizes": True, "layout": (4, 1, 1, 1)}
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
}
# Megatron multiplies these losses by the ranks that share a row, here four.
BALANCED = {
    "layout": (1, 1, 4, 1),
    "kind": "moe",
    "auxiliary_losses": True,
    "which_losses": ["aux_loss", "seq_aux_loss"],
}
DEPTHS = {"multi-token_prediction": True, "depths": 2, "detached_heads": False}
SPECIAL = [
    job_of(1468, "samples-that-stay", nproc=2, **PLAIN | STAYING),
    job_of(3, "banned-infinite", nproc=2, banned="infinite", temperature=0.7, **PLAIN | BANNED),
    job_of(3, "banned-lowest", nproc=2, banned="lowest", temperature=1.0, **PLAIN | BANNED),
    job_of(1567, "one-sample", nproc=4, **PLAIN | SHARED_ROWS),
    job_of(194, "no-responses", nproc=4, **PLAIN | SHARED_ROWS),
    job_of(8, "auxiliary-losses-cp4", nproc=4, **PLAIN | BALANCED),
    job_of(174, "branches-one-rank", **BRANCHES),
    job_of(174, "branches-cp2", **BRANCHES | {"layout": (1, 1, 2, 1), "nproc": 2}),
    job_of(174, "branches-further-tokens", **BRANCHES | DEPTHS),
]
"""What the array has too rarely: little to share, many branches."""
FAILED = [
    # PP2: log-probs of the last stage as fields, then a forward pass by a plan of its own.
    job_of(863, other_layers=False),
    # CP2: a layer of the caller's own with a state, and samples that branch.
    job_of(20093, turns=True, shared_prefixes=True, worker="in line"),
    job_of(1001),  # exchange: log-probs and entropies of a response of one token travel back
    job_of(35964),  # bfloat16: Adam moved weights of small gradients by more than was allowed for
    job_of(1002),  # steps of 4 samples over ranks that hold different numbers
    # PP2: learned positions of later tokens, which the last stage embeds, now refused.
    job_of(1012),
]
"""Jobs that once showed a fault."""
JOBS = [*ARRAY, *SPECIAL, *FAILED]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_equals_reference(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Outputs in origin order, losses, metrics, gradients and weights after every step."""
    kind, said = verdict(job, ranks)
    if is_late(job.parameters["job"]) and VERSION < (0, 19) and kind in ("not built", "refused"):
        pytest.skip(said.splitlines()[-1])
    expected = "refused" if job.parameters["job"]["refused"] else "equal"
    assert kind == expected, report(job, said)


@pytest.mark.parametrize("late", [False, True], ids=["every version", "all"])
def test_every_pair_is_covered(late: bool) -> None:
    """Else `python -m kit.covering` prints seeds that do."""
    assert not uncovered((job.parameters["job"] for job in JOBS), late=late)


def test_special_jobs_are_what_they_are_named_for() -> None:
    rollouts = {job.name: job.parameters["job"]["rollouts"][0] for job in SPECIAL}
    assert len(rollouts["one-sample"]["samples"]) == 1
    assert not any(response for _, response, _ in rollouts["no-responses"]["samples"])
    owners = [rank for _, _, rank in rollouts["samples-that-stay"]["samples"]]
    assert owners == [0] * 9 + [1] * 9
    (balanced,) = (job.parameters["job"] for job in SPECIAL if job.name == "auxiliary-losses-cp4")
    assert balanced["balancing"].keys() == {"aux_loss", "seq_aux_loss"}
    assert balanced["dims"]["context_parallel"] == 4
    assert rollouts["samples-that-stay"]["global_batch_size"] == 4
