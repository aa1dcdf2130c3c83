"""On a CUDA device: PyTorch's variable-length attention against scaled-dot-product attention, and
times of passes by events, read once they are over, without waiting."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron.attention import (
    RowGeometry,
    variable_length_kernel,
    why_not_variable_length,
)
from mcore_batching.megatron.timing import mark, seconds_between

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bfloat16 keeps 8 bits: outputs of both kernels are rounded once from float32 sums of values of
# order 1, so they may differ by a unit in the last place, 2^-8, and by as much again.
TOLERANCE = 2**-7


@pytest.mark.parametrize("context_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_variable_length_kernel_equals_run_by_run(
    context_parallel_size: int, key_heads: int
) -> None:
    if variable_length_kernel() is None:
        pytest.skip("this PyTorch has no variable-length attention that fits")
    lengths = [2 * context_parallel_size * count for count in (1, 40, 7, 128)]
    offsets = [*itertools.accumulate(lengths, initial=0)]
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    for rank in range(context_parallel_size):
        runs = [
            (end - first, [(start, end)])
            for start, first, end in Slice(offsets, context_parallel_size, rank).chunks
        ]
        query = torch.randn(sum(queries for queries, _ in runs), 8, 64, **options)
        key, value = (torch.randn(offsets[-1], key_heads, 64, **options) for _ in range(2))
        assert not why_not_variable_length(query, value)
        row = RowGeometry(offsets, None, query.device, runs)
        results = []
        for attend, dropout in ((row.attend, ()), (row.attend_run_by_run, (0.0,))):
            out = attend(query, *row.keys(key, value), 0.125, *dropout)
            gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value))
            results.append((out, *gradients))
        for kernel, plain in zip(*results, strict=True):
            scale = float(plain.detach().float().abs().max())
            assert float((kernel - plain).detach().float().abs().max()) <= TOLERANCE * scale


def test_a_pass_is_timed_on_the_device_while_the_host_goes_on() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):  # the first time loads the kernel
        torch.cuda.synchronize()
        started = time.perf_counter()
        start = mark()
        for _ in range(100):
            matrix @ matrix
        end = mark()
        was_over = end.query()
        on_host = time.perf_counter() - started
    assert not was_over
    torch.cuda.synchronize()
    assert end.query()
    assert on_host < seconds_between(start, end) <= time.perf_counter() - started
