"""The guarantees of advantages, against plain Python; of several ranks: test_ranks.py."""

from __future__ import annotations

import statistics as plain
from typing import Any

import pytest
import torch
from batch_cases import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_worker import STEPS, plain_zscores, turns_of

from mcore_batching.rl import compute_advantages, pad_batch
from mcore_batching.rl.advantages import ESTIMATORS

# float32 results of float64 sums.
ROUNDING = {"rel": 1e-5, "abs": 1e-5}


def plain_estimate(estimator: str, own: int, rewards: list[float]) -> float:
    """The textbook's formula for one trajectory of a group."""
    reward = rewards[own]
    if len(rewards) == 1:
        return 0.0
    if estimator == "grpo":
        return (reward - plain.fmean(rewards)) / (plain.stdev(rewards) + 1e-6)
    if estimator == "rloo":
        return reward - plain.fmean([r for i, r in enumerate(rewards) if i != own])
    assert estimator in ("dr_grpo", "reinforce_baseline")
    return reward - plain.fmean(rewards)


@st.composite
def multi_turn(draw: st.DrawFn) -> dict[str, Any]:
    """Turns of trajectories of groups, mixed, with padding samples in between."""
    turns = [
        (uid, trajectory)
        for uid in range(draw(st.integers(1, 3)))
        for trajectory in range(draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    order = draw(st.permutations(turns))
    shapes = [
        (r + 2, r)
        for r in draw(st.lists(st.integers(0, 4), min_size=len(order), max_size=len(order)))
    ]
    batch = {
        **make_samples(shapes, draw(st.integers(0, 9))),
        "rewards": draw(
            st.lists(st.sampled_from([0.0, 1.0, -2.5]), min_size=len(order), max_size=len(order))
        ),
        "uids": [f"prompt {uid}" for uid, _ in order],
        # Numbered within the prompt, as some frameworks do.
        "trajectory_ids": [trajectory for _, trajectory in order],
    }
    return pad_batch(batch, draw(st.integers(1, 7)), pad_token_id=0)


@settings(max_examples=120)
@given(multi_turn(), st.sampled_from(sorted(ESTIMATORS)), st.sampled_from(["last", "sum"]))
def test_step_wise_advantages_against_a_slow_statement_of_the_rule(
    batch: dict[str, Any], estimator: str, outcome: Any
) -> None:
    found = compute_advantages(batch, estimator, step_wise=True, outcome=outcome, normalize=False)
    samples = range(len(batch["tokens"]))
    for sample in samples:
        length = batch["response_lengths"][sample]
        assert (found[sample].shape, found[sample].dtype) == ((length,), torch.float32)
        if batch["is_padding"][sample]:
            assert found[sample].tolist() == [0.0] * length
            continue
        rewards, own = [], -1
        for other in samples:
            if batch["uids"][other] != batch["uids"][sample] or batch["is_padding"][other]:
                continue
            turns = [
                turn
                for turn in samples
                if batch["uids"][turn] == batch["uids"][sample]
                and batch["trajectory_ids"][turn] == batch["trajectory_ids"][other]
            ]
            if other != turns[0]:
                continue
            if sample in turns:
                own = len(rewards)
            each = [batch["rewards"][turn] for turn in turns]
            rewards.append(each[-1] if outcome == "last" else sum(each))
        advantage = plain_estimate(estimator, own, rewards)
        expected = [advantage * (mask != 0) for mask in batch["loss_masks"][sample].tolist()]
        assert found[sample].tolist() == pytest.approx(expected, **ROUNDING)


def two_trajectories() -> dict[str, Any]:
    """Three turns that end well, one that does not."""
    return {
        **make_samples([(6, 4), (5, 2), (3, 1), (7, 3)]),
        "loss_masks": [torch.tensor([1, 1, 0, 0]), torch.ones(2), torch.ones(1), torch.ones(3)],
        "rewards": [0.0, 0.0, 1.0, 0.0],
        "uids": ["a"] * 4,
        "trajectory_ids": [5, 5, 5, 6],
    }


def test_skyrl_and_verl_fault_padding_samples_in_group_statistics() -> None:
    batch = two_trajectories()
    padded = pad_batch(batch, 16, pad_token_id=0)
    # Even where somebody gave a padding sample the uid of a real group.
    padded["uids"][4:] = ["a"] * 12
    for estimator in ESTIMATORS:
        expected = compute_advantages(batch, estimator, step_wise=True, normalize=True)
        found = compute_advantages(padded, estimator, step_wise=True, normalize=True)
        assert all(map(torch.equal, found, expected))
        assert all(each.tolist() == [0.0] for each in found[4:])


def test_the_last_turn_is_the_last_by_number_where_there_are_numbers() -> None:
    batch = {**two_trajectories(), "round_number": [1, 3, 2, 1], "rewards": [0.0, 8.0, 1.0, 0.0]}
    assert compute_advantages(batch, "dr_grpo", step_wise=True)[0][0] == 4.0
    # Where all numbers are 0 nobody counted the turns.
    for uncounted in ([0] * 4, None):
        batch["round_number"] = uncounted
        assert compute_advantages(batch, "dr_grpo", step_wise=True)[0][0] == 0.5
    summed = compute_advantages(batch, "dr_grpo", step_wise=True, outcome="sum")
    assert summed[0][0] == 4.5


def test_trajectories_and_single_sequences() -> None:
    """Ids of tensors count by value; without ids a sample is a trajectory."""
    batch = two_trajectories()
    expected = compute_advantages(batch, step_wise=True)
    ids = {"trajectory_ids": torch.tensor([5, 5, 5, 6]), "uids": torch.tensor([3] * 4)}
    assert all(map(torch.equal, compute_advantages(batch | ids, step_wise=True), expected))
    found = compute_advantages(batch | {"trajectory_ids": None}, "rloo")
    assert [each.tolist()[0] for each in found] == pytest.approx([-1 / 3, -1 / 3, 1, -1 / 3])
    batch["trajectory_ids"] = [0, 1, 2, 3]
    for step_wise in (True, False):
        again = compute_advantages(batch, "rloo", step_wise=step_wise)
        assert all(map(torch.equal, again, found))


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@given(rewards=st.lists(st.floats(-50, 50), min_size=2, max_size=8))
@settings(max_examples=40)
def test_estimators_are_the_textbooks_formulas(estimator: str, rewards: list[float]) -> None:
    expected = [plain_estimate(estimator, i, rewards) for i in range(len(rewards))]
    # Up to 1e-8 off where all rewards are equal but for rounding, over a deviation of 1e-6.
    assert ESTIMATORS[estimator](rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("rewards", [None, [3e7, 3e7, 3e7 + 4, 0.0, 0.0, 9.0]])
@pytest.mark.parametrize("steps", [STEPS, [[3, 1], [0]], None])
def test_normalisation_is_by_step(rewards: Any, steps: Any) -> None:
    """Also of large values, where differences of sums lose their digits; without steps all samples
    are one."""
    batch = turns_of(0) | ({"rewards": rewards} if rewards else {})
    found = compute_advantages(batch, "dr_grpo", step_wise=True, steps=steps, normalize=True)
    for step in steps or [list(range(6))]:
        for (_, i), expected in plain_zscores([batch], step).items():
            assert found[i].tolist() == pytest.approx(expected, **ROUNDING)


def test_steps_and_the_samples_of_none() -> None:
    batch = turns_of(0)
    found = compute_advantages(batch, "dr_grpo", step_wise=True, steps=STEPS, normalize=True)
    none = compute_advantages(batch, "dr_grpo", step_wise=True, steps=[], normalize=True)
    assert not torch.cat(none).any()
    default = compute_advantages(batch, "reinforce_baseline", step_wise=True, steps=STEPS)
    assert all(map(torch.equal, default, found))
    once = (iter(step) for step in STEPS)
    found_once = compute_advantages(batch, "reinforce_baseline", step_wise=True, steps=once)
    assert all(map(torch.equal, found_once, found))
    partly = compute_advantages(batch, "dr_grpo", step_wise=True, steps=STEPS[1:], normalize=True)
    assert all(map(torch.equal, partly[3:], found[3:]))
    # Not as they are: they would be on another scale than those beside them.
    assert not torch.cat(partly[:3]).any()


def test_advantages_are_where_the_masks_are() -> None:
    """As on a GPU: what is made without naming a device is on another one than the masks."""
    expected = compute_advantages(turns_of(0), step_wise=True, steps=[*STEPS, []], normalize=True)
    batch = turns_of(0)
    with torch.device("meta"):
        found = compute_advantages(batch, step_wise=True, steps=[*STEPS, []], normalize=True)
    assert all(map(torch.equal, found, expected))
    # A sample that is kept or sent by itself takes no other along.
    assert [each.untyped_storage().nbytes() for each in found] == [4 * len(each) for each in found]
