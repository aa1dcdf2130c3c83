"""Times of passes by CUDA events: read once they are over, without waiting."""

from __future__ import annotations

import time

import pytest
import torch

from mcore_batching.megatron.timing import mark, seconds_between

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
