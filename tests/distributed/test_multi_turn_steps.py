"""Whole optimizer steps on multi-turn batches, by prompts, as verl and SkyRL were tested with.

verl: 45 prompts of 8 trajectories, 15 prompts a step, on 2 data-parallel ranks. SkyRL: 3509
sequences of 256 prompts, 128 a step (640 trajectories). Without --long: verl's layout with 15
prompts of 4 trajectories, 5 prompts a step. Each trajectory has 1 to 5 turns, each turn is a
sample. The engine's runs are compared with a plain one: nothing packed, padded or distributed, each
step's loss in one piece, `torch.optim.AdamW`.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job
from kit.multi_turn import (
    PROMPTS,
    PROMPTS_PER_STEP,
    TRAJECTORIES_PER_PROMPT,
    multi_turn_batch,
)

# Rounding of float32 (unit roundoff 6e-8) in sums over up to some thousand tokens, through up to
# three updates, each of which starts from what the last one left. A sample more or less in a
# denominator changes a step by 1e-3.
ROUNDING = 1e-5

DP2 = {"data_parallel": 2}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
LAYOUTS: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("verl", "dp2", DP2, 2, 0),
    ("verl", "dp2-other-turns", DP2, 2, 1),
    ("verl", "dp2-pp2", DP2_PP2, 4, 0),
    ("skyrl", "dp2", DP2, 2, 0),
    ("few", "dp2-pp2", DP2_PP2, 4, 0),
]
JOBS = [
    Job(
        f"multi-turn-{system}-{name}",
        "kit.multi_turn:train",
        nproc,
        dims,
        {"system": system, "dims": dims, "seed": seed},
        seconds=180.0,
    )
    for system, name, dims, nproc, seed in LAYOUTS
]
LONG = {job.name for job in JOBS} - {"multi-turn-few-dp2-pp2"}
with_every_layout = pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=pytest.mark.long if job.name in LONG else ()) for job in JOBS],
    ids=str,
)
with_and_without_padding = pytest.mark.parametrize("run", ["unpadded", "padded"])


MOE = {"kind": "moe", "reference": "moe"}
SHARED = {"dynamic_batch_context_parallel": 2}
COUNTED = [
    Job(
        f"learning-rates-{turns}-turns",
        "kit.counted_steps:learning_rates",
        2,
        DP2,
        {"dims": DP2, "reference": "dense", "turns": turns},
    )
    for turns in (1, 5)
]
UNTRAINED = [
    Job(
        f"nothing-to-train-{name}",
        "kit.counted_steps:nothing_to_train",
        nproc,
        dims,
        {"dims": dims, "reference": "dense"} | parameters,
    )
    for name, nproc, dims, parameters in (
        ("experts", 2, DP2 | {"expert_parallel": 2}, MOE),
        ("exchange", 2, DP2, {"planner": {"dynamic_batch_exchange": True}}),
        ("shared-rows", 2, DP2, {"planner": SHARED}),
        ("dp2-pp2", 4, DP2_PP2, {"distributed_optimizer": True}),
    )
]


def replicas(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rank of each data-parallel replica, of its last pipeline stage."""
    return [rank for rank in ranks if rank["last_stage"]]


@with_every_layout
@with_and_without_padding
def test_weights_after_all_steps_are_those_of_the_plain_run(
    job: Job, ranks: list[dict[str, Any]], run: str
) -> None:
    for rank in ranks:
        assert rank[run]["weights"] < ROUNDING
        assert rank[run]["moved"] > 0.1  # the updates are no rounding
        assert rank[run]["grad_norms"] == pytest.approx(rank["grad_norms"], rel=ROUNDING)


@with_every_layout
@with_and_without_padding
def test_loss_and_kl_of_every_step_are_those_of_the_plain_run(
    job: Job, ranks: list[dict[str, Any]], run: str
) -> None:
    for rank in replicas(ranks):
        for ours, plain in zip(rank[run]["metrics"], rank["metrics"], strict=True):
            # The policy term is a mean near 0 of values near 1.
            assert ours == pytest.approx(plain, rel=ROUNDING, abs=1e-6)


@with_every_layout
@with_and_without_padding
def test_the_number_of_updates_depends_on_prompts_alone(
    job: Job, ranks: list[dict[str, Any]], run: str
) -> None:
    system = job.parameters["system"]
    num_steps = PROMPTS[system] // PROMPTS_PER_STEP[system]
    for rank in ranks:
        assert rank[run]["updates"] == len(rank[run]["micro_batches"]) == num_steps
        # What Megatron's learning-rate schedule advances by: real samples, turns of this batch.
        assert rank[run]["trained"] == rank["step_sizes"]
    assert len({tuple(rank[run]["micro_batches"]) for rank in ranks}) == 1
    assert min(ranks[0][run]["micro_batches"]) > 1


def test_the_batches_differ_in_turns() -> None:
    sizes = [len(multi_turn_batch("verl", seed)["tokens"]) for seed in (0, 1)]
    assert sizes[0] != sizes[1]
    skyrl = multi_turn_batch("skyrl", 0)
    assert len(skyrl["tokens"]) == 3509
    turns = [skyrl["trajectory_ids"].count(trajectory) for trajectory in range(256 * 5)]
    assert (min(turns), max(turns)) == (1, 5)


@with_every_layout
@with_and_without_padding
def test_steps_hold_whole_prompts(job: Job, ranks: list[dict[str, Any]], run: str) -> None:
    system = job.parameters["system"]
    batch = multi_turn_batch(system, job.parameters["seed"])
    held = replicas(ranks)
    seen: set[str] = set()
    for step, size in enumerate(held[0]["step_sizes"]):
        indices = [i for replica in held for i in replica[run]["indices"][step]]
        uids = {uid for replica in held for uid in replica[run]["uids"][step]}
        assert len(indices) == len(set(indices)) == size
        assert len(uids) == PROMPTS_PER_STEP[system]
        assert size == sum(uid in uids for uid in batch["uids"])  # none of them elsewhere
        assert not uids & seen
        seen |= uids
    assert len(seen) == PROMPTS[system]


@with_every_layout
def test_padding_makes_the_shares_equal(job: Job, ranks: list[dict[str, Any]]) -> None:
    held = replicas(ranks)
    unequal = 0
    for step, size in enumerate(held[0]["step_sizes"]):
        unpadded, padded = (
            [replica[run]["num_samples"][step] for replica in held]
            for run in ("unpadded", "padded")
        )
        assert sum(unpadded) == size
        assert len(set(padded)) == 1
        unequal += len(set(unpadded)) > 1 or sum(padded) > size
        system = job.parameters["system"]
        if system != "skyrl":
            multiple = PROMPTS_PER_STEP[system] * TRAJECTORIES_PER_PROMPT[system]
            assert sum(padded) % multiple == 0
            assert 0 <= sum(padded) - size < multiple
        else:
            assert padded[0] == max(unpadded)
    assert unequal


@with_every_layout
@with_and_without_padding
def test_every_output_is_its_samples_own(job: Job, ranks: list[dict[str, Any]], run: str) -> None:
    for rank in ranks:
        if not rank["last_stage"]:
            assert rank[run]["num_outputs"] == 0
            continue
        assert rank[run]["num_outputs"] == sum(rank[run]["num_samples"])
        assert rank[run]["log_probs"] < ROUNDING


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_the_learning_rate_depends_on_prompts_alone(job: Job, ranks: list[dict[str, Any]]) -> None:
    """With Megatron's scheduler, which took the turns of a step for samples."""
    for rank in ranks:
        rates, consumed = zip(*rank["prompts"], strict=True)
        assert rates == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)
        assert consumed == (4, 4, 4, 4)


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_a_step_of_samples_counts_as_the_global_batch_size(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    """The last, short one too: Megatron's decay is so many steps of a whole batch."""
    number = -(-8 * job.parameters["turns"] // 3)
    for rank in ranks:
        rates, consumed = zip(*rank["samples"], strict=True)
        left = [1e-3 * (number - 1 - step) / number for step in range(number)]
        assert rates == pytest.approx(left, abs=1e-9)
        assert consumed == (3,) * number


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_what_a_step_counts_as_is_never_guessed(job: Job, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        nothing_said, too_small, no_integer = rank["refused"]
        assert nothing_said.startswith("ConfigError: no global_batch_size says how many samples")
        assert "set increment to what lr_decay_steps counts a step as" in nothing_said
        assert "increment must be 1 or more, got 0" in too_small
        assert "increment must be an integer, got 2.5" in no_integer


@pytest.mark.parametrize("job", UNTRAINED, ids=str)
def test_a_step_without_real_samples_changes_nothing(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Adam's momentum moved the weights by 6.6e-3, and padding samples a router's bias."""
    for rank in ranks:
        for case in ("empty step", "padding", "padding on one rank", "no samples"):
            assert rank[case] == {"updated": False, "consumed": 0, "loss": 0.0, "changed": []}, case
        # Masked samples are samples: unpacked, too, their step is an update.
        for case in ("masked", "real"):
            assert rank[case] == {"updated": True, "consumed": 5}, case
        assert rank["moved"] > 10
