"""Guarantees of the loss shares."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import batch_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    PackedMicroBatch,
    StepTotals,
    gather_response,
    make_placeholder,
    prompt_mean,
    sample_mean,
    token_mean,
    token_sum,
    trajectory_mean,
)
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals


def make_samples(shapes: list[tuple[int, int]], seed: int) -> dict[str, list[Any]]:
    """Samples of (total, response) tokens; masks with holes, some samples padding."""
    generator = random.Random(seed)
    tags = [generator.random() < 0.2 for _ in shapes]
    # Trajectories are numbered from 0 in each prompt, as some frameworks do; padding has no ids.
    ids = [(generator.randrange(2), generator.randrange(2)) for _ in shapes]
    groups = {
        name: [None if tag else each[place] for each, tag in zip(ids, tags, strict=True)]
        for place, name in enumerate(("uids", "trajectory_ids"))
    }
    return batch_cases.make_samples(shapes, seed) | {"is_padding": tags} | groups


def make_row(
    samples: dict[str, list[Any]], indices: tuple[int, ...], size: int = 1, rank: int = 0
) -> PackedMicroBatch:
    if indices:
        chosen = {key: [values[i] for i in indices] for key, values in samples.items()}
    else:
        chosen = make_placeholder(DEFAULT_SCHEMA, list(samples), samples)
    return batch_cases.pack_on_all_ranks(chosen, size, is_placeholder=not indices)[rank]


def plain_means(samples: dict[str, list[Any]], values: list[torch.Tensor]) -> dict[str, float]:
    """The means, written down sample by sample: each over groups of the mean over a group."""
    names = "token", "sample", "trajectory", "prompt"
    groups: dict[str, dict[Any, list[float]]] = {name: {} for name in names}
    for i, value in enumerate(values):
        if samples["is_padding"][i]:
            continue
        mask = samples["loss_masks"][i].clone()
        if samples["total_lengths"][i] == samples["response_lengths"][i]:
            mask[:1] = 0
        prompt = samples["uids"][i]
        keys = 0, i, (prompt, samples["trajectory_ids"][i]), prompt
        for name, key in zip(names, keys, strict=True):
            sums = groups[name].setdefault(key, [0.0, 0.0])
            sums[0] += float((value * mask)[mask != 0].sum())
            sums[1] += float(mask.sum())
    means = {
        name: sum(total / (count or 1.0) for total, count in each.values()) / (len(each) or 1)
        for name, each in groups.items()
    }
    trained = [total / count for total, count in groups["sample"].values() if count]
    return means | {
        "sum": sum(total for total, _ in groups["sample"].values()) / 7.0,
        "trained": sum(trained) / (len(trained) or 1),
    }


SHAPES = st.lists(
    st.integers(1, 12).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total))),
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 999))
def test_shares_add_up_to_the_mean_whatever_the_packing(
    shapes: list[tuple[int, int]], size: int, placeholders: int, seed: int
) -> None:
    samples = make_samples(shapes, seed)
    generator = random.Random(seed)
    values = [torch.tensor([generator.gauss(0, 1) for _ in range(n)]) for _, n in shapes]
    for value, mask in zip(values, samples["loss_masks"], strict=True):
        value[mask == 0] = math.inf  # what is masked does no harm
    order = list(range(len(shapes)))
    generator.shuffle(order)
    cut = generator.randint(0, len(order))
    packing = [tuple(part) for part in (order[:cut], order[cut:]) if part] + [()] * placeholders
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    totals = step_totals(columns.taken(order))[0]
    means: dict[str, Callable[..., torch.Tensor]] = {
        "token": token_mean,
        "sample": sample_mean,
        "trained": functools.partial(sample_mean, over_trained_samples=True),
        "trajectory": trajectory_mean,
        "prompt": prompt_mean,
        "sum": functools.partial(token_sum, divisor=7.0),
    }
    sums = dict.fromkeys(means, 0.0)
    tokens = 0
    for rank in range(size):
        for indices in packing:
            row = make_row(samples, indices, size, rank)
            mine = [values[i] for i in indices] or [torch.zeros(0)]
            for name, mean in means.items():
                sums[name] += float(mean(mine, row, totals))
            tokens += row.owned_num_tokens
    assert sums == pytest.approx(plain_means(samples, values), abs=1e-5)
    assert tokens == totals.num_tokens
    assert step_totals(columns.taken([])) == (StepTotals(), [0.0])
    assert totals.num_samples == samples["is_padding"].count(False)


def test_placeholder_counts_nothing_and_stays_on_the_graph() -> None:
    samples = make_samples([(4, 2)], seed=1)
    placeholder = make_row(samples, ())
    logits = torch.ones(3, requires_grad=True)
    totals = StepTotals(num_samples=3, num_trained_samples=2, num_tokens=5, token_weight=5.0)
    for mean in (token_mean, sample_mean, trajectory_mean, prompt_mean, token_sum):
        share = mean([logits[:0]], placeholder, totals)
        assert share.item() == 0.0
        (gradient,) = torch.autograd.grad(share, logits)
        assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_values_that_were_gathered_are_read_as_the_list_that_holds_them_now() -> None:
    samples = make_samples([(4, 2), (5, 3)], seed=1) | {"is_padding": [False, False]}
    samples["loss_masks"] = [torch.ones(2), torch.ones(3)]
    row, turned = make_row(samples, (0, 1)), make_row(samples, (1, 0))
    totals = StepTotals(token_weight=1.0)
    values = gather_response(torch.arange(9.0), row)
    assert token_mean(values, row, totals).item() == 1 + 2 + 5 + 6 + 7
    with pytest.raises(ValueError, match=r"sample 0 .*expected values of shape \[3\].*got \[2\]"):
        token_mean(values, turned, totals)
    values[1] = torch.ones(3)
    assert token_mean(values, row, totals).item() == 1 + 2 + 3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20))
def test_padding_samples_do_not_show_in_the_last_bit(seed: int, more: int) -> None:
    shapes = [(random.Random(seed).randint(50, 90), 50) for _ in range(3)] + [(9, 7)] * more
    samples = make_samples(shapes, seed) | {"is_padding": [False] * 3 + [True] * more}
    values = [torch.randn(n, generator=torch.Generator().manual_seed(seed)) for _, n in shapes]
    shares = []
    for indices in ((0, 1, 2), range(3 + more)):
        row = make_row(samples, tuple(indices))
        totals = step_totals(row.fields)[0]
        mine = [values[i] for i in indices]
        shares.append([mean(mine, row, totals).item() for mean in (token_mean, sample_mean)])
    assert shares[0] == shares[1]


@pytest.mark.parametrize(
    ("masks", "num_tokens", "trained"),
    [
        *(([[weight] * 100_000, [0.0, weight]], 100_001, 2) for weight in (0.1, 1.0, 3.0)),
        # They add up to their number, the small one being lost in single precision.
        ([[64.0, 1e-7], [0.5] * 124], 126, 2),
        # One is far below the others.
        ([[1.0] * 4, [1e-30], [0.0]], 5, 2),
    ],
)
def test_sums_of_weights_are_exact_whatever_they_are(
    masks: list[list[float]], num_tokens: int, trained: int
) -> None:
    samples = batch_cases.make_samples([(len(mask) + 1, len(mask)) for mask in masks])
    samples |= {"loss_masks": [*map(torch.tensor, masks)], "uids": [*range(len(masks))]}
    totals, (weights,) = step_totals(Columns.read(samples, DEFAULT_SCHEMA))
    assert (totals.num_tokens, totals.num_trained_samples) == (num_tokens, trained)
    sums = [math.fsum(map(float, torch.tensor(mask))) for mask in masks]
    assert weights == totals.token_weight == pytest.approx(math.fsum(sums), rel=1e-12)
    assert totals.prompt_weights == pytest.approx(dict(enumerate(sums)), rel=1e-12)
