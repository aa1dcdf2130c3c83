"""Logits that are made where something else than log-probs reads them; options that end with their
step; the length that RoPE is made for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.packing import pack
from megatron.core import parallel_state

from mcore_batching.megatron import job
from mcore_batching.megatron.log_probs import response_log_probs
from mcore_batching.megatron.logits import FusedLogits, noting_use
from mcore_batching.megatron.run_pipeline import run_for_losses


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[None]:
    """Megatron's, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    job._memory = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def fused(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[FusedLogits, list[None]]:
    """Logits that are not made yet, and an entry for each time that they are."""
    times: list[None] = []
    logits = FusedLogits(
        hidden,
        weight,
        sequence_parallel=False,
        dtype=torch.float32,
        multiply=lambda by_token: (by_token @ weight.t(), None),
        when_made=lambda: times.append(None),
    )
    return logits, times


@pytest.mark.usefixtures("groups")
def test_logits_are_made_once_for_what_else_reads_them() -> None:
    """Not for their shape or type; what is written over them stays, also for log-probs."""
    hidden, weight = torch.randn(1, 6, 4), torch.randn(8, 4)
    logits, times = fused(hidden, weight)
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.size(2), logits.dtype) == ((1, 6, 8), 8, torch.float32)
    assert (logits.device.type, logits.requires_grad, times) == ("cpu", False, [])
    expected = hidden @ weight.t()
    torch.testing.assert_close(logits[:, 1:3], expected[:, 1:3])
    torch.testing.assert_close(torch.cat([logits, logits]), torch.cat([expected, expected]))
    logits.div_(2.0)
    torch.testing.assert_close(logits.whole, expected / 2)
    torch.testing.assert_close(logits.log_softmax(-1), (expected / 2).log_softmax(-1))
    samples = {"tokens": [torch.arange(6)], "total_lengths": [6], "response_lengths": [5]}
    row = pack(samples, sample_indices=[0])
    found, halved = (response_log_probs(each, row)[0] for each in (logits, expected / 2))
    torch.testing.assert_close(found, halved)
    assert len(times) == 1


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_loss_may_read_logits_beside_log_probs(reads_first: bool) -> None:
    """With the same gradients, in whichever order it does."""
    samples = {"tokens": [torch.arange(6)], "total_lengths": [6], "response_lengths": [5]}
    row, found = pack(samples, sample_indices=[0]), []
    for is_fused in (True, False):
        torch.manual_seed(0)
        factors = torch.randn(1, 6, 4), torch.randn(8, 4)
        hidden, weight = (each.requires_grad_() for each in factors)
        logits = fused(hidden, weight)[0] if is_fused else hidden @ weight.t()
        spread = logits.square().mean() if reads_first else 0.0
        share = response_log_probs(logits, row, overwrite_logits=is_fused)[0].sum() + spread
        if not reads_first:
            share = share + logits.square().mean()
        found.append((share, *torch.autograd.grad(share, (hidden, weight))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("groups")
def test_temperatures_are_of_the_innermost_step() -> None:
    """Also after one that failed inside of another."""
    samples = {"tokens": [torch.arange(3)], "total_lengths": [3], "response_lengths": [1]}
    row, logits = pack(samples, sample_indices=[0]), torch.zeros(1, 3, 8)
    with noting_use() as outer:
        with contextlib.suppress(ZeroDivisionError), noting_use() as inner:
            response_log_probs(logits, row, temperature=2.0)
            raise ZeroDivisionError
        response_log_probs(logits, row)
    response_log_probs(logits, row, temperature=0.7)
    assert (outer.temperatures, inner.temperatures) == ({1.0}, {2.0})


class _Chunk(torch.nn.Module):
    """A model that returns the length of the longest sequence, as its layers are given it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None, **settings)

    def forward(self, *, packed_seq_params: Any, **unused: Any) -> int:
        return int(packed_seq_params.max_seqlen_q)


@pytest.mark.usefixtures("groups")
def test_fused_rope_sees_few_lengths() -> None:
    """An eighth longer at most; unfused, which goes by the exact length, the row's own."""
    own = job.job_of(SimpleNamespace(max_tokens_per_gpu=1 << 18))

    def length_in(length: int, **settings: Any) -> int:
        samples = {"tokens": [torch.zeros(length, dtype=torch.int64)], "total_lengths": [length]}
        row = pack(samples | {"response_lengths": [1]}, sample_indices=[0])
        return int(run_for_losses(own, _Chunk(**settings), row)[0])

    lengths = range(131072 - 10 * 305, 131072 + 10 * 305, 305)
    rounded = [length_in(length, apply_rope_fusion=True) for length in lengths]
    assert len(lengths) == 20
    assert len({*rounded}) == 2
    assert all(own <= given <= 9 / 8 * own for own, given in zip(lengths, rounded, strict=True))
    assert length_in(131073, apply_rope_fusion=False) == 131073
