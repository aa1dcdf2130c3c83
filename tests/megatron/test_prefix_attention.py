"""Which layers run rows with branches, and how keys are gathered for those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn

from mcore_batching.megatron.attention import RowGeometry, Run
from mcore_batching.megatron.prefix_attention import _GatherStretches, why_no_branches


class WithOffsets(nn.Module):
    def forward(self, hidden: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        return hidden


class WithAnything(nn.Module):
    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return hidden


class Attention(WithOffsets):
    """Named as Megatron's, with a forward pass of another class."""


@pytest.mark.parametrize("kind", [WithOffsets, WithAnything, Attention])
def test_a_layer_of_the_callers_own_may_not_follow_branches(kind: type[nn.Module]) -> None:
    layers = nn.ModuleDict({"norm": nn.LayerNorm(4), "none": IdentityOp(), "mixer": kind()})
    owner = "WithAnything" if kind is WithAnything else "WithOffsets"
    assert f"mixer is a {owner}, which is not known to follow" in why_no_branches([layers])
    del layers["mixer"]
    assert why_no_branches([layers]) == ""


def test_stretches_behind_each_other_are_copied_once() -> None:
    """The kernel takes gathered keys as they are; under context parallelism it gathers them."""
    for runs, index in (
        ([Run(0, 3, 0, 3), Run(3, 5, 3, 8)], None),
        ([Run(0, 3, 0, 3), Run(3, 5, 0, 5)], [0, 1, 2, 0, 1, 2, 3, 4]),
    ):
        found = RowGeometry([], 1, runs, torch.device("cpu")).key_index
        assert (None if found is None else found.tolist()) == index


def test_gradients_of_a_beginning_are_added_in_float32() -> None:
    rows = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    stretches = [(0, 1), (0, 3), (0, 2)]
    made = _GatherStretches.apply(rows, stretches)
    assert made.shape == (6, 1)
    # In bfloat16 neither of the two small ones would be added to 256.
    made.backward(torch.tensor([256.0, 1, 5, 7, 1, 11]).bfloat16()[:, None])
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [258.0, 16.0, 7.0]
