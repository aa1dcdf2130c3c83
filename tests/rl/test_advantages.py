"""The guarantees of advantages, against plain Python; what three processes with gloo make of
advantages and metrics: those of all ranks together, or the same error on every rank; and what the
helpers of reinforcement learning refuse (the rows of `REFUSALS.md`)."""

from __future__ import annotations

import math
import pickle
import re
import statistics
from collections.abc import Callable
from typing import Any

import batch_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_cases import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals
from spawned import reports_of_group
from torch import tensor

from mcore_batching import batch as batching
from mcore_batching import rl
from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.rl import LeftPadded, compute_advantages, left_pad, pad_batch, sample_metrics
from mcore_batching.rl.advantages import ESTIMATORS
from mcore_batching.rl.real_samples import real_indices

SIZE = 3
STEPS = [[0, 1, 2], [3, 4, 5]]
# float32 results of float64 sums.
ROUNDING = {"rel": 1e-5, "abs": 1e-5}


def turns_of(rank: int, *, masked: bool = False) -> dict[str, Any]:
    """Two steps of one group each; turns of two or three trajectories, and a padding sample. Rank 2
    has no samples."""
    lengths = [2, 3, 1, 4, 2, 1]
    masks = [torch.ones(length) for length in lengths]
    masks[1][0] = 0
    batch = {
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
        "rewards": [[0.0, 3.0, 1.0, 2.0, 5.0, 9.0], [0.0, 7.0, 4.0, 4.5, 1.0, 9.0]][rank % 2],
        "uids": [f"{rank}a", f"{rank}a", f"{rank}a", f"{rank}b", f"{rank}b", "padding"],
        "trajectory_ids": [0, 0, 1, 2, 3, 4],
        "is_padding": [False] * 5 + [True],
        "loss_masks": [mask * (not masked) for mask in masks],
    }
    return batch if rank < 2 else {key: [] for key in batch}


def plain_zscores(
    parts: list[dict[str, Any]], step: list[int]
) -> dict[tuple[int, int], list[float]]:
    """By rank and sample of a step, the z-scores of its advantages over all ranks' real samples."""
    raw = [compute_advantages(part, "dr_grpo", step_wise=True) for part in parts]
    kept = {
        (rank, i): (part["loss_masks"][i] != 0) & (not part["is_padding"][i])
        for rank, part in enumerate(parts)
        for i in step
    }
    values = [v for (rank, i), mask in kept.items() for v in raw[rank][i][mask].tolist()] or [0.0]
    mean, scale = statistics.fmean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
    return {
        (rank, i): [
            (value - mean) / scale if is_kept else 0.0
            for value, is_kept in zip(raw[rank][i].tolist(), mask.tolist(), strict=True)
        ]
        for (rank, i), mask in kept.items()
    }


def plain_estimate(estimator: str, own: int, rewards: list[float]) -> float:
    """The textbook's formula for one trajectory of a group."""
    reward = rewards[own]
    if len(rewards) == 1:
        return 0.0
    if estimator == "grpo":
        return (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    if estimator == "rloo":
        return reward - statistics.fmean([r for i, r in enumerate(rewards) if i != own])
    return reward - statistics.fmean(rewards)


@st.composite
def multi_turn(draw: st.DrawFn) -> dict[str, Any]:
    """Turns of trajectories of groups, mixed, with padding samples in between."""
    turns = [
        (uid, trajectory)
        for uid in range(draw(st.integers(1, 3)))
        for trajectory in range(draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    order, count = draw(st.permutations(turns)), len(turns)
    responses = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    rewards = st.sampled_from([0.0, 1.0, -2.5]) | st.floats(-50, 50)
    batch = {
        **make_samples([(r + 2, r) for r in responses], draw(st.integers(0, 9))),
        "rewards": draw(st.lists(rewards, min_size=count, max_size=count)),
        "uids": [f"prompt {uid}" for uid, _ in order],
        # Numbered within the prompt, as some frameworks do.
        "trajectory_ids": [trajectory for _, trajectory in order],
        # Where all numbers are 0 nobody counted the turns.
        "round_number": draw(st.sampled_from([None, [0] * count]) | st.permutations(range(count))),
    }
    padded = pad_batch(batch, draw(st.integers(1, 7)), pad_token_id=0)
    if draw(st.booleans()):  # somebody gave padding samples the uid of a real group
        padded["uids"][count:] = ["prompt 0"] * (len(padded["uids"]) - count)
    return padded


@settings(max_examples=120)
@given(multi_turn(), st.sampled_from(sorted(ESTIMATORS)), st.sampled_from(["last", "sum"]))
def test_step_wise_advantages_against_a_slow_statement_of_the_rule(
    batch: dict[str, Any], estimator: str, outcome: Any
) -> None:
    """Padding samples are in no group, as they were in SkyRL's and verl's statistics."""
    found = compute_advantages(batch, estimator, step_wise=True, outcome=outcome, normalize=False)
    groups: dict[Any, dict[Any, list[tuple[int, float]]]] = {}
    numbers = batch["round_number"] or [0] * len(found)
    for i, is_padding in enumerate(batch["is_padding"]):
        if not is_padding:
            trajectories = groups.setdefault(batch["uids"][i], {})
            turns = trajectories.setdefault(batch["trajectory_ids"][i], [])
            turns.append((numbers[i], batch["rewards"][i]))
    for i, is_padding in enumerate(batch["is_padding"]):
        mask, advantage = batch["loss_masks"][i], 0.0
        if not is_padding:
            trajectories = groups[batch["uids"][i]]
            own = list(trajectories).index(batch["trajectory_ids"][i])
            each = [sorted(turns, key=lambda turn: turn[0]) for turns in trajectories.values()]
            last = [turns[-1][1] for turns in each]
            rewards = last if outcome == "last" else [sum(r for _, r in turns) for turns in each]
            advantage = plain_estimate(estimator, own, rewards)
        expected = [advantage * (weight != 0) for weight in mask.tolist()]
        assert found[i].tolist() == pytest.approx(expected, **ROUNDING)
        assert found[i].dtype == torch.float32


def test_trajectories_and_single_sequences() -> None:
    """Ids of tensors count by value; without ids a sample is a trajectory."""
    batch = turns_of(0)
    expected = compute_advantages(batch, step_wise=True)
    tensors = {"uids": torch.tensor([3, 3, 3, 4, 4, 5])}
    tensors["trajectory_ids"] = torch.tensor(batch["trajectory_ids"])
    assert all(map(torch.equal, compute_advantages(batch | tensors, step_wise=True), expected))
    found = compute_advantages(batch | {"trajectory_ids": None}, "rloo")
    assert [each[-1].item() for each in found] == pytest.approx([-2, 2.5, -0.5, -3, 3, 0])
    batch["trajectory_ids"] = [*range(6)]
    for step_wise in (True, False):
        again = compute_advantages(batch, "rloo", step_wise=step_wise)
        assert all(map(torch.equal, again, found))


@pytest.mark.parametrize("rewards", [None, [3e7, 3e7, 3e7 + 4, 0.0, 0.0, 9.0]])
@pytest.mark.parametrize("steps", [STEPS, [[3, 1], [0]], STEPS[1:], [], None])
@pytest.mark.parametrize("by", [("dr_grpo", True), ("reinforce_baseline", None)])
def test_normalisation_is_by_step(rewards: Any, steps: Any, by: Any) -> None:
    """Also of large values, where differences of sums lose their digits; without steps all samples
    are one. Samples of no step are 0: as they are they would be on another scale."""
    batch, (estimator, normalize) = turns_of(0) | ({"rewards": rewards} if rewards else {}), by
    # They may come one by one.
    given = steps if normalize or steps is None else (iter(step) for step in steps)
    found = compute_advantages(batch, estimator, step_wise=True, steps=given, normalize=normalize)
    expected = {i: [0.0] * len(each) for i, each in enumerate(found)}
    for step in [list(range(6))] if steps is None else steps:
        expected |= {i: values for (_, i), values in plain_zscores([batch], step).items()}
    for i, values in expected.items():
        assert found[i].tolist() == pytest.approx(values, **ROUNDING)


def test_advantages_are_where_the_masks_are() -> None:
    """As on a GPU: what is made without naming a device is on another one than the masks."""
    expected = compute_advantages(turns_of(0), step_wise=True, steps=[*STEPS, []], normalize=True)
    batch = turns_of(0)
    with torch.device("meta"):
        found = compute_advantages(batch, step_wise=True, steps=[*STEPS, []], normalize=True)
    assert all(map(torch.equal, found, expected))
    # A sample that is kept or sent by itself takes no other along.
    assert [each.untyped_storage().nbytes() for each in found] == [4 * len(each) for each in found]


def batch_of(uids: Any, **fields: Any) -> dict[str, Any]:
    """Samples of one response token with these uids."""
    count = len(uids)
    return {
        "total_lengths": [2] * count,
        "response_lengths": [1] * count,
        "rewards": [float(i) for i in range(count)],
        "uids": uids,
        "trajectory_ids": range(count),
    } | fields


WHOLE = [batch_of(uids) for uids in (["a", "a", "b"], ["c", "d", "c"], ["e"])]
SPLIT = [batch_of(uids) for uids in (["a", "b"], ["c"], ["b", "b", "c"])]
BATCHES: dict[str, list[dict[str, Any]]] = {
    "whole": WHOLE,
    "padding sample with a real uid": [
        batch_of(["a", "b"]),
        batch_of(["c", "a"], is_padding=[False, True]),
        batch_of(["b"], is_padding=[True]),
    ],
    "a rank has no samples": [batch_of([]), batch_of(["a"]), batch_of(["b"])],
    "split": SPLIT,
    "integers": [batch_of(torch.tensor([7, 8])), batch_of([9]), batch_of([8, 10])],
    "many split": [batch_of(list(range(9))) for _ in range(SIZE)],
    "no uids": [batch_of(["a"]), batch_of(["b"]) | {"uids": None}, batch_of(["c"])],
    "no uid of a sample": [batch_of(["a"]), batch_of(["b"]), batch_of([None])],
    "uids that do not travel": [batch_of([lambda: 0]), batch_of(["b"]), batch_of(["c"])],
}
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "estimator": [{}, {"estimator": "rloo"}, {}],
    "normalize": [{}, {}, {"normalize": True}],
    "outcome": [{}, {"outcome": "sum"}, {}],
    "step_wise": [{"step_wise": True}, {}, {}],
}
METRICS = [
    batch_of(["a"] * 3, rewards=[4.0, 100.0, 1.0], is_padding=[False, True, False]),
    batch_of(["b"] * 2, rewards=[-100.0, 7.0], is_padding=[True, False]),
    batch_of([]),
]


def report(rank: int, _size: int) -> dict[str, Any]:
    """What each call on a rank came to, or its error with what survives pickling; the same calls on
    every rank."""
    last_two = dist.new_group([1, 2])

    def called(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **{"group": dist.group.WORLD} | options)
        except ValueError as error:
            again = pickle.loads(pickle.dumps(error))
            return f"{type(error).__name__}: {again}"

    def normalized(batch: dict[str, Any], steps: Any = STEPS) -> Any:
        own = steps if rank < 2 else [[] for _ in steps]
        options = {"step_wise": True, "normalize": True, "steps": own}
        return called(compute_advantages, batch, "dr_grpo", **options)

    def metrics(fields: Any = ("rewards",), **changed: Any) -> Any:
        fields = (list, iter, tuple)[rank](fields)  # the same names, in any form
        return called(sample_metrics, METRICS[rank] | (changed if rank == 1 else {}), fields)

    all_padding = {"is_padding": [True] * len(METRICS[rank]["uids"])}
    return {
        "both": normalized(turns_of(rank)),
        "one rank is masked": normalized(turns_of(rank, masked=rank == 1)),
        "all masked": normalized(turns_of(rank, masked=True)),
        "field": normalized(turns_of(rank) | ({} if rank else {"rewards": None})),
        "number of steps": normalized(turns_of(rank), STEPS[: 2 - rank % 2]),
        "alone": called(compute_advantages, SPLIT[rank], group=None),
        "of two ranks": rank and called(compute_advantages, SPLIT[rank], group=last_two),
        "metrics": metrics(),
        "metrics of padding alone": called(
            sample_metrics, METRICS[rank] | all_padding, ["rewards"]
        ),
        "metrics of a field": metrics(rewards=None),
        "metrics of tags": metrics(is_padding=[False]),
        "metrics of other fields": metrics(["rewards", "total_lengths"][: 2 - rank % 2]),
        **{name: called(compute_advantages, each[rank]) for name, each in BATCHES.items()},
        **{
            name: called(compute_advantages, WHOLE[rank], **each[rank])
            for name, each in ARGUMENTS.items()
        },
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return reports_of_group(report, SIZE, tmp_path_factory.mktemp("ranks"))


ERRORS = {
    "split": r"SplitGroupError: groups are split: 'b' on ranks 0, 2; 'c' on ranks 1, 2; give a "
    r"uid's samples to one rank, and set group to data-parallel ranks alone",
    "integers": r"groups are split: 8 on ranks 0, 2; give",
    "many split": r"4 on ranks 0, 1, 2 and 4 more; give",
    "no uids": r"RankFailedError(.|\n)*rank 1: SchemaError: field 'uids': expected 1 values, one",
    "no uid of a sample": r"RankFailedError(.|\n)*rank 2: LengthError: .* must be hashable, got",
    "uids that do not travel": r"RankFailedError(.|\n)*rank 0: PicklingError: .*lambda",
    "estimator": r"rank 1: estimator is 'rloo', on rank 0 it is 'grpo'",
    "normalize": r"rank 2: normalize is True, on rank 0 it is False",
    "outcome": r"rank 1: outcome is 'sum', on rank 0 it is 'last'",
    "step_wise": r"rank 0: step_wise is True, on rank 1 it is False",
    "field": r"rank 0: SchemaError: field 'rewards': expected 6 values",
    "number of steps": r"rank 1: number of steps is 1, on rank 0 it is 2",
    "metrics of a field": r"rank 1: SchemaError: field 'rewards': expected 2 values, one per samp",
    "metrics of tags": r"rank 1: SchemaError: field 'is_padding': expected 2 values, one per sampl",
    "metrics of other fields": r"rank 1: fields is \['rewards'\], on rank 0 it is \['rewards', '",
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_is_the_same_error_on_every_rank(
    reports: list[dict[str, Any]], case: str
) -> None:
    first, *others = [report[case] for report in reports]
    assert all(other == first for other in others)
    assert re.search(ERRORS[case], first)


def test_ranks_are_named_as_the_job_counts_them(reports: list[dict[str, Any]]) -> None:
    assert all("'c' on ranks 1, 2; give" in own["of two ranks"] for own in reports[1:])


@pytest.mark.parametrize(
    "case", ["whole", "padding sample with a real uid", "a rank has no samples", "alone"]
)
def test_groups_that_are_whole_pass(reports: list[dict[str, Any]], case: str) -> None:
    """Padding samples are in no group, a rank without samples takes part, and a process alone has
    no other ranks."""
    assert all(isinstance(report[case], list) for report in reports)
    found = torch.cat(reports[1]["whole"])
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("masked", ["both", "one rank is masked", "all masked"])
def test_statistics_of_a_step_are_those_of_all_ranks(
    reports: list[dict[str, Any]], masked: str
) -> None:
    """Where all is masked there was a hang, or NaN."""
    parts = [
        turns_of(rank, masked=rank >= {"both": 2, "one rank is masked": 1}.get(masked, 0))
        for rank in (0, 1)
    ]
    assert reports[2][masked] == []
    for step in STEPS:
        for (rank, i), expected in plain_zscores(parts, step).items():
            assert reports[rank][masked][i].tolist() == pytest.approx(expected, rel=1e-5)


def test_metrics_are_those_of_the_real_samples_of_all_ranks(reports: list[dict[str, Any]]) -> None:
    expected = {"rewards/mean": 4.0, "rewards/max": 7.0, "rewards/min": 1.0}
    assert [report["metrics"] for report in reports] == [expected] * SIZE
    assert [report["metrics of padding alone"] for report in reports] == [{}] * SIZE


ONE = make_samples([(2, 1)])
TWO = make_samples([(3, 2), (2, 1)])
SIZES = {"data_parallel_size": 2, "samples_per_prompt": 8, "actor_mini_batch_size": 15}
NO_TOKENS: list[Any] = [True, 1.0, None, "1", math.nan, 2**63, tensor(True)]


def advantages(changed: dict[str, Any] | None = None, **options: Any) -> Any:
    return compute_advantages(turns_of(0) | (changed or {}), **{"step_wise": True} | options)


def blocks_of(**blocks: torch.Tensor) -> Any:
    """Blocks of two samples, of 2 and 4 tokens."""
    others = {"total_lengths": [2, 4], "response_lengths": [1, 2]}
    return LeftPadded(
        blocks=blocks,
        others=others,
        total_lengths=(2, 4),
        response_lengths=(1, 2),
        schema=DEFAULT_SCHEMA,
    )


def tagged(**fields: Any) -> dict[str, Any]:
    return make_samples([(2, 1)] * 3) | {"rewards": [1.0] * 3} | fields


def metrics_of(values: Any) -> Any:
    return sample_metrics({"total_lengths": [2, 2], "rewards": values}, ["rewards"])


test_refused = refusals(__file__, torch, batching, rl, batch_cases, globals())


def test_what_resembles_it_passes() -> None:
    rewards = [True, tensor([0.0]), 1.0, 0.0, 0.0, 0.0]
    compute_advantages(turns_of(0) | {"rewards": rewards}, step_wise=True, outcome="sum")
    for seven in (7, np.int64(7), tensor(7)):
        assert left_pad(TWO, pad_token_id=seven).tokens[1, 0] == 7
    assert real_indices(tagged(is_padding=[tensor(True), None, False])) == [1, 2]
