"""Masks of placeholders, as loss functions in the field use them."""

from __future__ import annotations

import pytest
import torch

from mcore_batching.integrations.slime.iterator import zero_count_mask


def denominators(mask: torch.Tensor) -> torch.Tensor:
    """What loss functions do with a loss mask: at least one token a sample."""
    return torch.clamp_min(mask.sum(), 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
def test_a_zero_count_mask_adds_nothing_to_a_sum_of_counts(dtype: torch.dtype) -> None:
    count = denominators(zero_count_mask(torch.zeros(0, dtype=dtype)))
    total = sum([count])
    assert type(total) is torch.Tensor
    assert total == 0
    assert sum([denominators(torch.ones(3)), count]) == 3
    assert torch.tensor([total, 2.0]).tolist() == [0.0, 2.0]
    accumulated = torch.zeros([], dtype=torch.int)  # what Megatron's schedules do with it
    accumulated += sum([denominators(zero_count_mask(torch.zeros(0, dtype=torch.int32)))])
    assert accumulated == 0
    assert torch.clamp(zero_count_mask(torch.zeros(0, dtype=dtype)).sum(), min=1) + 0 == 0


def test_a_zero_count_mask_divides_by_one() -> None:
    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    values = torch.zeros(0, requires_grad=True)
    mean = (values * mask).sum() / denominators(mask)
    assert type(mean) is torch.Tensor
    assert mean == 0
    mean.backward()
    assert values.grad is not None
    assert torch.tensor(3.0) / denominators(mask) == 3


def test_a_zero_count_mask_is_else_an_empty_mask() -> None:
    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    assert mask.dtype == torch.int32
    assert len(mask) == mask.numel() == 0
    for made in (mask[0:0], mask.float(), torch.cat([mask, torch.ones(2)]), mask.sum(dim=0) + 1):
        assert type(made) is torch.Tensor
    assert torch.cat([mask, torch.ones(2)]).tolist() == [1.0, 1.0]
    assert mask.sum().item() == 0
    with pytest.raises(ValueError, match=r"found one of shape \[2\]"):
        zero_count_mask(torch.ones(2))
