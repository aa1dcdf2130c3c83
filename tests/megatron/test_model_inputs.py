"""Inputs of forward passes, joined; modes; what a share of the loss is attached to."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from mcore_batching.megatron.forward_only import _evaluation_mode
from mcore_batching.megatron.loss_shares import attached
from mcore_batching.megatron.run_pipeline import joined_multimodal_inputs


def test_multimodal_inputs_are_joined_name_by_name() -> None:
    pixels, more = torch.zeros(2, 3), torch.ones(1, 3)
    grid = torch.tensor([[1, 2]])
    joined = joined_multimodal_inputs([{"pixels": pixels, "grid": grid}, None, {"pixels": more}])
    assert joined.keys() == {"pixels", "grid"}
    assert torch.equal(joined["pixels"], torch.cat([pixels, more]))
    assert torch.equal(joined["grid"], grid)
    assert joined_multimodal_inputs([None, {}]) == {}


def test_a_share_is_attached_only_to_what_it_does_not_depend_on() -> None:
    """A zero gradient of logits that have one anyway would take as much memory as they do."""
    logits = torch.ones(3, requires_grad=True)
    share = (2.0 * logits).sum()
    assert attached(share, logits) is share
    for each, gradient in ((share, 2.0), (torch.zeros(()), 0.0)):
        logits.grad, unused = None, torch.full((2,), torch.inf, requires_grad=True)
        made = attached(each, logits, unused)
        assert made == each  # 0 times an infinite entry would be NaN
        made.backward()
        assert unused.grad is not None
        assert unused.grad.tolist() == [0.0] * 2
        assert logits.grad is not None
        assert logits.grad.tolist() == [gradient] * 3


def test_forward_passes_leave_each_module_in_its_mode() -> None:
    """Also one that is kept in evaluation mode, with dropout off, while others train."""
    frozen, dropout = (
        torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()),
        torch.nn.Dropout(),
    )
    first, second = torch.nn.Sequential(frozen, dropout), torch.nn.Identity().eval()
    config: Any = SimpleNamespace(timers="a clock")
    first.config = second.config = config
    frozen.eval()
    modules = [*first.modules(), *second.modules()]
    modes = [module.training for module in modules]
    with contextlib.suppress(ZeroDivisionError), _evaluation_mode([first, second]):
        assert not any(module.training for module in modules)
        assert config.timers is None
        raise ZeroDivisionError
    assert [module.training for module in modules] == modes == [True, *[False] * 3, True, False]
    assert config.timers == "a clock"
