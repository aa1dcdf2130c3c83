"""A loss that is a mean over its micro-batch is told, one that is a share of the step's is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    PackedMicroBatch,
    StepTotals,
    pack,
    sample_mean,
    step_totals,
    token_mean,
)
from mcore_batching.megatron.local_means import LocalMeans

Loss = Callable[[list[Tensor], PackedMicroBatch, StepTotals], Tensor]


def row(*responses: int) -> PackedMicroBatch:
    """A micro-batch of samples with these responses, the last token of each left out."""
    return pack(
        {
            "tokens": [list(range(n + 1)) for n in responses],
            "total_lengths": [n + 1 for n in responses],
            "response_lengths": list(responses),
            "loss_masks": [[1.0] * (n - 1) + [0.0] for n in responses],
        },
        schema=DEFAULT_SCHEMA,
        sample_indices=range(len(responses)),
    )


ROWS = (row(4, 6), row(3, 5), row(8), row(2, 2, 9))
SINGLE = (row(4), row(6), row(9))


def masks(row: PackedMicroBatch) -> Tensor:
    return torch.cat(
        row["loss_masks"]
        if torch.is_tensor(row["loss_masks"][0])
        else [torch.tensor(mask) for mask in row["loss_masks"]]
    )


def warned(loss: Loss, rows: Any = ROWS) -> bool:
    """True if a step with this loss warns."""
    means = LocalMeans(step_totals(rows))
    for each in rows:
        values = [torch.rand(n, requires_grad=True) * 2 for n in each.response_lengths]
        means.saw(loss(values, each, means.totals), each)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        means.warn()
    return any("never reads the step's totals" in str(each.message) for each in caught)


def cat(values: list[Tensor]) -> Tensor:
    return torch.cat(values)


MEANS: dict[str, Loss] = {
    "of all tokens": lambda v, row, totals: cat(v).mean(),
    "of policy and KL": lambda v, row, totals: -(cat(v).exp() * 3).mean() + 0.1 * cat(v).mean(),
    "over trained tokens": lambda v, row, totals: (cat(v) * masks(row)).sum() / masks(row).sum(),
    "with an epsilon": lambda v, row, totals: (
        -(cat(v) * masks(row)).sum() / (masks(row).sum().clamp(min=1) + 1e-8)
    ),
    "over chosen tokens": lambda v, row, totals: cat(v)[masks(row).bool()].mean(),
    "over samples": lambda v, row, totals: torch.stack([each.mean() for each in v]).mean(),
    "over a row of tokens": lambda v, row, totals: cat(v)[None].mean(-1).mean().double(),
}
SHARES: dict[str, Loss] = {
    "token mean": token_mean,
    "sample mean": sample_mean,
    "over the totals": lambda v, row, totals: cat(v).sum() / totals.num_tokens,
    "by a weight over the totals": lambda v, row, totals: (
        cat(v).mean() * (len(cat(v)) / totals.token_weight)
    ),
    "a sum": lambda v, row, totals: cat(v).sum(),
    "over a constant": lambda v, row, totals: (cat(v) * masks(row)).sum() / 1000.0,
    "a mean by its weight": lambda v, row, totals: cat(v).mean() * (len(cat(v)) / 1000.0),
    "weights in the mean": lambda v, row, totals: (cat(v) * len(cat(v)) / 1000.0).mean(),
    "means of samples over a constant": lambda v, row, totals: (
        sum((each.mean() for each in v), torch.zeros(())) / 8
    ),
    "the same, stacked": lambda v, row, totals: torch.stack([each.mean() for each in v]).sum() / 8,
    "two sums": lambda v, row, totals: cat(v).exp().sum() / 8 + 0.1 * cat(v).sum() / 8,
    "nothing": lambda v, row, totals: cat(v).mean() * 0.0,
    "no gradient": lambda v, row, totals: torch.zeros(()),
}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_over_the_micro_batch_is_told(loss: Loss) -> None:
    assert warned(loss)


@pytest.mark.parametrize("loss", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("rows", [ROWS, SINGLE, ROWS[:2], ROWS[:1]], ids=len)
def test_a_share_is_not(loss: Loss, rows: Any) -> None:
    assert not warned(loss, rows)


def test_what_cannot_be_told_apart_is_let_pass() -> None:
    """Micro-batches of one sample: means of samples over a constant look the same."""
    assert not warned(MEANS["of all tokens"], SINGLE)
    assert not warned(MEANS["of all tokens"], ROWS[:1])


def test_who_reads_the_totals_is_let_pass() -> None:
    assert not warned(lambda v, row, totals: cat(v).mean() + 0.0 * totals.num_samples)


def test_watched_totals_are_the_totals() -> None:
    totals = step_totals(ROWS)
    watched = LocalMeans(totals).totals
    assert watched == totals
    assert totals == watched
    assert hash(watched) == hash(totals)
    assert watched + totals == totals + totals
