"""Times of passes by CUDA events: read once they are over, without waiting."""

from __future__ import annotations

import time

import pytest
import torch

from mcore_batching.megatron.cost_learning import _is_over, _mark, _seconds_between

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_pass_is_timed_on_the_device_while_the_host_goes_on() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):  # the first time loads the kernel
        torch.cuda.synchronize()
        started = time.perf_counter()
        start = _mark()
        for _ in range(100):
            matrix @ matrix
        end = _mark()
        is_over = _is_over(end)
        on_host = time.perf_counter() - started
    assert not is_over
    torch.cuda.synchronize()
    assert _is_over(end)
    assert on_host < _seconds_between(start, end) <= time.perf_counter() - started
