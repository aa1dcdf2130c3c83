"""PyTorch's variable-length attention against scaled-dot-product attention, on a GPU."""

from __future__ import annotations

import pytest
import torch

from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron.attention import (
    RowGeometry,
    variable_length_kernel,
    why_not_variable_length,
)

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
    unit = 2 * context_parallel_size
    lengths = [unit * count for count in (1, 40, 7, 128)]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    for rank in range(context_parallel_size):
        runs = [
            (end - first, [(start, end)])
            for start, first, end in Slice(offsets, context_parallel_size, rank).chunks
        ]
        tokens = sum(queries for queries, _ in runs)
        query = torch.randn(tokens, 8, 64, **options)
        key, value = (torch.randn(offsets[-1], key_heads, 64, **options) for _ in range(2))
        assert not why_not_variable_length(query, value)
        row = RowGeometry(offsets, None, query.device, runs)
        results = []
        for compute in (
            lambda q, k, v, r=row: r.attend(q, *r.keys(k, v), 0.125),
            lambda q, k, v, r=row: r.attend_run_by_run(q, *r.keys(k, v), 0.125, 0.0),
        ):
            out = compute(query, key, value)
            results.append(
                (out, *torch.autograd.grad(out.float().square().sum(), (query, key, value)))
            )
        for kernel, plain in zip(*results, strict=True):
            scale = float(plain.detach().float().abs().max())
            assert float((kernel - plain).detach().float().abs().max()) <= TOLERANCE * scale
