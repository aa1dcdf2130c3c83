"""`calibrate` on the CPU stand-in, in a process of its own: it joins a process group."""

import subprocess
import sys

from mcore_batching.megatron.calibration import rows_to_time

PROGRAM = """
import torch
from mcore_batching.megatron import cpu
cpu.enable(force=True)
from mcore_batching.megatron.calibration import LayerStack, calibrate
stack = LayerStack(
    num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
    num_query_groups=2, dtype=torch.float32,
)
fit, timings = calibrate(stack, max_tokens=2048, repeats=2)
assert {len(t.lengths) for t in timings} == {1, 4, 16}, timings
assert fit.cost_model.linear == 1.0
assert 0 < fit.seconds_per_unit < 1
assert 0.2 < fit.cost_model.backward_ratio < 20, fit
print("fitted", fit)
"""


def test_a_real_layer_stack_is_timed_and_fitted() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "fitted" in done.stdout


def test_rows_differ_in_tokens_and_in_the_lengths_of_their_sequences() -> None:
    rows = rows_to_time(4096)
    assert max(map(sum, rows)) == 4096
    assert len({sum(row) for row in rows}) == 5
    assert {len(row) for row in rows if sum(row) == 4096} == {1, 4, 16}
    assert all(min(row) >= 16 for row in rows)
